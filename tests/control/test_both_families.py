"""A role that serves both families, as SGLang's unified one: a mode is for its own family's batches, the others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ep_backend.control.models import RoleStatus
from ep_backend.deployment.view import modes_in_words
from tests.control.conftest import Service
from tests.control.instance import instance

FILE = """\
name: test
topology: {device: cpu}
model: {path: model}
roles:
  unified:
    engine: sglang
    data_parallel: 2
    ep: {mode: auto, max_tokens: 2048}
    args: {chunked-prefill-size: 4096}
control: {key: correct horse, flip_timeout_s: 40}
"""


def test_a_mode_of_either_family_without_a_restart(ranks: Any, service: Callable[..., Service], tmp_path: Path) -> None:
    with instance(ranks(2), "unified", "auto", tmp_path / "stop", busy=False) as ran:
        control = service(file=FILE, unified=ran)
        for mode in ("normal", "hybrid", "auto", "direct"):
            answer = control.flip("unified", mode)
            assert answer.status_code == 200 and answer.json()["outcome"] == "applied", answer.text
            now = control.role("unified")
            # Nobody counts it as drift that the last batch was of the other family.
            assert now["mode_desired"] == mode and not now["drift"]
            assert set(now["allowed"]) == {"normal", "direct", "low_latency", "hybrid", "auto"}
    first, second = ran.steps
    assert first == second
    assert {mode for _, mode in first[::4]} == {"direct", "normal"}
    assert {mode for at, (_, mode) in enumerate(first) if at % 4} == {"low_latency", "hybrid"}


@pytest.mark.parametrize(
    ("engine", "desired", "executed", "words"),
    [
        ("sglang", "normal", "low_latency", "executed low_latency last, for a batch of decode, which normal is not for"),
        ("sglang", "normal", "normal", "executed normal"),
        ("sglang", "auto", "hybrid", "executed hybrid"),
        ("sglang", "normal", None, "executed none, or not the same on all ranks"),
        ("vllm", "normal", "low_latency", "executed low_latency"),
    ],
)
def test_status_says_when_the_last_batch_was_of_the_other_family(engine: Any, desired: Any, executed: Any, words: str) -> None:
    role = RoleStatus(role="unified", engine=engine, mode_desired=desired, mode_executed=executed, allowed=[], ranks=[])
    assert modes_in_words(role) == f"mode {desired}, {words}"
