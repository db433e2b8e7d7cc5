"""A rank's own HTTP agent: what this process's buffers executed, and changes of its mode, for the deployment's tools."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ep_backend.control.flip import Carrier, Flip, FlipRefused
from ep_backend.serving import Background, needs_key, require_key

if TYPE_CHECKING:
    from fastapi import FastAPI

Stats = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who answers."""

    deployment: str
    role: str
    rank: int
    world_size: int
    gpus_per_node: int
    engine: str


class Agent:
    """Serves ``GET /status``, ``GET /metrics`` and the two steps of a flip from a daemon thread, until :meth:`stop`.

    With ``key`` each request needs ``Authorization: Bearer KEY``; a host that others can reach needs a key.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        host: str,
        port: int,
        key: str | None,
        flip: Flip,
        buffers: Callable[[], Sequence[Carrier]],
    ) -> None:
        self._identity = identity
        self._flip = flip
        self._buffers = buffers
        require_key(key, setting="agent_", host=host)
        self._server = Background(self._app(key), name="agent", setting="agent_", host=host, port=port)

    @property
    def port(self) -> int:
        return self._server.port

    def status(self) -> dict[str, Any]:
        """The body of ``GET /status``; counters are sums over this rank's buffers."""
        stats = [buffer.stats() for buffer in self._buffers()]
        latest: Stats = max(stats, key=lambda s: int(s["epoch"]), default={})
        flip = self._flip.state()
        return {
            **asdict(self._identity),
            "pid": os.getpid(),
            "mode_desired": flip["mode"],
            "mode_executed": latest.get("mode_executed"),
            "epoch": latest.get("epoch", 0),
            "failed": next((s["failed"] for s in stats if s["failed"]), None),
            "timeouts": sum(int(s["timeouts"]) for s in stats),
            "modes": _sum([s["modes"] for s in stats]),
            "max_tokens": latest.get("max_tokens", {}),
            "wait_s": _sum([s["wait_s"] for s in stats]),
            "flip": flip,
        }

    def stop(self) -> None:
        """Stop serving and free the port; waits at most 5 seconds."""
        self._server.stop()

    def _app(self, key: str | None) -> FastAPI:
        from fastapi import Body, Depends, FastAPI, HTTPException
        from fastapi.responses import PlainTextResponse

        from ep_backend.control.metrics import Ranks, exposition

        app = FastAPI(title="ep_backend agent", dependencies=[Depends(needs_key(key))], docs_url=None, openapi_url=None)
        app.get("/status")(self.status)

        @app.get("/metrics", response_class=PlainTextResponse)
        def metrics() -> str:
            return exposition(Ranks([self.status()]))

        @app.post("/flip/prepare")
        def prepare(token: int = Body(ge=1, le=255), mode: str = Body()) -> dict[str, Any]:
            try:
                self._flip.prepare(token, mode)
            except ValueError as error:
                raise HTTPException(422, str(error)) from None
            except FlipRefused as error:
                raise HTTPException(409, str(error)) from None
            return self._flip.state()

        @app.post("/flip/abandon")
        def abandon(token: int = Body(embed=True, ge=1, le=255)) -> dict[str, Any]:
            self._flip.abandon(token)
            return self._flip.state()

        return app


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
