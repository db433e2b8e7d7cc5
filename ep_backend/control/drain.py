"""A change of mode where CUDA graphs hold the old one: requests inside finish and new ones wait, every rank drops its
graphs, takes the new mode and captures again, and requests go on.

A rank that cannot capture sends all of them back to the old mode. Nothing is lost either way; if the way back fails too,
the role stays paused, for its ranks have no graphs that agree, and the error says that it must be restarted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ep_backend.control.ranks import RankFailed, silence
from ep_backend.deployment.rank_status import RankStatus
from ep_backend.deployment.schema import ModeName

POLL_S = 0.2


class EngineFailed(Exception):
    """An instance did not do what all must do; the message names it and says why."""


class Engine(Protocol):
    """What is asked of a role's engine instances. Each method raises EngineFailed, at the latest after ``limit_s``."""

    async def pause(self, limit_s: float) -> None:
        """Returns when the requests inside have finished; new ones wait."""

    async def resume(self, limit_s: float) -> None:
        """Let requests go on, also after a pause that did not come about."""

    async def recapture(self, token: int, mode: ModeName, limit_s: float) -> None:
        """Have every rank drop its graphs and capture in that mode. What came of it is in the ranks' own reports."""


class Reports(Protocol):
    async def statuses(self) -> list[RankStatus]: ...


@dataclass(frozen=True)
class Limits:
    """Seconds for the requests inside to finish, and for one capture on all ranks."""

    drain_s: float
    capture_s: float


async def drain(
    engine: Engine, ranks: Reports, old: ModeName, new: ModeName, tokens: tuple[int, int], limits: Limits
) -> list[RankStatus]:
    """The ranks' reports in the new mode. ``tokens`` mark this attempt and the way back; neither is in use.

    Raises RankFailed, with every rank back in the old mode unless the message says otherwise.
    """
    try:
        await engine.pause(limits.drain_s)
    except EngineFailed as failure:
        await _resume(engine, limits, [f"{failure}; nothing was changed"])
        raise RankFailed([f"{failure}; nothing was changed"], refused=False) from None
    try:
        statuses = await _captured(engine, ranks, new, tokens[0], limits)
    except RankFailed as failure:
        try:
            await _captured(engine, ranks, old, tokens[1], limits)
        except RankFailed as worse:
            lines = [str(failure), f"and the way back to {old} failed too: {worse}"]
            raise RankFailed([*lines, "requests wait: restart the role (flip --restart)"], refused=False) from None
        await _resume(engine, limits, [str(failure)])
        raise
    await _resume(engine, limits, [f"every rank runs {new}"])
    return statuses


async def _captured(engine: Engine, ranks: Reports, mode: ModeName, token: int, limits: Limits) -> list[RankStatus]:
    """Every rank's report of a capture that went well; RankFailed names the ranks where it did not."""
    deadline = time.monotonic() + limits.capture_s
    lines = []
    try:
        await engine.recapture(token, mode, limits.capture_s)
    except EngineFailed as failure:
        lines.append(str(failure))
    while True:
        statuses = await ranks.statuses()
        faults = [(rank, _fault(status, token, mode)) for rank, status in enumerate(statuses)]
        open_ranks = [status for status in statuses if status.error is None and status.graphs.token != token]
        # A failed request to the engine needs no more waiting: what its ranks have not begun they will not begin.
        if not open_ranks or lines or time.monotonic() > deadline or any(map(silence, open_ranks)):
            break
        await asyncio.sleep(POLL_S)
    lines += [f"rank {rank} ({statuses[rank].agent}) {fault}" for rank, fault in faults if fault]
    if lines:
        raise RankFailed(lines, refused=False)
    return statuses


def _fault(status: RankStatus, token: int, mode: ModeName) -> str | None:
    if status.error is not None:
        return f"does not answer ({status.error})"
    if status.graphs.token != token:
        return silence(status) or f"has not captured {mode} in time"
    if status.graphs.error is not None:
        return f"cannot capture {mode}: {status.graphs.error}"
    if status.mode_desired != mode:
        return f"captured {status.mode_desired}, not {mode}"
    return None


async def _resume(engine: Engine, limits: Limits, so_far: Sequence[str]) -> None:
    try:
        await engine.resume(limits.drain_s)
    except EngineFailed as failure:
        lines = [*so_far, f"but requests wait, for {failure}", "restart the role (flip --restart)"]
        raise RankFailed(lines, refused=False) from None
