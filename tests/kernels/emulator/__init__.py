"""Runs the kernels without a GPU: the sources that nvcc compiles, as fibers on a CPU (include/simt.h says what is modelled).

In a process that calls :func:`install`, ``fabric="nvshmem"`` takes CPU tensors and launches go here; heaps of ranks are
shared memory. The current stream's launches are synchronous; a side stream is a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch

from ep_backend.fabric.host.heap import Heap as SharedHeap
from ep_backend.fabric.nvshmem import fabric
from ep_backend.fabric.nvshmem.images import IMAGE_KERNELS, PUT_IMAGES
from ep_backend.fabric.nvshmem.launch import ARGS_BYTES, Args, Launch

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[2] / "kernels"
MULTIPROCESSORS = 3  # blocks are threads of this machine
# Kernels that wait for peers, combine if it sums: their blocks are resident together. Others need not be.
WAITING = {f"ep_{name}" for name in ("dispatch", "await", "forward", "rail_sum", "expert_await", "expert_sum")}
WAITING |= {f"ep_ring_{name}" for name in ("count", "dispatch", "combine")}
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE")


@functools.cache
def compiled(image: str) -> ctypes.CDLL:
    """One image's kernels; compiled once for all processes of this user and these sources."""
    sources = [*HERE.rglob("*.h"), *HERE.rglob("*.cuh"), HERE / "simt.cc", *(KERNELS / "include" / "ep").iterdir()]
    name = image.removesuffix("_put")
    sources.append(KERNELS / f"{name}.cu")
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(sources)) + " ".join(FLAGS).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"ep-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{image}-{digest}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # every rank asks at once
        if not library.exists():
            mine = library.with_suffix(f".{os.getpid()}")
            includes = (f"-I{HERE / 'include'}", f"-I{KERNELS / 'include'}", "-include", "simt.h")
            source = ("-x", "c++", str(KERNELS / f"{name}.cu"), str(HERE / "simt.cc"))
            put = ("-DEP_RAIL_PUT",) if image != name else ()
            done = subprocess.run(["g++", *FLAGS, *put, *includes, "-o", str(mine), *source], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            mine.rename(library)
    return ctypes.CDLL(str(library))


def compile_all() -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compiled, [*IMAGE_KERNELS, *(f"{image}_put" for image in PUT_IMAGES)]))


class Graph:
    """Stands in for a captured CUDA graph."""

    recording: ClassVar[list[Callable[[], object]] | None] = None

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def __enter__(self) -> Graph:
        Graph.recording = self._steps
        return self

    def __exit__(self, *error: Any) -> None:
        Graph.recording = None

    def call(self, fn: Callable[[], object]) -> None:
        self._steps.append(fn)

    def replay(self) -> None:
        for step in self._steps:
            step()


class Kernel:
    """Stands in for launch.Kernel."""

    launches = 0

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._entry = ctypes.cast(getattr(library, name), ctypes.c_void_p)
        self._launch = library.emulator_launch
        self._launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_uint] * 5)
        self._seed = int(os.environ.get("EP_EMULATOR_SEED", os.getpid()))

    def launch(self, how: Launch, args: Args, stream: int) -> None:
        assert len(args.buffer) == ARGS_BYTES
        if Graph.recording is None:
            self._run(how, args.buffer, stream)
        else:
            Graph.recording.append(functools.partial(self._run, how, ctypes.create_string_buffer(args.buffer.raw), stream))

    def _run(self, how: Launch, args: ctypes.Array[ctypes.c_char], stream: int) -> None:
        Kernel.launches += 1
        waits = self.name in WAITING or (self.name in ("ep_combine", "ep_sums") and how.roles.receivers > 0)
        rest = how.blocks, 32 * how.warps, self._seed + Kernel.launches, stream, int(not waits and Kernel.launches % 2)
        if stream == 0:
            self._launch(self._entry, args, *rest)
        else:  # the caller goes on and packs other arguments
            Side.all[stream].give(self._launch, self._entry, ctypes.create_string_buffer(args.raw), *rest)


class Side:
    """Stands in for device.Side: a thread."""

    all: ClassVar[dict[int, Side]] = {}

    def __init__(self) -> None:
        self.stream = len(Side.all) + 1
        Side.all[self.stream] = self
        self._worker = ThreadPoolExecutor(1)
        self._given: list[Future[None]] = []

    def give(self, fn: Callable[..., None], *args: Any) -> None:
        self._given.append(self._worker.submit(fn, *args))

    def fork(self) -> None: ...  # the current stream is never behind

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # kernels of the current stream run at once

    def join(self) -> None:
        if Graph.recording is None:
            self._wait()
        else:
            Graph.recording.append(self._wait)

    def _wait(self) -> None:
        for done in self._given:
            done.result()
        self._given.clear()


class Heap:
    """Stands in for world.Heap over the host fabric's shared memory."""

    def __init__(self, size: int, meeting: Any) -> None:
        self.size, self._heap = size, SharedHeap(size, meeting)
        self.all = self.peers = [int(b.ctypes.data) for b in self._heap.bytes]
        self.base = self.peers[meeting.rank]
        self._joined: list[ctypes.CDLL] = []

    def join(self, network: ctypes.CDLL) -> None:
        """Puts may go to these heaps."""
        peers = (ctypes.c_void_p * len(self.all))(*self.all)
        network.emulator_join(ctypes.c_void_p(self.base), ctypes.c_size_t(self.size), peers, len(self.all))
        self._joined.append(network)

    def close(self, seconds: float) -> None:
        for network in self._joined:
            network.emulator_leave(ctypes.c_void_p(self.base))
        self.base = 0
        with contextlib.suppress(BufferError):
            self._heap.close()


class EmulatedGpu:
    """Stands in for device.Gpu."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.multiprocessors = MULTIPROCESSORS
        self._puts: list[ctypes.CDLL] = []

    def join(self, size: int, meeting: Any) -> None: ...

    def heap(self, size: int, control: int, meeting: Any, near: list[int]) -> Heap:
        heap = Heap(size, meeting)
        heap.peers = [peer if rank in near else 0 for rank, peer in enumerate(heap.peers)]  # a stray store shows
        for network in self._puts:
            heap.join(network)
        return heap

    def kernels(self, meeting: Any, *, rail_put: bool) -> dict[str, Kernel]:
        found = {}
        for image, names in IMAGE_KERNELS.items():
            put = rail_put and image in PUT_IMAGES
            library = compiled(f"{image}_put" if put else image)
            self._puts += [library] * put
            found.update({name: Kernel(library, f"ep_{name}") for name in names})
        return found

    def mapped(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int64)

    def stream(self) -> int:
        return 0

    def side(self) -> Side:
        return Side()

    def uses(self, tensor: torch.Tensor) -> None: ...

    def capturing(self) -> bool:
        return Graph.recording is not None

    def finish_stream(self) -> None: ...

    def ends(self, seconds: float) -> bool:
        for side in Side.all.values():
            side.join()
        return True

    def read(self, tensor: torch.Tensor) -> Any:
        return tensor.tolist()

    def set_word(self, address: int) -> None:
        compiled("combine").emulator_set_word(ctypes.c_void_p(address))


def install() -> None:
    """From here on this process's nvshmem fabric is the emulated one."""
    fabric.Gpu = EmulatedGpu  # type: ignore[misc, assignment]
