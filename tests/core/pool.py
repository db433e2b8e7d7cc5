"""Worker processes, one a rank, that stay alive over many tests: starting them costs more than most tests do."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
ROUNDS: Counter[tuple[str, int]] = Counter()  # checked so far, by fabric and ranks


@dataclass
class Outcome:
    """What became of a function on one rank."""

    rank: int
    kind: str  # "ok", "error", "dead" or "hung"
    value: Any = None
    error: str = ""  # type of the exception
    message: str = ""
    record: dict[str, Any] | None = None  # of an EpTimeout
    detail: str = ""  # traceback
    rounds: int = 0  # that were checked

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind} {self.error}: {self.message}\n{self.detail}"


def attempt(fn: Callable[[], Any], rank: int = -1) -> Outcome:
    """Run ``fn`` and describe how it ended; for worker functions that expect an error."""
    try:
        return Outcome(rank, "ok", fn())
    except BaseException as e:
        record = getattr(e, "record", None)
        return Outcome(
            rank,
            "error",
            error=type(e).__name__,
            message=str(e),
            record=asdict(record) if record is not None else None,
            detail=traceback.format_exc(),
        )


@dataclass
class World:
    """A worker's view: who it is, and buffers that it keeps between calls."""

    rank: int
    size: int
    fabric: str
    group: Any
    device: Any
    buffers: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0

    KEPT = 3

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Constructor arguments that suit most tests: all modes, tiny, every payload of the fabric."""
        payloads = ("bf16", "fp8", "fp8_ue8m0") + (("fp32",) if self.fabric == "host" else ())
        return {
            "hidden": 256,
            "num_experts": 24,
            "top_k": 4,
            "max_tokens": dict.fromkeys(modes(self.fabric), 12),
            "lanes": 2,
            "payloads": payloads,
            "fabric": self.fabric,
            "timeout_s": 30.0,
            "ring_slots": 8,
            **changes,
        }

    def make(self, **changes: Any) -> Any:
        """A buffer of the caller's own, on memory full of NaN."""
        import torch.distributed as dist

        from ep_backend.buffer import EpBuffer

        buffer = EpBuffer(self.group, **self.arguments(**changes))
        self._poison(buffer)
        dist.barrier(self.group)
        return buffer

    def _poison(self, buffer: Any) -> None:
        """All of this rank's heap but the signal words."""
        from ep_backend import layout

        shape, heap = buffer.config.shape, buffer._fabric._heap
        lane = layout.lane(shape)
        for n in range(buffer.config.lanes):
            start, count = layout.lane_offset(shape, n) + lane.dispatch, lane.bytes - lane.dispatch
            if self.device.type == "cuda":
                from ep_backend.fabric.nvshmem import world

                world.fill(heap.base + start, 0xFF, count)
            elif count < 1 << 28:  # a large one is there for its offsets, and would take the machine's memory
                getattr(heap, "_heap", heap).bytes[buffer.rank][start : start + count] = 0xFF
        self.settle()

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def buffer(self, **changes: Any) -> Any:
        """A buffer shared by all tests that ask for the same arguments; it must be left idle."""
        key = repr(sorted(changes.items()))
        if key not in self.buffers:
            while len(self.buffers) >= self.KEPT:
                self.buffers.pop(next(iter(self.buffers))).destroy()
            self.buffers[key] = self.make(**changes)
        return self.buffers[key]


def modes(fabric: str) -> tuple[str, ...]:
    """That the fabric has: "host", "nvshmem", or "emulated", which is nvshmem's kernels on a CPU."""
    if fabric == "host":
        return ("normal", "direct", "low_latency", "hybrid")
    return ("normal", "direct", "low_latency", "hybrid")


@functools.cache
def _module(path: str) -> Any:
    """By file, so that it does not matter how pytest named the test module."""
    relative = Path(path).relative_to(ROOT).with_suffix("")
    return importlib.import_module(".".join(relative.parts))


