"""Which mode serves a batch: a table, and a pure function over it that every rank evaluates alike.

Every input is a value that all ranks agree on, so every rank decides the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from ep_backend.modes import Family, Mode


class Role(str, Enum):
    """What an instance does in its deployment."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


class Forward(str, Enum):
    """The engine's own word for a batch; never guessed from lengths."""

    EXTEND = "extend"
    DECODE = "decode"
    VERIFY = "verify"
    MIXED = "mixed"
    IDLE = "idle"


class Topology(str, Enum):
    ONE_DOMAIN = "one domain"
    SEVERAL_NODES = "several nodes"


Auto = Literal["auto"]
Wish = Mode | Auto
AUTO: Auto = "auto"

# Families to try for a batch, best first. A unified instance generates in prefill modes where it has no decode modes.
FAMILIES: dict[Role, dict[Forward, tuple[Family, ...]]] = {
    Role.PREFILL: dict.fromkeys(Forward, (Family.PREFILL,)),
    Role.DECODE: dict.fromkeys(Forward, (Family.DECODE,)),
    Role.UNIFIED: {
        Forward.EXTEND: (Family.PREFILL,),
        Forward.MIXED: (Family.PREFILL,),
        Forward.DECODE: (Family.DECODE, Family.PREFILL),
        Forward.VERIFY: (Family.DECODE, Family.PREFILL),
        Forward.IDLE: (Family.DECODE, Family.PREFILL),
    },
}


@dataclass(frozen=True, slots=True)
class Row:
    """One rule for the wish "auto". The first that applies, and whose mode can carry the batch, decides.

    A mode can carry a batch of at most its max_tokens a rank, and under graph capture only if it can be captured.
    """

    family: Family
    topology: Topology
    faster: Mode | None  # applies only where this mode is estimated to be the faster one
    mode: Mode
    reason: str


