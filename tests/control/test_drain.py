"""A change of mode under captured graphs: however it ends, ranks agree, requests go on, and none is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ep_backend.agent import SILENT_S
from ep_backend.control.drain import EngineFailed, Limits, drain
from ep_backend.control.ranks import RankFailed
from ep_backend.control.vllm_admin import VllmAdmin
from ep_backend.deployment.rank_status import GraphState, RankStatus
from tests.control.conftest import Service
from tests.control.instance import instance

LIMITS = Limits(drain_s=2.0, capture_s=0.6)
TOKENS = (7, 8)


class Role:
    """An engine of three ranks whose graphs hold a mode. Requests that come while it is paused wait."""

    def __init__(self, **cannot: dict[int, str]) -> None:
        self.cannot = cannot  # by mode: what ranks say instead of capturing it
        self.statuses_now = [
            RankStatus(agent=f"http://rank{rank}", rank=rank, mode_desired="low_latency", graphs=GraphState(captured=True))
            for rank in range(3)
        ]
        self.calls: list[str] = []
        self.stuck: set[int] = set()  # ranks that a capture never reaches
        self.fails: dict[str, str] = {}
        self._open = asyncio.Event()
        self._open.set()

    async def request(self) -> str:
        await self._open.wait()
        modes = {status.mode_desired for status in self.statuses_now}
        assert len(modes) == 1, modes
        return str(modes.pop())

    async def pause(self, limit_s: float) -> None:
        await self._called("pause", limit_s)
        self._open.clear()

    async def resume(self, limit_s: float) -> None:
        await self._called("resume", limit_s)
        self._open.set()

    async def recapture(self, token: int, mode: str, limit_s: float) -> None:
        assert not self._open.is_set()
        for rank in {0, 1, 2} - self.stuck:
            error = self.cannot.get(mode, {}).get(rank)
            graphs = GraphState(captured=True, token=token, error=error)
            desired = self.statuses_now[rank].mode_desired if error else mode
            self._set(rank, graphs=graphs, mode_desired=desired)
        await self._called(f"recapture {mode}", limit_s)

    async def statuses(self) -> list[RankStatus]:
        return self.statuses_now

    def _set(self, rank: int, **values: Any) -> None:
        self.statuses_now[rank] = self.statuses_now[rank].model_copy(update=values)

    async def _called(self, what: str, limit_s: float) -> None:
        self.calls.append(what)
        assert limit_s == (LIMITS.capture_s if "capture" in what else LIMITS.drain_s)
        await asyncio.sleep(0.01)
        if what in self.fails:
            raise EngineFailed(self.fails[what])


def changed(role: Role) -> tuple[list[str], str | None]:
    """What requests that came before and during the change got, and how it failed."""

    async def both() -> tuple[list[str], str | None]:
        before = asyncio.create_task(role.request())
        change = asyncio.create_task(drain(role, role, "low_latency", "hybrid", TOKENS, LIMITS))
        while not change.done() and "pause" not in role.calls:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        during = [asyncio.create_task(role.request()) for _ in range(4)]
        failure = None
        try:
            await change
        except RankFailed as error:
            assert not error.refused
            failure = str(error)
        answered = await asyncio.wait_for(asyncio.gather(before, *during), timeout=1) if role._open.is_set() else []
        return answered, failure

    return asyncio.run(both())


def test_every_rank_captures_and_requests_that_waited_go_on() -> None:
    role = Role()
    answers, failure = changed(role)
    assert failure is None and role.calls == ["pause", "recapture hybrid", "resume"]
    assert answers == ["low_latency"] + ["hybrid"] * 4


def test_one_rank_that_cannot_capture_sends_all_back() -> None:
    role = Role(hybrid={1: "RuntimeError: out of memory"})
    answers, failure = changed(role)
    assert failure == "rank 1 (http://rank1) cannot capture hybrid: RuntimeError: out of memory"
    assert role.calls == ["pause", "recapture hybrid", "recapture low_latency", "resume"]
    assert answers == ["low_latency"] * 5


def test_a_rank_that_is_not_reached_fails_the_change_in_time_and_keeps_all_waiting_for_a_restart() -> None:
    role = Role()
    role.stuck = {2}
    answers, failure = changed(role)
    assert "rank 2 (http://rank2) has not captured hybrid in time" in str(failure)
    assert "and the way back to low_latency failed too: rank 2 (http://rank2) has not captured low_latency" in str(failure)
    assert "requests wait: restart the role (flip --restart)" in str(failure)
    assert role.calls == ["pause", "recapture hybrid", "recapture low_latency"] and answers == []


def test_a_silent_rank_is_not_waited_for() -> None:
    role = Role()
    role.stuck = {0}
    role._set(0, silent_s=SILENT_S + 1)
    limits = Limits(drain_s=LIMITS.drain_s, capture_s=LIMITS.capture_s)
    _, failure = changed(role)
    assert "rank 0 (http://rank0) has been silent for" in str(failure) and limits == LIMITS


def test_an_engine_that_refuses_to_capture_goes_back_at_once() -> None:
    role = Role()
    role.fails = {"recapture hybrid": "http://e/collective_rpc answered 500: no"}
    answers, failure = changed(role)
    assert failure == "http://e/collective_rpc answered 500: no"
    assert role.calls[-2:] == ["recapture low_latency", "resume"] and answers == ["low_latency"] * 5


def test_requests_that_do_not_finish_change_nothing() -> None:
    role = Role()
    role.fails = {"pause": "http://e/pause took more than 2 s"}
    answers, failure = changed(role)
    assert failure == "http://e/pause took more than 2 s; nothing was changed"
    assert role.calls == ["pause", "resume"] and answers == ["low_latency"] * 5


def test_an_engine_that_does_not_go_on_is_told() -> None:
    role = Role()
    role.fails = {"resume": "http://e/resume does not answer (ConnectError)"}
    _, failure = changed(role)
    assert failure is not None and failure.startswith("every rank runs hybrid; but requests wait, for http://e/resume")
    assert failure.endswith("restart the role (flip --restart)")


@pytest.mark.parametrize("graphs", [{}, {1: "RuntimeError: out of memory"}])
def test_the_service_drains_a_role_whose_graphs_hold_the_mode(
    ranks: Any, service: Callable[..., Service], tmp_path: Path, graphs: dict[int, str]
) -> None:
    """Real buffers and agents; the engine's admin routes and captures are stand-ins."""
    with instance(ranks(2), "decode", "low_latency", tmp_path / "stop", busy=True, graphs=graphs) as ran:
        control = service(decode=ran)
        assert control.flip("decode", "hybrid", dry_run="true").json()["outcome"] == "would apply"
        answer = control.flip("decode", "hybrid")
        if graphs:
            assert answer.status_code == 504
            said = f"rank 1 ({ran.agents[1]}) cannot capture hybrid: RuntimeError: out of memory"
            assert answer.json()["detail"] == said
        else:
            assert answer.status_code == 200 and answer.json()["outcome"] == "applied", answer.text
        expected = "low_latency" if graphs else "hybrid"
        before = control.role("decode")
        assert {rank["mode_desired"] for rank in before["ranks"]} == {before["mode_desired"]} == {expected}
        time.sleep(0.5)
        after = control.role("decode")
        assert not after["drift"] and after["mode_executed"] == expected
        assert all(new["epoch"] > old["epoch"] for new, old in zip(after["ranks"], before["ranks"], strict=True))
    first, second = ran.steps
    assert first == second and {mode for _, mode in first} == ({"low_latency"} if graphs else {"low_latency", "hybrid"})