def _serve(conn: Connection, rank: int, size: int, fabric: str, log: str) -> None:
    with open(log, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
        world = _join(conn, rank, size, fabric)
        while True:
            try:
                path, name, args, kwargs = pickle.loads(conn.recv_bytes())
            except EOFError:  # the test run is over
                os._exit(0)
            fn = functools.partial(getattr(_module(path), name), world, *args, **kwargs)
            before = world.rounds
            outcome = attempt(fn, rank)
            outcome.rounds = world.rounds - before
            conn.send_bytes(pickle.dumps(outcome))


def _join(conn: Connection, rank: int, size: int, fabric: str) -> World:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if fabric == "nvshmem":
        device = torch.device("cuda", rank % gpus_for(size, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    if fabric == "emulated":
        from tests.kernels import emulator

        emulator.install()
        fabric = "nvshmem"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        conn.send_bytes(pickle.dumps(store.port))
    else:
        port = pickle.loads(conn.recv_bytes())
        store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return World(rank, size, fabric, dist.group.WORLD, device)


def gpus_for(size: int, found: int) -> int:
    """As many GPUs as can have equally many ranks: one each, where there are enough."""
    return max(n for n in range(1, min(size, found) + 1) if size % n == 0)


class Pool:
    """``size`` workers that share a process group. A call that goes wrong makes the next one start new workers."""

    def __init__(self, size: int, fabric: str) -> None:
        self.size = size
        self.fabric = fabric
        self.workers: list[Any] = []
        self._conns: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ep-test-")

    @property
    def pids(self) -> list[int]:
        self._start()
        return [w.pid for w in self.workers]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S, **kw: Any) -> list[Any]:
        """``fn(world, *args)`` on every rank; their results, or AssertionError with what each rank said."""
        outcomes = self.outcomes(fn, *args, timeout=timeout, **kw)
        bad = [o for o in outcomes if o.kind != "ok"]
        assert not bad, "\n".join(map(str, bad))
        return [o.value for o in outcomes]

    def outcomes(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = TIMEOUT_S,
        stopped: tuple[int, ...] = (),
        **kw: Any,
    ) -> list[Outcome]:
        """Like run, for calls that are meant to end badly. Ranks that stop themselves go on after all others."""
        assert isinstance(fn, FunctionType) and "<" not in fn.__qualname__, "give a module's function"
        self._start()
        job = pickle.dumps((fn.__code__.co_filename, fn.__qualname__, args, kw))
        for conn in self._conns:
            conn.send_bytes(job)
        found: dict[int, Outcome] = {}
        end = time.monotonic() + timeout
        while len(found) < self.size and (left := end - time.monotonic()) > 0:
            open_ranks = {self._conns[r]: r for r in range(self.size) if r not in found}
            for conn in wait(list(open_ranks), left):
                rank = open_ranks[conn]  # type: ignore[index]
                found[rank] = self._receive(rank)
            if found.keys() | set(stopped) == set(range(self.size)):
                for rank in stopped:
                    os.kill(self.workers[rank].pid, signal.SIGCONT)
        for rank in range(self.size):
            if rank not in found:
                found[rank] = Outcome(rank, "hung", detail=self._stacks(rank))
        outcomes = [found[r] for r in range(self.size)]
        ROUNDS[self.fabric, self.size] += max(o.rounds for o in outcomes)
        if any(o.kind != "ok" for o in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        """End the workers at once, stopped ones too."""
        for conn in self._conns:
            conn.close()
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        for worker in self.workers:
            worker.join(10)
        self.workers, self._conns = [], []

    def _start(self) -> None:
        if self.workers:
            return
        if self.fabric == "emulated":  # once, and not within a call's time
            from tests.kernels.emulator import compile_all

            compile_all()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # A killed rank 0 takes the store with it; c10d's pages of backtraces about that hide the error.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=_serve,
                args=(theirs, rank, self.size, self.fabric, self._log(rank)),
                daemon=True,
                name=f"rank {rank} of {self.size}",
            )
            worker.start()
            theirs.close()
            self.workers.append(worker)
            self._conns.append(ours)
        port = self._conns[0].recv_bytes()
        for conn in self._conns[1:]:
            conn.send_bytes(port)

    def _receive(self, rank: int) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self._conns[rank].recv_bytes())
            return outcome
        except (EOFError, OSError):
            self.workers[rank].join(10)
            return Outcome(rank, "dead", message=f"exit code {self.workers[rank].exitcode}")

    def _log(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"{rank}.stacks")

    def _stacks(self, rank: int) -> str:
        """Where a hung worker is; a stopped one cannot say."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.workers[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)
        return Path(self._log(rank)).read_text()


class Pools:
    """Pools by size and fabric, made when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, str], Pool] = {}

    def __call__(self, size: int, fabric: str = "host") -> Pool:
        if (size, fabric) not in self._pools:
            self._pools[size, fabric] = Pool(size, fabric)
        return self._pools[size, fabric]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@contextlib.contextmanager
def pools() -> Iterator[Pools]:
    made = Pools()
    try:
        yield made
    finally:
        made.close()
