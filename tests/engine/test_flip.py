"""Flips of a deployment of real vLLM ranks on the CPU, under load: no request lost, no wrong token."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ep_backend.control.drain import Limits, drain
from ep_backend.control.ranks import Ranks
from ep_backend.control.vllm_admin import VllmAdmin
from ep_backend.demo import write_deployment
from ep_backend.deployment.rank_status import RankStatus
from ep_backend.deployment.schema import ModeName
from ep_backend.deployment.state import RunState
from tests.engine.conftest import LONG, TOKENS, Served, edit

pytest.importorskip("vllm", reason="these tests need vLLM: run ./ep test")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

CLIENTS, FLIPS = 8, 10
SECONDS = 180.0 if LONG else 0.0
KEY = "a key of this test"
CYCLES = {"prefill": ("normal", "direct"), "decode": ("hybrid", "low_latency")}


class Clients:
    """Ask the same prompts again and again, streaming, until the block ends; every answer is compared."""

    def __init__(self, state: RunState, served: Served) -> None:
        self._state, self._served = state, served
        self._stop = threading.Event()
        self.right = 0
        self.wrong: list[str] = []

    def __enter__(self) -> Clients:
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._running = [self._pool.submit(self._ask, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for client in self._running:
            client.result()

    def wait_for_more(self, answers: int, timeout_s: float = 300.0) -> None:
        goal, deadline = self.right + answers, time.monotonic() + timeout_s
        while self.right < goal:
            assert time.monotonic() < deadline, f"{self.right} answers, waited for {goal}; wrong: {self.wrong}"
            time.sleep(0.1)

    def _ask(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            index = turn % len(self._served.prompts)
            try:
                tokens = list(self._stream(self._served.prompts[index]))
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.wrong.append(f"prompt {index}: {error!r}")
                return
            if tokens == self._served.expected[index]:
                self.right += 1
            else:
                self.wrong.append(f"prompt {index}: {tokens}")
            turn += 1

    def _stream(self, prompt: str) -> Iterator[int]:
        body = {
            **{"model": self._state.served_name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0},
            **{"ignore_eos": True, "return_token_ids": True, "stream": True},
        }
        with httpx.stream("POST", f"{self._state.url}/v1/completions", json=body, timeout=900) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]


class Control:
    """The control service, as curl would ask it."""

    def __init__(self, state: RunState) -> None:
        self.url = state.control_url or ""
        self._client = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300)

    def flip(self, role: str, mode: str) -> httpx.Response:
        return self._client.post(f"/v1/roles/{role}/mode", json={"mode": mode})

    def apply(self, file: Path, *, restart: bool) -> httpx.Response:
        headers = {"Content-Type": "application/yaml"}
        query = {"restart": restart}
        return self._client.post("/v1/deployment", content=file.read_bytes(), headers=headers, params=query, timeout=900)

    def role(self, name: str) -> Any:
        roles = self._client.get("/v1/status").raise_for_status().json()["roles"]
        return next(role for role in roles if role["role"] == name)

    def dispatches(self, role: str, mode: str) -> list[int]:
        return [rank["modes"].get(mode, {}).get("dispatches", 0) for rank in self.role(role)["ranks"]]


@pytest.fixture
def file(served: Served, tmp_path: Path) -> Path:
    file = write_deployment(tmp_path, served.checkpoint, "direct", "low_latency", break_combine=False)
    edit(file, {"name": "flips", "control": {"key": KEY, "flip_timeout_s": 120.0}})
    # The routes that drain it, and time to find out that a rank is stopped before its peer gives up.
    edit(file, {"roles.decode.env.VLLM_SERVER_DEV_MODE": "1", "roles.decode.ep.timeout_s": 180.0})
    return file


def test_flips_under_load(served: Served, up: Callable[[Path], RunState], file: Path) -> None:
    state = up(file)
    control = Control(state)
    started = time.monotonic()
    with Clients(state, served) as clients:
        clients.wait_for_more(CLIENTS)
        for number in range(FLIPS):
            for role, cycle in CYCLES.items():
                mode = cycle[number % 2]
                before = control.dispatches(role, mode)
                answer = control.flip(role, mode)
                assert answer.status_code == 200, answer.text
                assert answer.json()["outcome"] == "applied"
                now = control.role(role)
                assert now["mode_executed"] == now["mode_desired"] == mode and not now["drift"]
                assert {rank["flip"]["agreed_epoch"] for rank in now["ranks"]} == {answer.json()["epoch"]}
                clients.wait_for_more(CLIENTS // 2)
                after = control.dispatches(role, mode)
                assert all(new > old for old, new in zip(before, after, strict=True)), (role, mode, before, after)
            due = started + SECONDS * (number + 1) / FLIPS
            time.sleep(max(0.0, due - time.monotonic()))
        answered = clients.right
    print(f"{answered} answers in {time.monotonic() - started:.0f} s, wrong or lost: {len(clients.wrong)}")
    assert clients.wrong == [] and answered >= CLIENTS * FLIPS
    assert time.monotonic() - started >= SECONDS
    for role in CYCLES:
        assert {rank["flip"]["flips"] for rank in control.role(role)["ranks"]} == {FLIPS}

    # Without load: the service's own prompt makes the steps.
    assert control.flip("decode", "hybrid").json()["outcome"] == "applied"
    assert httpx.get(f"{control.url}/v1/status", headers={"Authorization": "Bearer wrong"}).status_code == 401
    wrong = control.flip("decode", "normal")
    assert wrong.status_code == 422 and wrong.json()["allowed"] == ["low_latency", "hybrid", "auto"]

    with Clients(state, served) as clients:
        clients.wait_for_more(CLIENTS // 2)
        stopped = control.role("decode")["ranks"][1]["pid"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(1) as thread:
                began = time.monotonic()
                first = thread.submit(control.flip, "decode", "low_latency")
                while not control.role("decode")["pending"]:
                    assert not first.done()
                second = control.flip("prefill", "normal")
                assert second.status_code == 409 and "another change of flips is under way" in second.text
                assert first.result().status_code == 504
                assert "decode rank 1" in first.result().json()["detail"]
                assert time.monotonic() - began < 60
        finally:
            os.kill(stopped, signal.SIGCONT)
        clients.wait_for_more(2 * CLIENTS)
    assert clients.wrong == []
    now = control.role("decode")
    assert now["mode_executed"] == now["mode_desired"] == "hybrid" and not now["drift"]
    assert {rank["flip"]["flips"] for rank in now["ranks"]} == {FLIPS + 1}

    # As where CUDA graphs hold the mode; here there are none to capture, but the engine drains and goes on the same way.
    with Clients(state, served) as clients:
        clients.wait_for_more(1)
        statuses = asyncio.run(drained(state, "hybrid", "low_latency"))
        assert {status.mode_desired for status in statuses} == {"low_latency"}
        assert {status.graphs.token for status in statuses} == {201} and len(statuses) == 2
        before = control.dispatches("decode", "low_latency")
        clients.wait_for_more(CLIENTS)
        assert clients.wrong == []
        assert all(new > old for new, old in zip(control.dispatches("decode", "low_latency"), before, strict=True))


async def drained(state: RunState, old: ModeName, new: ModeName) -> list[RankStatus]:
    (decode,) = state.of("decode")
    assert decode.url is not None
    async with httpx.AsyncClient(timeout=60) as http:
        ranks = Ranks("decode", decode.agents, KEY, http)
        return await drain(VllmAdmin([decode.url], http), ranks, old, new, (201, 202), Limits(drain_s=300, capture_s=60))


@pytest.mark.skipif(not LONG, reason="over three minutes on two cores; EP_TEST_LONG=1 runs it")
def test_roles_restart_one_by_one_while_requests_wait(served: Served, up: Callable[[Path], RunState], file: Path) -> None:
    edit(file, {"router.hold": True})
    state = up(file)
    control = Control(state)
    edit(file, {f"roles.{role}.args.max-num-seqs": 6 for role in CYCLES})
    refused = control.apply(file, restart=False)
    assert refused.status_code == 409
    assert "roles.prefill.args.max-num-seqs: 8 -> 6 (restart)" in refused.json()["detail"]
    before = {role: control.role(role)["ranks"][0]["pid"] for role in CYCLES}
    with Clients(state, served) as clients:
        clients.wait_for_more(CLIENTS)
        answer = control.apply(file, restart=True)
        assert answer.status_code == 200, answer.text
        assert answer.json()["restarted"] == ["prefill", "decode"]
        clients.wait_for_more(2 * CLIENTS)
    print(f"{clients.right} answers, wrong or lost: {len(clients.wrong)}")
    assert clients.wrong == []
    for role, pid in before.items():
        assert control.role(role)["ranks"][0]["pid"] != pid