def test_a_rank_without_the_seam_refuses_at_once(ranks: Any, service: Callable[..., Service], tmp_path: Path) -> None:
    with instance(ranks(2), "decode", "low_latency", tmp_path / "stop", busy=False, graphs={}, obstacle="vLLM 9 is new") as ran:
        control = service(decode=ran)
        for dry_run in ("true", "false"):
            answer = control.flip("decode", "hybrid", dry_run=dry_run)
            assert answer.status_code == 409
            assert answer.json()["detail"].startswith("CUDA graphs of decode cannot be captured anew: rank 0: vLLM 9 is new")


Handler = Callable[[httpx.Request], httpx.Response]


def admin(handler: Handler, call: Callable[[VllmAdmin], Any]) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as http:
            await call(VllmAdmin(["http://one", "http://two"], http))

    asyncio.run(run())


def test_every_instance_is_asked_by_vllms_admin_routes() -> None:
    seen: list[tuple[str, str, bytes]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((str(request.url), request.method, request.content))
        return httpx.Response(200)

    async def calls(engine: VllmAdmin) -> None:
        await engine.pause(1.0)
        await engine.recapture(9, "hybrid", 1.0)
        await engine.resume(1.0)

    admin(handler, calls)
    assert [url for url, _, _ in seen if "one" in url] == [
        "http://one/pause?mode=wait&clear_cache=true",
        "http://one/collective_rpc",
        "http://one/resume",
    ]
    assert len(seen) == 6 and {method for _, method, _ in seen} == {"POST"}
    assert {content for url, _, content in seen if "rpc" in url} == {b'{"method":"ep_recapture","args":["9","hybrid"]}'}


@pytest.mark.parametrize(
    "answer, said",
    [
        (httpx.Response(404), "http://two has no /pause: start the role with env VLLM_SERVER_DEV_MODE=1"),
        (httpx.Response(500, text="no"), "http://two/pause answered 500: no"),
        (httpx.ReadTimeout(""), "http://two/pause took more than 1 s"),
        (httpx.ConnectError("refused"), r"http://two/pause does not answer \(ConnectError\)"),
    ],
)
def test_an_instance_that_fails_is_named(answer: httpx.Response | httpx.HTTPError, said: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.host == "one":
            return httpx.Response(200)
        if isinstance(answer, httpx.Response):
            return answer
        raise answer

    with pytest.raises(EngineFailed, match=said):
        admin(handler, lambda engine: engine.pause(1.0))


def test_resume_waits_for_a_pause_under_way() -> None:
    refusals = iter([True, True, False, False, False, False])

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500 if next(refusals) else 200, text="pause is still in flight")

    admin(handler, lambda engine: engine.resume(5.0))
    with pytest.raises(EngineFailed, match="still in flight"):
        admin(lambda request: httpx.Response(500, text="still in flight"), lambda engine: engine.resume(0.1))
