"""Cooperative tasks with one bounded wait: what warps are on a GPU, generators are here.

A task yields None after progress, or a Blocked that says which word it waits for. The runner turns round until all
tasks have ended; when none progresses it looks for a peer that gave up, and at last raises with who waited for whom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from ep_backend.errors import EpTimeout, WaitRecord


@dataclass(frozen=True, slots=True)
class Blocked:
    """A wait for ``peer`` to bring a word to ``expected`` (epoch, count); it was ``seen``."""

    peer: int
    expected: tuple[int, int]
    seen: tuple[int, int]


Task = Generator[Blocked | None, None, None]


class Beside:
    """A task that goes on while its rank waits for anything, in whatever lane, like a kernel on a stream of its own."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._turn = threading.Lock()  # lanes may have a thread each
        self._wait: Blocked | None = None
        self._error: Exception | None = None
        self._done = False

    def step(self) -> bool:
        """Whether it progressed; not if another thread is at it."""
        if self._done or not self._turn.acquire(blocking=False):
            return False
        try:
            self._wait = next(self._task)
        except StopIteration:
            self._done = True
        except Exception as e:
            self._error, self._done = e, True
        finally:
            self._turn.release()
        return self._wait is None

    def end(self) -> None:
        with self._turn:
            self._task.close()
            self._done = True

    def join(self) -> Task:
        """Wait for its end; its error is raised here."""
        while not self._done:
            yield self._wait
        if self._error is not None:
            raise self._error


_SPINS = 50  # turns before sleeping: a peer on another core answers within these
_NAP_S = 50e-6
_LONG_NAP_S = 1e-3


def run(
    tasks: Iterable[Task],
    record: Callable[[Blocked], WaitRecord],
    timeout_s: float,
    check: Callable[[list[Blocked]], None],
    waited: Callable[[int, float], None],
    beside: Callable[[], bool],
) -> None:
    """Run the tasks to their ends.

    ``record`` completes a Blocked for the error, ``check`` raises if a peer gave up, left or disagrees, ``waited`` is told
    seconds by peer, ``beside`` lets other work go on and says whether it did. Raises EpTimeout when nothing has progressed
    for ``timeout_s``.
    """
    live = list(tasks)
    blocked: list[Blocked] = []
    idle_turns = 0
    idle_since = time.monotonic()
    while live:
        progressed = beside()
        blocked.clear()
        for task in list(live):
            try:
                wait = next(task)
            except StopIteration:
                live.remove(task)
                progressed = True
                continue
            if wait is None:
                progressed = True
            else:
                blocked.append(wait)
        now = time.monotonic()
        if progressed:
            idle_turns, idle_since = 0, now
            continue
        idle_turns += 1
        if idle_turns <= _SPINS:
            time.sleep(0)  # lets other threads run; sched_yield would let every busy process go first
        else:
            check(blocked)
            if now - idle_since > timeout_s:
                raise EpTimeout(record(blocked[0]), timeout_s)
            time.sleep(_NAP_S if idle_turns < 10 * _SPINS else _LONG_NAP_S)
        elapsed = time.monotonic() - now
        for peer in {b.peer for b in blocked}:
            waited(peer, elapsed)
