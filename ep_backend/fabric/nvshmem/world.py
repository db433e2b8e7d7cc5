"""The process's NVSHMEM world and its symmetric memory. A process joins one world, of one set of ranks, for its life."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ep_backend.errors import EpError
from ep_backend.fabric.meeting import Meeting

log = logging.getLogger(__name__)

# Kept as they are where the environment says otherwise. Multicast is not used, and mapped peers need no NIC.
ENVIRONMENT = {"NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_SYMMETRIC_SIZE": str(1 << 30)}
NICS = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class World:
    """The ranks (of the default process group) that share symmetric memory, and the library's version."""

    ranks: tuple[int, ...]
    library: str


_world: World | None = None


def join(meeting: Meeting, device: torch.device, heap_bytes: int) -> World:
    """The world of these ranks, made by the first buffer; collective, and an error on every rank if one is in another."""
    global _world
    theirs = meeting.exchange("nvshmem/world", _world.ranks if _world else None)
    others = {r: w for r, w in enumerate(theirs) if w is not None and w != meeting.ranks}
    if others or (_world is None) != (theirs.count(None) == len(theirs)):
        raise EpError(
            f"rank {meeting.rank}: NVSHMEM is one world a process, and this group's ranks {list(meeting.ranks)} are not it "
            f"(by rank of the group: {theirs}). Make every nvshmem buffer of a process over the same ranks"
        )
    if _world is None:
        _world = World(meeting.ranks, _initialise(meeting, device, heap_bytes))
    return _world


def joined() -> World:
    """The process's world, which the first buffer has made."""
    assert _world is not None
    return _world


def _initialise(meeting: Meeting, device: torch.device, heap_bytes: int) -> str:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not NICS.exists():
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    if heap_bytes > int(_bytes(os.environ["NVSHMEM_SYMMETRIC_SIZE"]) * 0.9):  # a static heap must hold the buffer
        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(heap_bytes * 2)
    try:
        import nvshmem.core as core
        from cuda.core import Device
    except ImportError as e:
        raise EpError(
            f"the nvshmem fabric needs nvshmem4py and cuda-core ({e}); install ep-backend[cuda], or use fabric='host'"
        ) from e
    Device(device.index).set_current()
    mine = bytes(core.get_unique_id()._data.tobytes()) if meeting.rank == 0 else b""
    uid = core.get_unique_id(empty=True)
    ctypes.memmove(uid.ptr, meeting.exchange("nvshmem/uid", mine)[0], uid._data.nbytes)
    core.init(device=Device(device.index), uid=uid, rank=meeting.rank, nranks=meeting.size, initializer_method="uid")
    version = str(core.get_version().libnvshmem_version)
    transport = os.environ.get("NVSHMEM_REMOTE_TRANSPORT", "its default transport")
    log.info("NVSHMEM %s, %d ranks, remote puts by %s", version, meeting.size, transport)
    return version


def _bytes(text: str) -> int:
    scale = {"K": 10, "M": 20, "G": 30, "T": 40}.get(text[-1:].upper())
    return int(float(text[:-1]) * (1 << scale)) if scale else int(text)


class Heap:
    """One buffer's symmetric memory and where this GPU maps every rank's."""

    def __init__(self, size: int, control: int, meeting: Meeting, near: list[int]) -> None:
        import nvshmem.bindings as nvshmem

        self.size, self._nvshmem, self._meeting = size, nvshmem, meeting
        free, total = torch.cuda.mem_get_info()
        room = meeting.exchange("nvshmem/room", free)
        if min(room) < size:
            raise EpError(
                f"the buffer needs {size} bytes of symmetric memory on every rank; free by rank: {room} of {total}. "
                "Lower max_tokens or lanes, or leave the buffer more memory"
            )
        self.base = int(nvshmem.malloc(size))
        got = meeting.exchange("nvshmem/base", self.base)
        if 0 in got:
            raise EpError(f"NVSHMEM found no {size} bytes of symmetric memory on rank {got.index(0)} ({free} bytes were free)")
        self.peers = [self.base if r == meeting.rank else int(nvshmem.ptr(self.base, r)) for r in range(meeting.size)]
        unmapped = [r for r in near if self.peers[r] == 0]
        if unmapped:
            raise EpError(
                f"rank {meeting.rank} has no mapping of the memory of rank {', '.join(map(str, unmapped))}: these kernels "
                "store to peers of one NVLink domain; between domains use hybrid alone, with rail='put' (a deployment's "
                "ep.rail) and gpus_per_node set"
            )
        fill(self.base, 0, control)
        torch.cuda.synchronize()
        meeting.exchange("nvshmem/cleared", True)

    def close(self, seconds: float) -> None:
        """Freeing is collective and waits without bound, so that only a group that is complete, and knows it, does it; else
        the memory stays until the process ends."""
        if not self.base:
            return
        base, self.base = self.base, 0
        device = torch.cuda.current_device()

        def free() -> None:
            torch.cuda.set_device(device)
            self._nvshmem.free(base)

        missing = self._meeting.rendezvous("nvshmem/here", seconds) or self._meeting.rendezvous("nvshmem/all", seconds)
        freeing = threading.Thread(target=free, daemon=True)
        if not missing:
            freeing.start()
            freeing.join(seconds)
        if missing or freeing.is_alive():
            who = ", ".join(map(str, missing)) or "(unknown)"
            log.warning("rank %s did not come to destroy(); %d bytes stay until the process ends", who, self.size)


def fill(address: int, value: int, count: int) -> None:
    """Set bytes of device memory."""
    check(driver().cuMemsetD8(address, value, count))


def driver() -> Any:
    from cuda.bindings import driver as module

    return module


@contextmanager
def current(context: Any) -> Iterator[None]:
    """This CUDA context is the thread's: one that has used no CUDA so far has none, and another may be on another device."""
    check(driver().cuCtxPushCurrent(context))
    try:
        yield
    finally:
        check(driver().cuCtxPopCurrent())


def check(result: Any) -> Any:
    """The value of a driver call, or an error with its name."""
    status, *values = result
    if int(status) != 0:
        raise EpError(f"CUDA driver: {status.name}")
    return values[0] if values else None
