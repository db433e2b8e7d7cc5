"""Cooperative tasks with one bounded wait: what warps are on a GPU, generators are here.

A task yields None after progress, or a Blocked that says which word it waits for. The runner turns round until all
tasks have ended; when none progresses it looks for a peer that gave up, and at last raises with who waited for whom.
"""

from __future__ import annotations

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

_SPINS = 50  # turns before sleeping: a peer on another core answers within these
_NAP_S = 50e-6
_LONG_NAP_S = 1e-3


def run(
    tasks: Iterable[Task],
    record: Callable[[Blocked], WaitRecord],
    timeout_s: float,
    check: Callable[[list[Blocked]], None],
    waited: Callable[[int, float], None],
) -> None:
    """Run the tasks to their ends.

    ``record`` completes a Blocked for the error, ``check`` raises if a peer gave up, left or disagrees, ``waited``
    is told seconds by peer. Raises EpTimeout when no task has progressed for ``timeout_s``.
    """
    live = list(tasks)
    blocked: list[Blocked] = []
    idle_turns = 0
    idle_since = time.monotonic()
    while live:
        progressed = False
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
