"""A rank's own HTTP agent: what this process's buffers executed, for the deployment's tools."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Stats = Mapping[str, Any]


class HasStats(Protocol):
    def stats(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Who answers."""

    deployment: str
    role: str
    rank: int
    world_size: int
    engine: str


class Agent:
    """Serves ``GET /status`` from a daemon thread, on ``port`` of ``host``, until :meth:`stop`.

    With ``key`` each request needs ``Authorization: Bearer KEY``; a host that others can reach needs a key.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        host: str,
        port: int,
        key: str | None,
        mode_desired: Callable[[], str],
        buffers: Callable[[], Sequence[HasStats]],
    ) -> None:
        if not key and not _is_loopback(host):
            raise ValueError(f"agent_host={host} can be reached from other machines; set agent_key, or use 127.0.0.1")
        self._identity = identity
        self._mode_desired = mode_desired
        self._buffers = buffers
        self._socket = _listen(host, port)
        self._server = self._make_server(key)
        self._thread = threading.Thread(target=self._run, name="ep-backend-agent", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def status(self) -> dict[str, Any]:
        """The body of ``GET /status``; counters are sums over this rank's buffers."""
        i = self._identity
        stats = [buffer.stats() for buffer in self._buffers()]
        latest: Stats = max(stats, key=lambda s: int(s["epoch"]), default={})
        return {
            "deployment": i.deployment,
            "role": i.role,
            "rank": i.rank,
            "world_size": i.world_size,
            "engine": i.engine,
            "pid": os.getpid(),
            "mode_desired": self._mode_desired(),
            "mode_executed": latest.get("mode_executed"),
            "epoch": latest.get("epoch", 0),
            "failed": next((s["failed"] for s in stats if s["failed"]), None),
            "modes": _sum([s["modes"] for s in stats]),
        }

    def stop(self) -> None:
        """Stop serving and free the port; waits at most 5 seconds."""
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._socket.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def _make_server(self, key: str | None) -> Any:
        import uvicorn
        from fastapi import Depends, FastAPI, Header, HTTPException

        def allow(authorization: str = Header(default="")) -> None:
            if key and not hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode()):
                raise HTTPException(401, "this agent needs its key: send Authorization: Bearer KEY")

        app = FastAPI(title="ep_backend agent", dependencies=[Depends(allow)], docs_url=None, openapi_url=None)
        app.get("/status")(self.status)
        return uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRINUSE:
            raise ValueError(
                f"agent port {port} on {host} is taken; choose another agent_port (each rank adds its number)"
            ) from None
        raise ValueError(f"the agent cannot listen on {host}:{port}: {e.strerror}; change agent_host") from None
    return listener


def _sum(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add counters of equal names, at any depth; a high-water mark is the highest."""
    total: dict[str, Any] = {}
    for tree in trees:
        for name, value in tree.items():
            if isinstance(value, Mapping):
                total[name] = _sum([total.get(name, {}), value])
            elif name.endswith("high_water"):
                total[name] = max(total.get(name, 0), value)
            else:
                total[name] = total.get(name, 0) + value
    return total
