"""Errors a caller can act on. Bad arguments are plain ValueError and TypeError, raised before anything is sent."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """Who waited for whom when a bounded wait ended. ``expected`` and ``seen`` are (epoch, count) of the signal word."""

    op: str
    mode: str
    lane: int
    epoch: int
    rank: int
    peer: int
    expected: tuple[int, int]
    seen: tuple[int, int]

    def __str__(self) -> str:
        fields = ", ".join(f"{k}={v}" for k, v in asdict(self).items() if k != "op")
        return f"{self.op}: {fields}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """A question about the nearest known name; ``otherwise`` if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean `{close[0]}`?" if close else otherwise


def ranks_by_value(values: Iterable[str | None]) -> str:
    """What each rank says, in order of the ranks, those who say the same together; None says nothing."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(str(rank))
    return "; ".join(f"rank {', '.join(those)}: {value}" for value, those in ranks.items())


class EpError(RuntimeError):
    """Base of the errors that a buffer raises at run time."""


class EpConfigMismatch(EpError):
    """Ranks asked for different buffers. Raised on every rank by the constructor; nothing was allocated."""


class EpRefused(EpError):
    """A peer refused its arguments of this call before sending. Raised on every rank of the host fabric; the buffer goes on
    working."""


class EpDisagree(EpError):
    """Ranks called different modes, layouts or payloads in one epoch, or repeated different dispatches of normal, or sent more
    tokens than one expects, or on GPUs one refused what others called. The buffer is failed."""


class EpTimeout(EpError):
    """A bounded wait ended. The buffer is failed; ``record`` says who waited for whom."""

    def __init__(self, record: WaitRecord, seconds: float) -> None:
        super().__init__(
            f"rank {record.rank} waited {seconds:g} s for rank {record.peer} in {record}. "
            "The buffer is failed on all ranks; find out why that peer stalled or did not call, then rebuild it on each "
            "(a larger timeout_s helps only if the peer was merely slow)"
        )
        self.record = record
        self.seconds = seconds

    def __reduce__(self) -> tuple[type[EpTimeout], tuple[WaitRecord, float]]:
        return type(self), (self.record, self.seconds)  # engines pickle a worker's exceptions


class EpFailed(EpError):
    """The buffer failed earlier, here or on a peer, and must be rebuilt on all ranks."""


class OutputLost(BaseException):
    """Standard output refused bytes. No OSError: commands report those as faults of what they read or write themselves."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.error = error
