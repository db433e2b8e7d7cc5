"""A flip happens on every rank at the same step or on none; real buffers, agents and control service, no engine."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.control.conftest import FILE, NOBODY, Service
from tests.control.instance import Instance, Step, instance

StartService = Callable[..., Service]
UNIFIED = """\
name: test
topology: {device: cpu}
model: {path: model}
roles:
  unified:
    data_parallel: 2
    ep: {mode: normal, max_tokens: 2048, gpus_per_node: 1}
control: {key: correct horse, flip_timeout_s: 40}
"""
IMPATIENT = FILE.replace("flip_timeout_s: 40", "flip_timeout_s: 4")
PAIRS = {"prefill": ("direct", "normal"), "decode": ("low_latency", "hybrid")}


def assert_same_steps(ran: Instance) -> list[Step]:
    """Every rank ran the same modes in the same epochs; those of one of them."""
    first, *others = ran.steps
    assert first and all(other == first for other in others)
    return first


def changes(steps: list[Step]) -> list[Step]:
    return [after for before, after in pairwise(steps) if before[1] != after[1]]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_flips_under_load(ranks: Any, service: StartService, tmp_path: Path, role: str, size: int) -> None:
    first, second = PAIRS[role]
    with instance(ranks(size), role, first, tmp_path / "stop", busy=True) as ran:
        control = service(**{role: ran})
        epochs = []
        for mode in [second, first] * 5:
            result = control.flip(role, mode)
            assert result.status_code == 200, result.text
            assert result.json()["outcome"] == "applied"
            epochs.append(result.json()["epoch"])
            now = control.role(role)
            assert [rank["flip"]["agreed_epoch"] for rank in now["ranks"]] == [epochs[-1]] * size
            assert now["mode_desired"] == now["mode_executed"] == mode and not now["drift"]
        counted = [now["ranks"][0]["modes"][mode]["dispatches"] for mode in (first, second)]
        assert all(counted)
    # The round after the dispatch that agreed is the first in the new mode.
    steps = assert_same_steps(ran)
    assert [(epoch - 1, mode) for epoch, mode in changes(steps)] == list(zip(epochs, [second, first] * 5, strict=True))


def test_an_idle_instance_is_made_to_step(ranks: Any, service: StartService, tmp_path: Path) -> None:
    with instance(ranks(2), "decode", "low_latency", tmp_path / "stop", busy=False) as ran:
        control = service(decode=ran)
        assert control.flip("decode", "hybrid").json()["outcome"] == "applied"
        assert control.flip("decode", "auto").json()["outcome"] == "applied"
        assert control.role("decode")["mode_executed"] == "low_latency"
        assert control.flip("decode", "auto").json()["outcome"] == "unchanged"
    assert [mode for _, mode in changes(assert_same_steps(ran))] == ["hybrid", "low_latency"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_idle_pair_of_sglang_is_made_to_step_by_its_router(
    ranks: Any, service: StartService, tmp_path: Path, role: str
) -> None:
    """Its instances refuse prompts that no router has brought together."""
    eager = "engine: sglang\n    args: {cuda-graph-backend-decode: disabled, chunked-prefill-size: 4096}\n    data_parallel: 2"
    file = IMPATIENT.replace("data_parallel: 2", eager).replace("device: cpu", "device: cuda")
    first, second = PAIRS[role]
    with instance(ranks(2), role, first, tmp_path / "stop", busy=False) as ran:
        control = service(file, ran.url, **{role: Instance(ran.agents, NOBODY)})
        answer = control.flip(role, second)
        assert answer.status_code == 200 and answer.json()["outcome"] == "applied", answer.text


def test_a_rank_that_cannot_prepare_keeps_all_in_the_old_mode(ranks: Any, service: StartService, tmp_path: Path) -> None:
    refuses = {1: "its graphs hold low_latency"}
    with instance(ranks(2), "decode", "low_latency", tmp_path / "stop", busy=True, refuses=refuses) as ran:
        control = service(decode=ran)
        for query in ({"dry_run": "true"}, {}):
            answer = control.flip("decode", "hybrid", **query)
            assert answer.status_code == 409
            assert answer.json()["detail"] == f"decode rank 1 ({ran.agents[1]}) refuses: its graphs hold low_latency"
        now = control.role("decode")
        assert now["mode_desired"] == now["mode_executed"] == "low_latency" and not now["drift"]
        assert [rank["flip"]["token"] for rank in now["ranks"]] == [0, 0]
        time.sleep(0.2)
    assert changes(assert_same_steps(ran)) == []


def test_a_unified_role_keeps_the_modes_that_it_was_started_for(ranks: Any, service: StartService, tmp_path: Path) -> None:
    """hybrid is of both families where there are several nodes; the file with it would start the other one."""
    modes = ["normal", "direct", "hybrid", "auto"]
    with instance(ranks(2), "prefill", "normal", tmp_path / "stop", busy=True) as ran:
        control = service(UNIFIED, unified=ran)
        for mode in ("hybrid", "direct", "hybrid", "normal"):
            assert control.role("unified")["allowed"] == modes
            answer = control.apply(UNIFIED.replace("mode: normal", f"mode: {mode}"))
            assert answer.status_code == 200, answer.text
            assert [flip["outcome"] for flip in answer.json()["flips"]] == ["applied"]
            assert control.role("unified")["mode_executed"] == mode
        assert control.flip("unified", "hybrid").status_code == 200
        assert control.flip("unified", "low_latency").status_code == 422
        # Started anew as hybrid, it is of the other family.
        more = UNIFIED.replace("mode: normal, max_tokens: 2048", "mode: hybrid, max_tokens: 4096")
        anew = control.apply(more, restart="true")
        assert anew.status_code == 200 and anew.json()["restarted"] == ["unified"], anew.text
        assert control.role("unified")["allowed"] == ["low_latency", "hybrid"]
    assert [mode for _, mode in changes(assert_same_steps(ran))] == ["hybrid", "direct", "hybrid", "normal", "hybrid"]


def test_a_stopped_rank_fails_the_flip_in_time_and_changes_nothing(ranks: Any, service: StartService, tmp_path: Path) -> None:
    pool = ranks(2)
    with instance(pool, "prefill", "direct", tmp_path / "stop", busy=True) as ran:
        control = service(prefill=ran)
        deadline = time.monotonic() + 30
        while not control.role("prefill")["ranks"][1]["modes"]:
            assert time.monotonic() < deadline
        os.kill(pool.pids[1], signal.SIGSTOP)
        try:
            started = time.monotonic()
            answer = control.flip("prefill", "normal")
            assert time.monotonic() - started < 30
            assert answer.status_code == 504
            said = f"prefill rank 1 ({ran.agents[1]}) does not answer: its process {pool.pids[1]} is stopped"
            assert said in answer.json()["detail"]
            now = control.role("prefill")
            assert now["ranks"][1]["modes"]  # what it said last
            assert "rank 1: has been silent for" in now["drift"][0]
            # Another try need not wait to find out.
            again = control.flip("prefill", "normal")
            assert again.status_code == 504 and "has been silent for" in again.text
            assert time.monotonic() - started < 40
        finally:
            os.kill(pool.pids[1], signal.SIGCONT)
        deadline = time.monotonic() + 10
        while control.role("prefill")["drift"] and time.monotonic() < deadline:
            time.sleep(0.1)
        now = control.role("prefill")
        assert now["mode_desired"] == now["mode_executed"] == "direct" and not now["drift"]
        assert control.flip("prefill", "normal").json()["outcome"] == "applied"
    assert [mode for _, mode in changes(assert_same_steps(ran))] == ["normal"]


def test_without_steps_the_flip_is_abandoned(ranks: Any, service: StartService, tmp_path: Path) -> None:
    with instance(ranks(2), "prefill", "direct", tmp_path / "stop", busy=False) as ran:
        control = service(IMPATIENT, prefill=Instance(ran.agents, NOBODY))
        answer = control.flip("prefill", "normal")
        assert answer.status_code == 504
        for rank in (0, 1):
            assert f"prefill rank {rank} ({ran.agents[rank]}) made no dispatch that all ranks proposed normal in" in answer.text
        now = control.role("prefill")
        assert now["mode_desired"] == "direct" and [rank["flip"]["proposed"] for rank in now["ranks"]] == [None, None]
    assert ran.steps == [[], []]


def test_a_flip_after_an_abandoned_one_has_another_token(
    ranks: Any, service: StartService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks refuse the token that was withdrawn last, for it may come late; drawn at random, it came back now and then."""
    monkeypatch.setattr(random, "sample", lambda population, count: population[:count])
    with instance(ranks(2), "prefill", "direct", tmp_path / "stop", busy=False) as ran:
        control = service(IMPATIENT, prefill=Instance(ran.agents, NOBODY))
        for _ in range(2):
            assert "made no dispatch that all ranks proposed normal in" in control.flip("prefill", "normal").text


def test_one_change_at_a_time(ranks: Any, service: StartService, tmp_path: Path) -> None:
    with instance(ranks(2), "prefill", "direct", tmp_path / "stop", busy=False) as ran, ThreadPoolExecutor(1) as thread:
        control = service(IMPATIENT, prefill=Instance(ran.agents, NOBODY))
        slow = thread.submit(control.flip, "prefill", "normal")
        deadline = time.monotonic() + 10
        while not (pending := control.role("prefill")["pending"]):
            assert time.monotonic() < deadline
        assert pending["mode"] == "normal"
        second = control.flip("decode", "hybrid")
        assert second.status_code == 409 and "another change of test is under way" in second.text
        assert slow.result().status_code == 504
    assert changes(ran.steps[0]) == []
