"""What a fabric does for the buffer. A call is one dispatch and the combine that answers it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ep_backend.layout import COUNT_MASK, Payload
from ep_backend.modes import Layout, Mode

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from ep_backend.stats import BufferStats


@dataclass(slots=True)
class Received:
    """What a rank got: see :class:`ep_backend.dispatched.Dispatched` for shapes."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: torch.Tensor | None
    topk_weights: torch.Tensor | None
    counts: torch.Tensor
    num_rows: int | None


@dataclass(slots=True, eq=False)
class Routing:
    """Which token goes to which experts. Calls that repeat it share it."""

    ids: torch.Tensor  # [T, K] int32 or int64, -1 for none
    weights: torch.Tensor  # [T, K] fp32
    counted: Any = None  # the fabric's own: what normal's exchange of counts told, once there was one


@dataclass(slots=True)
class Call:
    """One dispatch and its combine. Tensors are checked, contiguous and on the fabric's device."""

    mode: Mode
    layout: Layout
    payload: Payload
    lane: int
    epoch: int
    max_tokens: int
    tokens: int
    x: torch.Tensor  # [T, H] activations, or e4m3 if scales are given
    scales: torch.Tensor | None  # [T, H/128] fp32 or packed int32, of a caller who quantised
    routing: Routing
    sms: int | None
    host_counts: bool  # rows are cut to the exact count, which the host waits for
    repeats: bool = False  # its counts are known, so that none of the ranks exchanges them
    answer: tuple[int, ...] | None = None  # shape of combine's y, once the rows are here, which may be gone by then
    state: Any = field(default=None)  # the fabric's own
    split: bool = False  # the phase under way is send only: its receive phase comes later, behind other work
    aside: bool = False  # an operation of it ran on the lane's own stream
    most_tokens: int | None = None  # that any rank sends, where the caller knows less than max_tokens

    @property
    def ids(self) -> torch.Tensor:
        return self.routing.ids

    @property
    def weights(self) -> torch.Tensor:
        return self.routing.weights

    @property
    def most(self) -> int:
        """Tokens that any rank may send."""
        return self.max_tokens if self.most_tokens is None else self.most_tokens

    def most_rows(self, ranks: int) -> int:
        """Rows of compact outputs that the host does not count."""
        return ranks * self.most

    @property
    def round(self) -> int:
        """Which round of which lane it is, as far as a word's count has room for that."""
        return (self.epoch << 1 | self.lane) & COUNT_MASK

    @property
    def exact(self) -> bool:
        """Compact rows are cut to their number, for which the host waits unless it is known."""
        return self.layout is Layout.COMPACT and self.host_counts

    @property
    def stays(self) -> bool:
        """Combine reads this rank's own answers from y. Between the phases of a split call the caller may use y's memory for
        something else."""
        return self.layout is Layout.COMPACT and not self.split


def other_round(rank: int, own: int, peer: int, seen: int) -> str:
    """Why two ranks cannot repeat dispatches of these rounds at once."""
    mine, theirs = (f"of epoch {count >> 1} in lane {count & 1}" for count in (own, seen))
    return f"rank {rank} repeats the dispatch {mine} and rank {peer} that {theirs}; give all ranks the handle of the same one"


class Fabric(Protocol):
    """Moves one rank's records. Every wait is bounded by the configuration's timeout and ends in an EpError."""

    device: torch.device
    stats: BufferStats
    allocated_bytes: int
    proposal: int  # carried in the intent words of the following dispatches; 0: none

    @property
    def agreed(self) -> int:
        """The proposal that every rank carried in the last finished dispatch, else 0; equal on all ranks."""

    def start_dispatch(self, call: Call) -> None:
        """Send every record of the call. Waits for nobody but in normal mode, which does all its work here, and behind an epoch
        that was refused, until all ranks have left it."""

    def finish_dispatch(self, call: Call) -> Received:
        """Wait for every source and place what arrived."""

    def start_combine(self, call: Call, y: torch.Tensor) -> None:
        """Send every partial sum of the call (all ranks have called dispatch)."""

    def finish_combine(self, call: Call, out: torch.Tensor) -> None:
        """Wait for every partial sum and add them into ``out`` [T, H]."""

    def aside(self, lane: int) -> AbstractContextManager[None]:
        """Work on a stream of the lane's own, behind what the current one was given so far. On a CPU there are no streams."""

    def uses(self, *tensors: torch.Tensor | None) -> None:
        """The current stream uses tensors that another one allocated: their memory is not given away before it has."""

    def refuse(self, rounds: list[tuple[int, int]], reason: str) -> None:
        """Tell every peer that this rank will not take part in these epochs of lanes. Several: one was meant, nobody knows
        which, and all are used up."""

    def refused_with(self, lane: int, epoch: int) -> list[tuple[int, int]]:
        """What peers used up by the refusal that used up this epoch."""

    def capturing(self) -> bool:
        """Whether the caller's work is being captured in a CUDA graph."""

    def executed(self) -> tuple[Mode | None, int]:
        """Mode and epoch of the last dispatch, from the record of whatever carried it out."""

    def lane_rounds(self) -> list[int]:
        """Rounds that were finished, by lane; the record is that of :meth:`executed`."""

    def abort(self, reason: str) -> None:
        """Fail the buffer on every rank that can be reached."""

    def failure(self) -> str | None:
        """Why the buffer is failed, or None."""

    def transports(self) -> dict[str, list[int]]:
        """Peers by the way they are reached: "local", "scale_up", "scale_out"."""

    def destroy(self) -> None:
        """Release everything; bounded, never raises for a missing peer."""
