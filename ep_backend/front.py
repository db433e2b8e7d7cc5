"""The HTTP side of a rank's agent, in a process without the engine: `python -m ep_backend.front LISTENER_FD RANK_FD`.

A status is as fresh as the rank can make it within a second; else it is the last one, and `silent_s` says since when the
rank has said nothing. A change waits for the rank's answer, but not for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import sys
import time
from typing import Any

import uvicorn
from fastapi import Body, Depends, FastAPI, HTTPException
from fastapi.responses import PlainTextResponse

from ep_backend.agent import MOST_BYTES, SILENT_S
from ep_backend.control.metrics import Ranks, exposition
from ep_backend.control.nics import ports
from ep_backend.serving import Bounded, needs_key, require_own_name

FRESH_S = 1.0


class Rank:
    """The rank at the other end of the socket. Belongs to one event loop."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self._link = link
        self._pid = pid
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._report: asyncio.Future[dict[str, Any]] | None = None
        self._latest: dict[str, Any] | None = None
        self._heard = time.monotonic()
        self.gone = asyncio.Event()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard

    def hear(self) -> None:
        """Take one message; the loop calls this when there is one."""
        try:
            message = self._link.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.gone.set()
            return
        self._heard = time.monotonic()
        answer = json.loads(message)
        if answer["id"] == 0:  # the first report, unasked
            self._latest = answer["body"]
        future = self._waiting.pop(answer["id"], None)
        if future is not None and not future.done():
            future.set_result(answer)

    async def report(self) -> dict[str, Any]:
        """The rank's status, fresh if it answers in time."""
        if self._report is None or self._report.done():
            self._report = self._ask({"do": "report"})
            self._report.add_done_callback(self._keep)
        await asyncio.wait([self._report], timeout=FRESH_S)
        if self._latest is None:
            raise HTTPException(503, f"the rank (process {self._pid}) has not reported yet")
        return {**self._latest, "silent_s": round(self.silent_s, 3), "nics": ports()}

    async def change(self, request: dict[str, Any]) -> Any:
        """What the rank answers. HTTPException if it refuses, or does not come to it in time; it drops what is too late."""
        patience = max(0.0, SILENT_S - self.silent_s)
        future = self._ask({**request, "until": time.monotonic() + patience})
        await asyncio.wait([future], timeout=patience)
        if not future.done():
            raise HTTPException(504, f"its process {self._pid} is stopped, or got no processor time for {SILENT_S:g} s")
        return _body(future.result())

    def _ask(self, request: dict[str, Any]) -> asyncio.Future[dict[str, Any]]:
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        try:
            self._link.send(json.dumps({"id": number, **request}).encode())
        except OSError as error:  # full: the rank takes nothing; or closed: it is gone
            raise HTTPException(503, f"its process {self._pid} takes no requests: {error}") from None
        self._waiting[number] = future
        return future

    def _keep(self, future: asyncio.Future[dict[str, Any]]) -> None:
        if not future.cancelled() and future.result()["code"] == 200:
            self._latest = future.result()["body"]


def make_app(rank: Rank, host: str, key: str | None) -> FastAPI:
    app = FastAPI(title="ep_backend agent", dependencies=[Depends(needs_key(key))], docs_url=None, openapi_url=None)
    require_own_name(app, host)
    app.add_middleware(Bounded, most=MOST_BYTES)

    @app.get("/status")
    async def status() -> dict[str, Any]:
        return await rank.report()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        return exposition(Ranks([await rank.report()]))

    @app.post("/flip/check")
    async def check(mode: str = Body(embed=True)) -> Any:
        return await rank.change({"do": "check", "mode": mode})

    @app.post("/flip/prepare")
    async def prepare(token: int = Body(ge=1, le=255), mode: str = Body()) -> Any:
        return await rank.change({"do": "prepare", "token": token, "mode": mode})

    @app.post("/flip/abandon")
    async def abandon(token: int = Body(embed=True, ge=1, le=255)) -> Any:
        return await rank.change({"do": "abandon", "token": token})

    return app


async def serve(listener: socket.socket, link: socket.socket) -> None:
    """Until the rank has closed its end, or is gone."""
    hello = json.loads(link.recv(MOST_BYTES))
    link.setblocking(False)
    rank = Rank(link, hello["pid"])
    asyncio.get_running_loop().add_reader(link, rank.hear)
    config = uvicorn.Config(
        make_app(rank, hello["host"], hello["key"]),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait([serving, asyncio.create_task(rank.gone.wait())], return_when=asyncio.FIRST_COMPLETED)
    asyncio.get_running_loop().remove_reader(link)
    server.should_exit = True
    await serving


def _body(answer: dict[str, Any]) -> Any:
    if answer["code"] != 200:
        raise HTTPException(answer["code"], answer["body"])
    return answer["body"]


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))))
