"""The four dispatch protocols as data: where each removes duplicates, where its records land, and what its words mean."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ep_backend.errors import did_you_mean


class Mode(str, Enum):
    """A dispatch protocol."""

    NORMAL = "normal"
    DIRECT = "direct"
    LOW_LATENCY = "low_latency"
    HYBRID = "hybrid"

    @property
    def spec(self) -> ModeSpec:
        return MODES[self]

    @property
    def code(self) -> int:
        """The mode's number in an intent word."""
        return list(Mode).index(self)


class Family(str, Enum):
    """Modes of one family give the engine the same layout, so that a flip inside it needs no restart."""

    PREFILL = "prefill"
    DECODE = "decode"


class Layout(str, Enum):
    """What a dispatch returns: one row a token ("compact"), or rows sorted into [local experts, rows] ("masked")."""

    COMPACT = "compact"
    MASKED = "masked"


class Placement(str, Enum):
    """Where records land at the receiver."""

    SLOTS = "slots"  # [source rank, max_tokens], one writer a segment
    RINGS = "rings"  # bounded rings with head and tail credit


@dataclass(frozen=True, slots=True)
class ModeSpec:
    """One row of the mode table."""

    family: Family
    layout: Layout  # towards the engine, unless the call asks for the other one
    placement: Placement
    two_hops: bool  # over a relay on the rail when there are several nodes
    counts_first: bool  # the host knows the exact size before data moves
    graph: bool  # can be captured in a CUDA graph
    hook: bool  # the receive phase can be split off
    arrival: str
    credit: str


MODES: dict[Mode, ModeSpec] = {
    Mode.NORMAL: ModeSpec(
        Family.PREFILL,
        Layout.COMPACT,
        Placement.RINGS,
        two_hops=True,
        counts_first=True,
        graph=False,
        hook=False,
        arrival="counts are exchanged first; complete when that many records were taken from the ring",
        credit="ring head words",
    ),
    Mode.DIRECT: ModeSpec(
        Family.PREFILL,
        Layout.COMPACT,
        Placement.SLOTS,
        two_hops=False,
        counts_first=False,
        graph=True,
        hook=True,
        arrival="one signal a source, after its records",
        credit="the destination's combine of the same epoch",
    ),
    Mode.LOW_LATENCY: ModeSpec(
        Family.DECODE,
        Layout.MASKED,
        Placement.SLOTS,
        two_hops=False,
        counts_first=False,
        graph=True,
        hook=True,
        arrival="the count sent last is the signal",
        credit="the destination's combine of the same epoch",
    ),
    Mode.HYBRID: ModeSpec(
        Family.DECODE,
        Layout.MASKED,
        Placement.SLOTS,
        two_hops=True,
        counts_first=False,
        graph=True,
        hook=True,
        arrival="tail words on the rail, then one signal a source from its relay",
        credit="the relay's combine of the same epoch, after all its GPUs'",
    ),
}

_BY_NAME: dict[str, Mode] = {mode.value: mode for mode in Mode}  # modes are strings, so that they are found too


def parse_mode(name: str) -> Mode:
    """The mode of that name; ValueError names the choices."""
    try:
        return _BY_NAME[name]
    except (KeyError, TypeError):
        choices = ", ".join(m.value for m in Mode)
        hint = did_you_mean(str(name), [m.value for m in Mode], f"choose one of {choices}")
        raise ValueError(f"mode {name!r} is unknown; {hint}") from None
