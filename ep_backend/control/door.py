"""Where clients knock: passes requests on, and keeps them waiting while what is behind it restarts."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

# Of one connection only (RFC 9110, 7.6.1), or made anew on the other side.
HOP_HEADERS = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length"}
POLL_S = 0.05

Scope = dict[str, Any]
Receive = Callable[[], Any]
Send = Callable[[Scope], Any]


class Door:
    """An ASGI app. ``target`` is the address behind it; None, and everybody waits. Other threads may set it.

    ``inside`` counts the requests that were let through and are not finished.
    """

    def __init__(self, wait_s: float) -> None:
        self.target: str | None = None
        self.inside = 0
        self._wait_s = wait_s
        self._client = httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = await _read(receive)
        passing = asyncio.create_task(self._pass(scope, body, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((passing, gone), return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            passing.cancel()
            gone.cancel()

    async def _pass(self, scope: Scope, body: bytes, send: Send) -> None:
        target = await self._opened()
        if target is None:
            return await _say(send, 503, f"the deployment has not come back within {self._wait_s:g} s")
        self.inside += 1
        try:
            await self._forward(target, scope, body, send)
        finally:
            self.inside -= 1

    async def _opened(self) -> str | None:
        """The target, once there is one; None after too long."""
        waited = 0.0
        while self.target is None and waited < self._wait_s:
            await asyncio.sleep(POLL_S)
            waited += POLL_S
        return self.target

    async def _forward(self, target: str, scope: Scope, body: bytes, send: Send) -> None:
        query = scope["query_string"].decode()
        url = f"{target}{scope['raw_path'].decode()}{'?' if query else ''}{query}"
        headers = [(name, value) for name, value in scope["headers"] if name not in HOP_HEADERS]
        started = False
        try:
            async with self._client.stream(scope["method"], url, headers=headers, content=body) as answer:
                kept = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in HOP_HEADERS]
                await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
                started = True
                async for chunk in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except httpx.HTTPError as error:
            # A broken answer stays unfinished, and the server then breaks the connection.
            return None if started else await _say(send, 502, f"{target} does not answer: {error}")
        await send({"type": "http.response.body", "body": b""})


async def _read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _say(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{text}\n".encode()})
