"""Counters of one rank's buffer, kept where bytes are written."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PATHS = ("local", "scale_up", "scale_out", "forwarded")  # forwarded: written by a relay for another rank
PHASES = ("send", "receive")


@dataclass
class OpStats:
    """One operation of one mode. ``forwarded`` counts on top of the path that the record took."""

    calls: int = 0
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # of the host, waits included
    records: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PATHS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PATHS, 0))

    def count(self, path: str, records: int, nbytes: int) -> None:
        self.records[path] += records
        self.bytes[path] += nbytes

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.phase_s[phase] += time.perf_counter() - started

    @property
    def seconds(self) -> float:
        """In the phases of these calls, without the time between them."""
        return sum(self.phase_s.values())


@dataclass
class ModeStats:
    """Both operations of one mode and the tokens that entered dispatch."""

    dispatch: OpStats = field(default_factory=OpStats)
    combine: OpStats = field(default_factory=OpStats)
    tokens: int = 0
    slots_high_water: int = 0  # most tokens one call dispatched; compare with max_tokens


@dataclass
class BufferStats:
    """Everything a rank counts. Times are seconds."""

    modes: dict[str, ModeStats] = field(default_factory=dict)
    wait_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # by peer waited for
    expert_rows: list[int] = field(default_factory=list)  # received rows by local expert
    timeouts: int = 0  # waits that ended without what they waited for

    def mode(self, name: str) -> ModeStats:
        return self.modes.setdefault(name, ModeStats())

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: modes -> {dispatches, combines, tokens, seconds, phase_s, records, bytes, and combine's last four}."""
        return {
            "modes": {
                name: {
                    "dispatches": m.dispatch.calls,
                    "combines": m.combine.calls,
                    "tokens": m.tokens,
                    "seconds": m.dispatch.seconds,
                    "combine_seconds": m.combine.seconds,
                    "phase_s": dict(m.dispatch.phase_s),
                    "combine_phase_s": dict(m.combine.phase_s),
                    "slots_high_water": m.slots_high_water,
                    "records": dict(m.dispatch.records),
                    "bytes": dict(m.dispatch.bytes),
                    "combine_records": dict(m.combine.records),
                    "combine_bytes": dict(m.combine.bytes),
                }
                for name, m in list(self.modes.items())  # another thread may ask while a call adds a name
            },
            "wait_s": {str(peer): s for peer, s in list(self.wait_s.items())},
            "expert_rows": list(self.expert_rows),
            "timeouts": self.timeouts,
        }