POLICY: tuple[Row, ...] = (
    Row(
        Family.PREFILL,
        Topology.ONE_DOMAIN,
        None,
        Mode.DIRECT,
        "one copy a GPU and no round trip for counts",
    ),
    Row(
        Family.PREFILL,
        Topology.ONE_DOMAIN,
        None,
        Mode.NORMAL,
        "rings hold any batch where direct has no slots for it",
    ),
    Row(
        Family.PREFILL,
        Topology.SEVERAL_NODES,
        None,
        Mode.HYBRID,
        "one copy a node over the rail, counts travel with the data",
    ),
    Row(
        Family.PREFILL,
        Topology.SEVERAL_NODES,
        None,
        Mode.NORMAL,
        "one copy a node; rings hold any batch where hybrid has no slots for it",
    ),
    Row(
        Family.DECODE,
        Topology.ONE_DOMAIN,
        None,
        Mode.LOW_LATENCY,
        "fewest steps: the count is the arrival signal",
    ),
    Row(
        Family.DECODE,
        Topology.ONE_DOMAIN,
        None,
        Mode.HYBRID,
        "low_latency has no slots for the batch",
    ),
    Row(
        Family.DECODE,
        Topology.SEVERAL_NODES,
        Mode.LOW_LATENCY,
        Mode.LOW_LATENCY,
        "hybrid saves too few copies to pay for its second hop",
    ),
    Row(
        Family.DECODE,
        Topology.SEVERAL_NODES,
        None,
        Mode.HYBRID,
        "one copy a node over the rail is faster",
    ),
    Row(
        Family.DECODE,
        Topology.SEVERAL_NODES,
        None,
        Mode.LOW_LATENCY,
        "hybrid has no slots for the batch",
    ),
)


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision depends on, equal on all ranks."""

    role: Role
    forward: Forward
    tokens: int  # most that any rank dispatches
    capacity: Mapping[Mode, int]  # max_tokens by mode; absent: the mode is not there
    top_k: int
    nodes: int = 1
    capture: bool = False
    wish: Wish = AUTO
    estimates: Mapping[Mode, float] = field(default_factory=dict)  # seconds a layer, from a cost model

    @property
    def topology(self) -> Topology:
        return Topology.ONE_DOMAIN if self.nodes == 1 else Topology.SEVERAL_NODES


@dataclass(frozen=True, slots=True)
class Decision:
    mode: Mode
    reason: str
    fallback: str | None = None  # why auto's first choice could not carry the batch: "capture", "capacity" or "absent"


def modes_of(family: Family) -> frozenset[Mode]:
    """Modes that can serve a family. Hybrid serves both: it places rows in either layout."""
    own = {mode for mode in Mode if mode.spec.family is family}
    return frozenset(own | {row.mode for row in POLICY if row.family is family})


def family_of(role: Role, wish: Wish) -> Family:
    """The family of an instance that cannot change its layout; ValueError if the wish is of the other one."""
    check_wish(role, wish)
    if role is Role.UNIFIED and wish != AUTO:
        return Mode(wish).spec.family
    return Family.DECODE if role is Role.DECODE else Family.PREFILL


def check_wish(role: Role, wish: Wish) -> None:
    """ValueError if no batch of that role can ever run in the mode wished for."""
    allowed = _allowed(role)
    if wish != AUTO and wish not in allowed:
        raise ValueError(f"mode {Mode(wish).value} does not serve role {role.value}; use {_names(allowed)} or auto")


def decide(s: Situation) -> Decision:
    """The mode for a batch; ValueError if none, or the one wished for, can carry it."""
    check_wish(s.role, s.wish)
    if s.wish != AUTO:
        wished = Mode(s.wish)
        obstacle = _obstacle(wished, s)
        if obstacle:
            raise ValueError(obstacle)
        return Decision(wished, "the deployment names it")
    faster = _faster(s)
    obstacles, fallback = {}, None
    for family in FAMILIES[s.role][s.forward]:
        for row in POLICY:
            if row.family is not family or row.topology is not s.topology:
                continue
            if row.faster not in (None, faster):
                continue
            obstacle = _obstacle(row.mode, s)
            if obstacle is None:
                return Decision(row.mode, row.reason + _numbers(s), fallback)
            obstacles[row.mode] = obstacle
            fallback = fallback or _kind(row.mode, s)
    raise ValueError(f"no mode can carry a {s.forward.value} batch of role {s.role.value}: " + "; ".join(obstacles.values()))


def _allowed(role: Role) -> set[Mode]:
    return {mode for choice in FAMILIES[role].values() for family in choice for mode in modes_of(family)}


def _faster(s: Situation) -> Mode:
    """Which decode mode crosses nodes faster. Without estimates: hybrid if its copies, one a node, are the fewer."""
    if s.estimates:
        return min(s.estimates, key=lambda mode: (s.estimates[mode], mode.code))
    return Mode.HYBRID if s.top_k > s.nodes else Mode.LOW_LATENCY


def _numbers(s: Situation) -> str:
    times = ", ".join(f"{m.value} {1e6 * t:.0f} us" for m, t in s.estimates.items())
    return f" (estimates: {times})" if times and s.topology is Topology.SEVERAL_NODES else ""


def _obstacle(mode: Mode, s: Situation) -> str | None:
    if s.capture and not mode.spec.graph:
        able = _names(m for m in _allowed(s.role) if m.spec.graph)
        return f"mode {mode.value} cannot be captured in a graph (its host reads the counts); use {able}, or no graphs"
    if mode not in s.capacity:
        return f"mode {mode.value} has no capacity; give it max_tokens"
    if s.tokens > s.capacity[mode]:
        return f"{s.tokens} tokens exceed max_tokens={s.capacity[mode]} of mode {mode.value}; raise it or send smaller batches"
    return None


def _kind(mode: Mode, s: Situation) -> str:
    """Which obstacle it is, in a word."""
    if s.capture and not mode.spec.graph:
        return "capture"
    return "absent" if mode not in s.capacity else "capacity"


def _names(modes: Iterable[Mode]) -> str:
    chosen = set(modes)
    return ", ".join(m.value for m in Mode if m in chosen)
