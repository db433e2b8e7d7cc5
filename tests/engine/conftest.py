"""A real engine on a real checkpoint: what the engine tests share."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from ep_backend.checkpoint import Model, write_checkpoint
from ep_backend.demo import make_prompts
from ep_backend.deployment.commands import down, up_detached
from ep_backend.deployment.state import RunState
from ep_backend.reference import greedy_reference

TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Served:
    """A checkpoint, prompts, and what transformers answers to them."""

    checkpoint: Path
    prompts: list[str]
    expected: list[list[int]]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return _serve(tmp_path_factory.mktemp("engine"), "deepseek-v3")


@pytest.fixture(scope="session")
def served_qwen(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return _serve(tmp_path_factory.mktemp("engine"), "qwen3-moe")


def _serve(folder: Path, model: Model) -> Served:
    write_checkpoint(folder / "checkpoint", model=model)
    prompts = make_prompts()[::4]
    reference = greedy_reference(folder / "checkpoint", prompts, TOKENS, lambda: None)
    return Served(folder / "checkpoint", prompts, reference.tokens)


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], RunState]]:
    """Starts deployments below the test's folder, and stops what still runs at its end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names: list[str] = []

    def start(file: Path) -> RunState:
        state = up_detached(file, Console(quiet=True))
        names.append(state.name)
        return state

    yield start
    for name in names:
        down(name)
