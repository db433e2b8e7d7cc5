"""A real engine on a real checkpoint: what the engine tests share."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from ruamel.yaml import YAML

from ep_backend.checkpoint import Model, write_checkpoint
from ep_backend.demo import make_prompts
from ep_backend.deployment.commands import down, up_detached
from ep_backend.deployment.state import RunState

TOKENS = 16
LONG = os.environ.get("EP_TEST_LONG") == "1"
REFERENCE = """
import json, sys
from pathlib import Path
from ep_backend.reference import greedy_reference
folder, prompts, tokens = json.load(sys.stdin)
print(json.dumps(greedy_reference(Path(folder), prompts, tokens, lambda: None).tokens))
"""


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


def edit(file: Path, changes: dict[str, Any]) -> None:
    """Set values at places like "router.hold"."""
    yaml = YAML(typ="safe")
    yaml.representer.ignore_aliases = lambda _: True
    document = yaml.load(file)
    for place, value in changes.items():
        *path, key = place.split(".")
        at = document
        for part in path:
            at = at[part]
        at[key] = value
    yaml.dump(document, file)


def _serve(folder: Path, model: Model) -> Served:
    write_checkpoint(folder / "checkpoint", model=model)
    prompts = make_prompts()[::4]
    # In a process of its own: engines that other tests import here change what transformers computes.
    asked = json.dumps([str(folder / "checkpoint"), prompts, TOKENS])
    done = subprocess.run([sys.executable, "-c", REFERENCE], input=asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return Served(folder / "checkpoint", prompts, json.loads(done.stdout.splitlines()[-1]))


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
