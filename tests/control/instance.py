"""An engine without a model: real buffers, flips and agents, one a worker process, and the address that takes prompts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from ep_backend.deployment.processes import free_ports
from ep_backend.policy import Role, Wish, check_wish
from tests.core import oracle
from tests.core.pool import Pool, World
from tests.core.rounds import LAYOUTS, Round

FAMILIES = {"prefill": ("direct", "normal"), "decode": ("low_latency", "hybrid")}
# What an adapter adds: a limit of SMs, how often auto fell back, planned seconds a layer.
MODES = ["auto", "normal", "direct", "low_latency", "hybrid"]
FACTS = {"sms": 20, "fallbacks": {"capacity": 3}, "estimates": {"direct": 1e-3}}
Step = tuple[int, str]  # epoch and mode of one dispatch


@dataclass
class Instance:
    """A running one. ``steps`` by rank is filled when it has stopped."""

    agents: list[str]
    url: str
    steps: list[list[Step]] = field(default_factory=list)


@contextmanager
def instance(
    pool: Pool,
    role: str,
    mode: str,
    stop: Path,
    *,
    busy: bool,
    refuses: dict[int, str] | None = None,
    graphs: dict[int, str] | None = None,
    obstacle: str | None = None,
) -> Iterator[Instance]:
    """Runs until the block ends. ``busy``: steps without end, checked against the oracle; else only while prompted.

    ``refuses``: what ranks say instead of preparing a flip. ``graphs``: CUDA graphs hold the mode, as far as anybody can
    tell from outside, and these ranks say why they cannot capture another one; ``obstacle``: none of them could ever.
    """
    base = free_ports(pool.size + 1)
    running = Instance([f"http://127.0.0.1:{base + rank}" for rank in range(pool.size)], f"http://127.0.0.1:{base + pool.size}")
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(pool.run, serve, role, mode, base, str(stop), busy, refuses or {}, graphs, obstacle, timeout=120)
        try:
            _wait_for(running.agents, future)
            yield running
        finally:
            stop.touch()
            running.steps = future.result(timeout=60)
            stop.unlink()


def _wait_for(agents: list[str], future: Any) -> None:
    for agent in agents:
        while not future.done():
            try:
                httpx.get(f"{agent}/status", timeout=60).raise_for_status()
                break
            except httpx.HTTPError:
                continue


def serve(
    world: World,
    role: str,
    mode: str,
    port: int,
    stop: str,
    busy: bool,
    refuses: dict[int, str],
    graphs: dict[int, str] | None,
    obstacle: str | None,
) -> list[Step]:
    """What one rank runs; every rank makes the same number of steps, as an engine's ranks do."""
    import torch
    import torch.distributed as dist

    from ep_backend.agent import Agent, Identity
    from ep_backend.control.flip import Flip

    def check(wish: Wish) -> None:
        check_wish(Role(role), wish)
        if world.rank in refuses:
            raise ValueError(refuses[world.rank])

    buffer = world.make(payloads=("fp32",))
    flip = Flip(mode, buffers=lambda: [buffer], check=check)
    identity = Identity("test", role, world.rank, world.size, world.size, "fake")
    place = {"host": "127.0.0.1", "port": port + world.rank, "key": None}
    captured = {"captured": graphs is not None, "obstacle": obstacle}
    facts = {**FACTS, "graphs": captured}
    agent = Agent(identity, **place, flip=flip, buffers=lambda: [buffer], facts=lambda: facts)
    prompts = Prompts(port + world.size) if world.rank == 0 else None
    steps: list[Step] = []
    try:
        while True:
            want = prompts.wanted(busy) if prompts else [0, 0, 0]
            word = torch.tensor([-1, 0, 0] if Path(stop).exists() else want)
            dist.broadcast(word, 0)
            count, token, code = word.tolist()
            if count < 0:
                return steps
            if token:
                error = (graphs or {}).get(world.rank) if MODES[code] != mode else None
                if error is None:
                    flip.switch(MODES[code])
                facts["graphs"] = {**captured, "token": token, "error": error}
            for _ in range(count):
                steps.append(_step(world, buffer, str(getattr(flip.mode, "value", flip.mode)), role, len(steps)))
    finally:
        agent.stop()
        if prompts is not None:
            prompts.stop()
        dist.barrier()
        buffer.destroy()


def _step(world: World, buffer: Any, mode: str, role: str, number: int) -> Step:
    if role == "unified":  # as in SGLang, where a mode is for the batches of its own family: a prompt, then decoding
        role = "decode" if number % 4 else "prefill"
        mode = mode if mode in FAMILIES[role] else "auto"
    mode = FAMILIES[role][0] if mode == "auto" else mode
    case = oracle.make_case(number, [(number * (rank + 3)) % 13 for rank in range(world.size)])
    Round(world, buffer, case, mode, payload="fp32", layout=LAYOUTS[mode]).run()
    return int(buffer.stats()["epoch"]), mode


class Prompts:
    """Takes completion requests, each worth some steps, and the engine's admin requests."""

    def __init__(self, port: int) -> None:
        self._asked = threading.Semaphore(0)
        self.paused = threading.Event()
        self._captures: list[tuple[int, int]] = []
        asked, paused, captures = self._asked, self.paused, self._captures

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path.startswith("/pause"):
                    paused.set()
                elif self.path == "/resume":
                    paused.clear()
                elif self.path == "/collective_rpc":
                    assert paused.is_set()
                    token, mode = json.loads(body)["args"]
                    captures.append((int(token), MODES.index(mode)))
                else:
                    asked.release()
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def wanted(self, busy: bool) -> list[int]:
        """Steps to make, and the token and mode of a capture to do before them; zeros for none."""
        if self._captures:
            return [0, *self._captures.pop(0)]
        if self.paused.is_set():
            return [0, 0, 0]
        return [3 if busy else 4 if self._asked.acquire(timeout=0.01) else 0, 0, 0]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
