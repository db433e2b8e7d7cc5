"""A symmetric heap in shared memory: one anonymous file a rank, mapped by every rank.

The files have no name, so nothing is left behind however a process ends. Order between processes: x86-64 keeps stores
in order and loads in order, so data written before a signal word is seen by whoever saw the word. Other processors get
a full barrier from the kernel (membarrier) before each signal store and after each signal load.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ep_backend.errors import EpError
from ep_backend.fabric.meeting import Meeting

Bytes = npt.NDArray[np.uint8]

_MEMBARRIER = {"aarch64": 283, "riscv64": 283}  # system call numbers
_GLOBAL_EXPEDITED = 2


def _fence() -> Callable[[], None] | None:
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        return None
    if machine not in _MEMBARRIER:
        raise EpError(f"the host fabric knows no memory barrier for {machine}; use x86-64 or aarch64")
    call, number = ctypes.CDLL(None).syscall, _MEMBARRIER[machine]
    return lambda: call(number, _GLOBAL_EXPEDITED, 0, 0)


class Heap:
    """Every rank's heap as bytes, and its signal words as 64-bit loads and stores."""

    def __init__(self, nbytes: int, meeting: Meeting) -> None:
        if not hasattr(os, "memfd_create"):
            raise EpError(f"the host fabric needs Linux (memfd), not {sys.platform}")
        free = _available_bytes()
        everyone = meeting.exchange("memory", (nbytes, free))
        asked = sum(n for n, _ in everyone)
        if asked > min(f for _, f in everyone):
            raise EpError(
                f"{meeting.size} ranks ask for {asked} bytes of shared memory ({nbytes} each) and "
                f"{free} are free on this machine; lower max_tokens, modes or lanes (EpBuffer.size_hint itemises)"
            )
        self._maps: list[mmap.mmap] = []
        try:
            with open(os.memfd_create("ep_backend"), "wb", buffering=0) as own:
                own.truncate(nbytes)
                places = [f"/proc/{pid}/fd/{fd}" for pid, fd in meeting.exchange("heap", (os.getpid(), own.fileno()))]
                self._map(places, nbytes, meeting)
        except OSError as e:
            raise EpError(_beyond_limits(meeting.rank, nbytes, e)) from e
        self.bytes: list[Bytes] = [np.frombuffer(m, dtype=np.uint8) for m in self._maps]
        self._words = [memoryview(m).cast("Q") for m in self._maps]
        self._fence = _fence()

    def _map(self, places: list[str], nbytes: int, meeting: Meeting) -> None:
        """Every rank's; the mappings keep the memory afterwards. EpError on all ranks if one of them cannot."""
        problem = None
        for place in places:
            try:
                with open(place, "r+b", buffering=0) as peer:
                    self._maps.append(mmap.mmap(peer.fileno(), nbytes))
            except (FileNotFoundError, PermissionError) as e:
                problem = (
                    f"rank {meeting.rank} cannot open a peer's heap at {place}: {e.strerror}; ranks of the host "
                    "fabric must share a machine, a user and a process namespace"
                )
            except OSError as e:
                problem = _beyond_limits(meeting.rank, nbytes, e)
        problems = meeting.exchange("mapped", problem)
        for told in (problem, *problems):
            if told is not None:
                raise EpError(told)

    def load(self, rank: int, offset: int) -> int:
        """Acquire: what the writer stored before this word is visible after it."""
        word = self._words[rank][offset >> 3]
        if self._fence:
            self._fence()
        return word

    def store(self, rank: int, offset: int, word: int) -> None:
        """Release: one store, after everything written before."""
        if self._fence:
            self._fence()
        self._words[rank][offset >> 3] = word

    def rows(self, rank: int, offset: int, count: int, stride: int) -> Bytes:
        """``count`` records of ``stride`` bytes at that offset, as [count, stride]."""
        return self.bytes[rank][offset : offset + count * stride].reshape(count, stride)

    def close(self) -> None:
        self.bytes.clear()
        for view in self._words:
            view.release()
        self._words.clear()
        for m in self._maps:
            with contextlib.suppress(BufferError):  # a caller's view keeps the mapping as long as it lives
                m.close()
        self._maps.clear()


def _beyond_limits(rank: int, nbytes: int, error: OSError) -> str:
    return (
        f"rank {rank} cannot take or map the {nbytes} bytes of each rank's shared memory: {error.strerror}; raise what "
        "limits the process (`ulimit -a` lists it), or lower max_tokens, modes or lanes"
    )


def _available_bytes() -> int:
    with open("/proc/meminfo") as f:
        for line in f:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise EpError("/proc/meminfo has no MemAvailable")
