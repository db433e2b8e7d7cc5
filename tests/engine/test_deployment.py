"""Deployments of real vLLM ranks on the CPU: every mode, both hops of virtual nodes, and a rank that dies."""

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
import psutil
import pytest
from ruamel.yaml import YAML

from ep_backend.demo import PRESET, write_deployment
from ep_backend.deployment.agents import all_statuses
from ep_backend.deployment.client import complete
from ep_backend.deployment.commands import down
from ep_backend.deployment.processes import free_ports, session_members, shared_memory_of
from ep_backend.deployment.rank_status import RankStatus
from ep_backend.deployment.state import RunState, read_state
from tests.engine.conftest import TOKENS, Served, edit

pytest.importorskip("vllm", reason="these tests need vLLM: run ./ep test")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

Up = Callable[[Path], RunState]


def answers(state: RunState, prompts: list[str]) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: complete(state, prompt, TOKENS), prompts))


def cores_used(pids: list[int], seconds: float) -> float:
    def spent() -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)

    time.sleep(3.0)  # vLLM's queues poll for a second after the last read
    before, started = spent(), time.monotonic()
    time.sleep(seconds)
    return (spent() - before) / (time.monotonic() - started)


def ep_backend(*arguments: str) -> str:
    command = [sys.executable, "-m", "ep_backend", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def assert_all_moved(statuses: list[RankStatus], roles: dict[str, tuple[str, ...]]) -> None:
    """By role, its mode and the paths that its records take."""
    for status in statuses:
        mode, *paths = roles[status.role or ""]
        assert status.mode_executed == mode, status
        counters = status.modes[mode]
        assert counters.dispatches and counters.combines, status
        assert all(counters.records[path] and counters.bytes[path] for path in paths), status


def unified_file(folder: Path, checkpoint: Path, mode: str, launches: int) -> Path:
    """Four ranks as two nodes of two: virtual nodes of one launch, or a head and a headless launch."""
    yaml = YAML(typ="safe")
    document: dict[str, Any] = yaml.load(PRESET)
    role = document["roles"]["prefill"]
    role["data_parallel"] = 4
    role["nodes"] = launches
    role["ep"] = {**role["ep"], "mode": mode, "gpus_per_node": 2}
    document.update(name=f"two-nodes-{mode}", roles={"unified": role}, router={"port": free_ports(1)})
    document["topology"]["nodes"] = launches
    document["model"]["path"] = str(checkpoint)
    file = folder / f"{mode}.yaml"
    yaml.dump(document, file)
    return file


def test_a_pair_serves_survives_misuse_and_a_dead_rank_ends_it(served: Served, up: Up, tmp_path: Path) -> None:
    file = write_deployment(tmp_path, served.checkpoint, "direct", "low_latency", break_combine=False)
    edit(file, {"roles.decode.ep.layout": "compact"})
    state = up(file)
    decode = next(instance for instance in state.instances if instance.role == "decode")
    assert "mode low_latency (wish low_latency), compact rows" in decode.log.read_text()
    assert answers(state, served.prompts) == served.expected
    roles = {"prefill": ("direct", "local", "scale_up"), "decode": ("low_latency", "local", "scale_out")}
    assert_all_moved(all_statuses(state), roles)
    assert ep_backend("ask", str(file), "What is expert parallelism?").strip()
    assert "low_latency *" in ep_backend("status", str(file))

    leaders = [instance.pid for instance in state.instances]
    assert cores_used(session_members(leaders), 5.0) < 1.0, "idle ranks poll without a rest"
    shared = shared_memory_of(session_members(leaders))
    assert shared
    victim = next(status.pid for status in all_statuses(state) if status.role == "decode" and status.rank == 1)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(complete, state, served.prompts[0], 200)
        time.sleep(1.0)
        assert not request.done()
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            request.result(timeout=60)
    deadline = time.monotonic() + 60
    while (failed := read_state(state.name)) is None or failed.phase != "failed":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert f"decode lost rank 1 (process {victim} " in (failed.error or "")
    assert session_members(leaders) == []
    assert [file for file in shared if file.exists()] == []

    again = up(write_deployment(tmp_path, served.checkpoint, "normal", "hybrid", break_combine=False))
    assert answers(again, served.prompts) == served.expected
    roles = {"prefill": ("normal", "local", "scale_up"), "decode": ("hybrid", "local", "scale_out", "forwarded")}
    assert_all_moved(all_statuses(again), roles)
    leaders = [instance.pid for instance in again.instances]
    shared = shared_memory_of(session_members(leaders))
    down(again.name)
    assert session_members(leaders) == []
    assert [file for file in shared if file.exists()] == []


@pytest.mark.parametrize(("mode", "launches"), [("normal", 1), ("hybrid", 2)])
def test_both_hops_run_on_two_nodes(mode: str, launches: int, served: Served, up: Up, tmp_path: Path) -> None:
    state = up(unified_file(tmp_path, served.checkpoint, mode, launches))
    assert len(state.instances) == launches
    assert answers(state, served.prompts) == served.expected
    statuses = all_statuses(state)
    assert [status.world_size for status in statuses] == [4] * 4
    assert_all_moved(statuses, {"unified": (mode, "local", "scale_up", "scale_out", "forwarded")})
