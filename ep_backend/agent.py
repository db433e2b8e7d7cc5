"""A rank's agent: what this process's buffers executed, and changes of its mode, for the deployment's tools.

HTTP is spoken by a small process of its own (:mod:`ep_backend.front`), which is started again where it ends. The rank only
answers its requests, from a thread that needs the interpreter's lock once a request, and says once a second that it is alive:
so a rank that computes without pause, or is stopped, never keeps anybody waiting for a connection.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ep_backend.control.flip import Carrier, Flip, FlipRefused
from ep_backend.serving import listen, require_key

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENT_S = 15.0  # a rank that said nothing for so long is taken for stopped: many heartbeats, also on a crowded machine
STOP_S = 5.0
MOST_STARTS, SOON_S = 5, 60.0  # so many starts of the HTTP process, each ended so soon, are enough
MOST_BYTES = 1 << 20  # of one message

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
    """Serves ``GET /status``, ``GET /metrics`` and the two steps of a flip until :meth:`stop`, or this process's end.

    With ``key`` each request needs ``Authorization: Bearer KEY``; a host that others can reach needs a key. ValueError if
    it cannot listen. Port 0 takes a free one.
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
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._facts = facts
        self._identity = identity
        self._flip = flip
        self._buffers = buffers
        self._stopping = False
        require_key(key, setting="agent_", host=host)
        self._hello = {"host": host, "key": key, "pid": os.getpid()}
        self._listener = listen("agent", "agent_", host, port)
        self.port = int(self._listener.getsockname()[1])
        self._soon = 0
        try:
            self._start_front()
        except OSError:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="ep-backend-agent", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """The body of ``GET /status``, less ``silent_s``."""
        return rank_status(self._identity, self._flip, self._buffers(), self._facts())

    def stop(self) -> None:
        """Stop serving and free the port; waits at most 10 seconds."""
        self._stopping = True
        with suppress(OSError):  # the front may have gone first
            self._front.shutdown(socket.SHUT_RDWR)
        self._thread.join(STOP_S)
        self._front.close()
        self._listener.close()
        self._end_process()

    def _end_process(self) -> int:
        """The HTTP process's exit status; it is killed if it does not end by itself in STOP_S seconds."""
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _start_front(self) -> None:
        # Messages keep their bounds, and each side sees the other's end, however it ends.
        front, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = self._listener.fileno(), theirs.fileno()
            command = [sys.executable, "-m", "ep_backend.front", *map(str, fds)]
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        front.settimeout(HEARTBEAT_S)
        with suppress(OSError):  # it may have ended, which the next recv tells
            front.send(json.dumps(self._hello).encode())
        self._front, self._started = front, time.monotonic()

    def _started_again(self) -> bool:
        """After the HTTP process has ended; False where the agent is stopping, or another start would be of no use."""
        self._front.close()
        status, rank = self._end_process(), self._identity.rank
        if self._stopping:
            return False
        self._soon = self._soon + 1 if time.monotonic() - self._started < SOON_S else 1
        why = f"its HTTP process ended {self._soon} times soon"
        if self._soon < MOST_STARTS:
            log.error("the HTTP process of rank %d's agent ended with status %d and is started again", rank, status)
            try:
                self._start_front()
                return True
            except OSError as error:
                why = str(error)
        log.error("the agent of rank %d no longer serves: %s", rank, why)
        self._listener.close()
        return False

    def _serve(self) -> None:
        self._say({"id": 0, "code": 200, "body": self.status()})
        while True:
            try:
                message = self._front.recv(MOST_BYTES)
            except TimeoutError:
                if self._stopping:
                    return
                self._say({"id": None})
                continue
            except OSError:
                message = b""
            if not message:
                if not self._started_again():
                    return
                self._say({"id": 0, "code": 200, "body": self.status()})
                continue
            request = json.loads(message)
            self._say({"id": request["id"], **self._answer(request)})

    def _say(self, message: dict[str, Any]) -> None:
        encoded = json.dumps(message).encode()
        while not self._stopping:
            try:
                self._front.send(encoded)
                return
            except TimeoutError:  # the front does not read; only this thread waits for it
                continue
            except OSError:  # it has ended, which the next recv tells
                return

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A status code and a body, or the reason of a refusal."""
        try:
            return {"code": 200, "body": self._do(request)}
        except ValueError as error:
            return {"code": 422, "body": str(error)}
        except FlipRefused as error:
            return {"code": 409, "body": str(error)}
        except Exception as error:  # whatever it was, the next request must find this thread at work
            log.exception("the agent could not answer %s", request["do"])
            return {"code": 500, "body": f"{type(error).__name__}: {error}"}

    def _do(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "report":
                return self.status()
            case "prepare":
                if time.monotonic() > request["until"]:  # whoever asked has given up, and may have said so
                    raise FlipRefused("the request came too late")
                self._flip.prepare(request["token"], request["mode"])
            case "check":
                self._flip.require(request["mode"])
            case "abandon":
                self._flip.abandon(request["token"])
        return self._flip.state()


def rank_status(
    identity: Identity, flip: Flip, buffers: Sequence[Carrier], facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a rank executed, JSON-ready; counters are sums over its buffers.

    ``facts``: what only the adapter knows: ``sms`` (limit of a kernel), ``fallbacks`` (how often `auto` could not take its
    first choice, by reason), ``estimates`` (seconds a layer by mode, as planned), ``graphs`` (see
    :class:`ep_backend.deployment.rank_status.GraphState`).
    """
    stats = [buffer.stats() for buffer in buffers]
    latest: Stats = max(stats, key=lambda s: int(s["epoch"]), default={})
    state = flip.state()
    return {
        **asdict(identity),
        "pid": os.getpid(),
        "mode_desired": state["mode"],
        "mode_executed": latest.get("mode_executed"),
        "epoch": latest.get("epoch", 0),
        "lane_rounds": [sum(lanes) for lanes in zip(*(s["lane_rounds"] for s in stats), strict=True)],
        "failed": next((s["failed"] for s in stats if s["failed"]), None),
        "timeouts": sum(int(s["timeouts"]) for s in stats),
        "modes": _sum([s["modes"] for s in stats]),
        "max_tokens": latest.get("max_tokens", {}),
        "expert_rows": latest.get("expert_rows", []),
        "wait_s": _sum([s["wait_s"] for s in stats]),
        "buffer_bytes": _sum([s["buffer_bytes"] for s in stats]),
        "flip": state,
        **{"sms": None, "fallbacks": {}, "estimates": {}, "graphs": {}},
        **(facts or {}),
    }


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
