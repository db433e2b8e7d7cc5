"""Deployments of real SGLang ranks on the CPU: both families in one instance, flips, virtual nodes, and a rank that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from ep_backend.deployment.agents import all_statuses
from ep_backend.deployment.client import complete
from ep_backend.deployment.commands import down
from ep_backend.deployment.processes import free_ports, session_members, shared_memory_of
from ep_backend.deployment.state import RunState, read_state
from tests.engine.conftest import TOKENS, Served

pytest.importorskip("sglang", reason="these tests need SGLang, in an environment of its own: run ./ep test sglang")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

PRESET = Path(__file__).parents[2] / "deploy" / "local-cpu-sglang.yaml"
Up = Callable[[Path], RunState]


def deployment_file(folder: Path, checkpoint: Path, name: str, **role: Any) -> Path:
    """The shipped deployment with this checkpoint and these keys of its role."""
    yaml = YAML(typ="safe")
    document: dict[str, Any] = yaml.load(PRESET)
    document.update(name=name, router={"port": free_ports(1)})
    document["model"]["path"] = str(checkpoint)
    document["roles"]["unified"].update(role)
    file = folder / f"{name}.yaml"
    yaml.dump(document, file)
    return file


def answers(state: RunState, served: Served) -> list[list[int]]:
    with ThreadPoolExecutor(len(served.prompts)) as pool:
        return list(pool.map(lambda prompt: complete(state, prompt, TOKENS), served.prompts))


def dispatches(state: RunState, mode: str) -> list[int]:
    """Of each rank."""
    return [rank.modes[mode].dispatches if mode in rank.modes else 0 for rank in all_statuses(state)]


def command_line(*arguments: str) -> str:
    command = [sys.executable, "-m", "ep_backend", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_one_instance_serves_with_both_families_and_flips_each(served_qwen: Served, up: Up, tmp_path: Path) -> None:
    file = deployment_file(tmp_path, served_qwen.checkpoint, "sglang")
    state = up(file)
    assert answers(state, served_qwen) == served_qwen.expected
    ranks = all_statuses(state)
    assert [rank.rank for rank in ranks] == [0, 1] and all(rank.engine.startswith("sglang ") for rank in ranks)
    for rank in ranks:
        assert {mode for mode, counters in rank.modes.items() if counters.dispatches} == {"direct", "low_latency"}
        for mode in ("direct", "low_latency"):
            counters = rank.modes[mode]
            assert counters.combines and all(counters.records[path] and counters.bytes[path] for path in ("local", "scale_up"))

    yaml = YAML(typ="safe")
    document = yaml.load(file)
    for mode, same_family in (("normal", "direct"), ("hybrid", "low_latency")):
        document["roles"]["unified"]["ep"]["mode"] = mode
        yaml.dump(document, file)
        assert f"-> {mode}: applied after epoch" in command_line("flip", str(file))
        before, before_other = dispatches(state, mode), dispatches(state, same_family)
        assert answers(state, served_qwen) == served_qwen.expected
        after, after_other = dispatches(state, mode), dispatches(state, same_family)
        assert all(new > old for old, new in zip(before, after, strict=True)), (mode, before, after)
        assert before_other == after_other, (mode, before_other, after_other)
        assert len({rank.flip.agreed_epoch for rank in all_statuses(state)}) == 1
    assert command_line("ask", str(file), "What is expert parallelism?").strip()
    assert "hybrid *" in command_line("status", str(file))

    leaders = [instance.pid for instance in state.instances]
    shared = shared_memory_of(session_members(leaders))
    down(state.name)
    assert session_members(leaders) == []
    assert [file for file in shared if file.exists()] == []


def test_two_virtual_nodes_and_a_dead_rank(served_qwen: Served, up: Up, tmp_path: Path) -> None:
    ep = {"mode": "hybrid", "max_tokens": 256, "gpus_per_node": 1}
    state = up(deployment_file(tmp_path, served_qwen.checkpoint, "sglang-nodes", ep=ep))
    assert answers(state, served_qwen) == served_qwen.expected
    ranks = all_statuses(state)
    assert all(rank.modes["hybrid"].records["scale_out"] for rank in ranks)

    leaders = [instance.pid for instance in state.instances]
    shared = shared_memory_of(session_members(leaders))
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(complete, state, served_qwen.prompts[0], 200)
        time.sleep(0.3)
        assert not request.done()
        os.kill(ranks[1].pid, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            request.result(timeout=60)
    deadline = time.monotonic() + 60
    while (failed := read_state(state.name)) is None or failed.phase != "failed":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert (failed.error or "").startswith("unified ")
    assert session_members(leaders) == []
    assert [file for file in shared if file.exists()] == []
