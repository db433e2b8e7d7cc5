"""HTTP servers that run in a thread of a process with other work: bound at once, ended with the process."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import socket
import threading
from collections.abc import Callable
from typing import Any


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def base_url(host: str, port: int) -> str:
    return f"http://{url_host(host)}:{port}"


def url_host(host: str) -> str:
    """A host as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_foreign(error: OSError) -> bool:
    """Did a bind fail because the host is no address of this machine?"""
    return isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL


def needs_key(key: str | None) -> Callable[..., None]:
    """A FastAPI dependency: 401 without ``Authorization: Bearer KEY``, or with another key."""
    from fastapi import Header, HTTPException

    def allow(authorization: str = Header(default="")) -> None:
        if key and not hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode()):
            given = "the key sent is not the one of this service" if authorization else "a key is needed here"
            raise HTTPException(401, f"{given}: send Authorization: Bearer KEY")

    return allow


def require_key(key: str | None, *, setting: str, host: str) -> None:
    """ValueError if a host that others can reach has no key. ``setting`` as in :class:`Background`."""
    if not key and not is_loopback(host):
        raise ValueError(f"{setting}host={host} can be reached from other machines; set {setting}key, or use 127.0.0.1")


def require_own_name(app: Any, host: str) -> None:
    """On loopback, only requests that name this machine: a page from elsewhere must not reach it under a name of its own."""
    from fastapi.middleware.trustedhost import TrustedHostMiddleware

    if is_loopback(host):
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1", "[::1]", url_host(host)])


class Bounded:
    """An ASGI app before another one, which gets no request with a body of more bytes: frameworks read all of it, before they
    look at the key."""

    def __init__(self, app: Any, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._most:
                said = json.dumps({"detail": f"the request is larger than {self._most >> 20} MiB, as none here may be"})
                headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
                await send({"type": "http.response.start", "status": 413, "headers": headers})
                await send({"type": "http.response.body", "body": said.encode()})
                return
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return parts.pop() if parts else await receive()

        await self._app(scope, again, send)


class Background:
    """Serves an ASGI app until :meth:`stop`; ValueError if it cannot listen. Port 0 takes a free one.

    ``setting`` starts the names of the settings that errors mention: "agent_" for agent_host and agent_port.
    """

    def __init__(self, app: Any, *, name: str, setting: str, host: str, port: int) -> None:
        import uvicorn

        self._socket = listen(name, setting, host, port)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def stop(self) -> None:
        """Stop serving and free the port; waits at most 5 seconds."""
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._socket.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])


def listen(name: str, setting: str, host: str, port: int) -> socket.socket:
    """A listening socket; ValueError if there can be none. ``name`` and ``setting`` as in :class:`Background`."""
    listener = socket.socket(family_of(host), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"{name} port {port} on {host} is taken; choose another {setting}port") from None
        change = f"{setting}{'host' if is_foreign(error) else 'port'}"
        raise ValueError(f"the {name} cannot listen on {url_host(host)}:{port}: {error.strerror}; change {change}") from None
    return listener
