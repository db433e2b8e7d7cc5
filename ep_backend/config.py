"""What a buffer is made for: compared over all ranks, and the source of its memory layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

from ep_backend import layout
from ep_backend.layout import Payload, Shape
from ep_backend.modes import Mode, parse_mode

RING_SLOTS = (256, 1024)
TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 1e9  # nanoseconds in 64 bits
MAX_COUNT = (1 << 31) - 1  # kernels and engines count in 32 bits
PAYLOADS = {p.name.lower(): p for p in Payload}
FABRICS = ("host", "nvshmem")
FORMS = ("auto", "per_rank", "per_expert")
RAILS = ("auto", "peer", "put")


def default_ring_slots(ranks: int) -> int:
    """Records a ring of normal mode holds. Few ranks need many for what is on its way to one of them: about 4 MB, if a record
    and the credit for it take 10 us (an estimate) at the 390 GB/s of an H200's NVLink (kernels/TUNING.md)."""
    least, most = RING_SLOTS
    return max(least, min(most, 8192 // ranks))


def timeout_seconds(timeout_s: Any) -> float:
    """Checked by itself, for ranks that have yet to tell each other of another wrong argument."""
    _typed(_is(timeout_s, Real), "timeout_s", timeout_s, "a number of seconds, as 60.0")
    _require(
        0 < timeout_s <= MAX_TIMEOUT_S,
        f"timeout_s={timeout_s} must be a positive number of seconds, at most {MAX_TIMEOUT_S:g}; "
        "give the longest that a peer may stall",
    )
    return float(timeout_s)


@dataclass(frozen=True, slots=True)
class BufferConfig:
    """Arguments of an :class:`~ep_backend.buffer.EpBuffer` that every rank must give alike."""

    ranks: int
    hidden: int
    num_experts: int
    top_k: int
    max_tokens: dict[Mode, int]
    lanes: int
    payloads: tuple[Payload, ...]
    gpus_per_node: int
    fabric: str
    timeout_s: float
    low_latency_form: str
    rail: str
    ring_slots: int
    deterministic: bool

    @classmethod
    def make(
        cls,
        ranks: int,
        *,
        hidden: int,
        num_experts: int,
        top_k: int,
        max_tokens: Mapping[str, int],
        lanes: int = 1,
        payloads: tuple[str, ...] = ("bf16", "fp8", "fp8_ue8m0"),
        gpus_per_node: int | None = None,
        fabric: str = "host",
        timeout_s: float = TIMEOUT_S,
        low_latency_form: str = "auto",
        rail: str = "auto",
        ring_slots: int | None = None,
        deterministic: bool = False,
    ) -> BufferConfig:
        """Check every argument; ValueError or TypeError names the value, the rule and the fix."""
        ranks, lanes = whole("ranks", ranks), whole("lanes", lanes)
        hidden, num_experts, top_k = whole("hidden", hidden), whole("num_experts", num_experts), whole("top_k", top_k)
        per_node = ranks if gpus_per_node is None else whole("gpus_per_node", gpus_per_node)
        _require(ranks >= 1, f"group has {ranks} ranks; it must have at least 1")
        _require(
            1 <= per_node <= ranks and ranks % per_node == 0,
            f"gpus_per_node={per_node} does not divide the {ranks} ranks of the group; "
            "give a divisor (ranks of one node are consecutive)",
        )
        _require(
            num_experts > 0 and num_experts % ranks == 0,
            f"num_experts={num_experts} is not a multiple of the {ranks} ranks; "
            "add redundant experts or choose another EP size",
        )
        _require(
            1 <= top_k <= layout.MAX_TOP_K,
            f"top_k={top_k} is outside 1..{layout.MAX_TOP_K}, the picks one warp can hold",
        )
        _require(
            hidden > 0 and hidden % 8 == 0,
            f"hidden={hidden} is not a multiple of 8 (16-byte vectors of bf16); pad the hidden size",
        )
        _typed(isinstance(payloads, tuple | list), "payloads", payloads, "a tuple of names, as ('bf16', 'fp8')")
        kinds = tuple(_payload(name) for name in payloads)
        _require(len(kinds) > 0, "payloads is empty; name at least one of " + ", ".join(PAYLOADS))
        if any(k in (Payload.FP8, Payload.FP8_UE8M0) for k in kinds) and hidden % layout.SCALE_GROUP:
            # The default list also serves models whose hidden size has no FP8 form.
            kinds = tuple(k for k in kinds if k in (Payload.BF16, Payload.FP32))
            _require(
                len(kinds) > 0,
                f"hidden={hidden} is not a multiple of the FP8 scale group {layout.SCALE_GROUP}; use the bf16 payload",
            )
        _require(fabric in FABRICS, f"fabric={fabric!r} is none of {', '.join(FABRICS)}")
        _require(
            fabric == "host" or Payload.FP32 not in kinds,
            "payload fp32 exists on the host fabric only; use bf16 or fp8",
        )
        _typed(isinstance(max_tokens, Mapping), "max_tokens", max_tokens, "tokens a rank by mode, as {'direct': 128}")
        counts = {parse_mode(name): whole(f"max_tokens[{name!r}]", n) for name, n in max_tokens.items()}
        tokens = {mode: n for mode, n in counts.items() if n}
        _require(
            bool(tokens) and all(0 < n < 1 << layout.COUNT_BITS for n in tokens.values()),
            f"max_tokens={dict(max_tokens)} must give at least one mode a capacity in "
            f"1..{(1 << layout.COUNT_BITS) - 1} tokens a rank",
        )
        _require(
            ranks * max(tokens.values(), default=0) < 1 << 31,
            f"{ranks} ranks x max_tokens={max(tokens.values(), default=0)} exceeds 2**31 token indices",
        )
        _require(lanes in (1, 2), f"lanes={lanes}; use 1, or 2 for two micro-batches")
        _require(
            low_latency_form in FORMS,
            f"low_latency_form={low_latency_form!r} is none of {', '.join(FORMS)}",
        )
        _require(rail in RAILS, f"rail={rail!r} is none of {', '.join(RAILS)}")
        slots = default_ring_slots(ranks) if ring_slots is None else whole("ring_slots", ring_slots)
        _require(slots >= 1, f"ring_slots={slots} must be at least 1")
        _typed(isinstance(deterministic, bool), "deterministic", deterministic, "True or False")
        return cls(
            ranks,
            hidden,
            num_experts,
            top_k,
            tokens,
            lanes,
            kinds,
            per_node,
            fabric,
            timeout_seconds(timeout_s),
            low_latency_form,
            rail,
            slots,
            deterministic,
        )

    @property
    def shape(self) -> Shape:
        """The memory layout's view of this configuration."""
        tokens = {m.value: self.max_tokens.get(m, 0) for m in Mode}
        several = self.gpus_per_node < self.ranks
        return Shape(
            ranks=self.ranks,
            gpus_per_node=self.gpus_per_node,
            experts=self.num_experts,
            top_k=self.top_k,
            hidden=self.hidden,
            **tokens,
            per_expert=int(self.low_latency_form == "per_expert" and Mode.LOW_LATENCY in self.max_tokens),
            staging=int(self.rail == "put" and self.fabric == "nvshmem" and Mode.HYBRID in self.max_tokens and several),
            ring_slots=self.ring_slots,
            record_bytes=max(layout.record(p, self.hidden, self.top_k).bytes for p in self.payloads),
            combine_bytes=max(layout.combine_record_bytes(p, self.hidden) for p in self.payloads),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for comparison between ranks and for messages."""
        d = asdict(self)
        d["max_tokens"] = {m.value: n for m, n in sorted(self.max_tokens.items())}
        d["payloads"] = [p.name.lower() for p in self.payloads]
        return d

    def size_hint(self) -> dict[str, Any]:
        """Bytes of one rank's symmetric heap: ``total``, ``control``, and each lane's regions.

        ``modes`` says what each mode needs inside a lane's dispatch and combine regions; modes share them, so a region
        has the size of its widest mode and ``total`` = ``control`` + lanes x the lane's regions, exactly what is allocated.
        """
        s, lane = self.shape, layout.lane(self.shape)
        regions = {
            "words": lane.dispatch,
            "dispatch": lane.combine - lane.dispatch,
            "combine": lane.staging - lane.combine,
            "staging": lane.bytes - lane.staging,
        }
        return {
            "control": layout.abort_bytes(s),
            "lanes": [dict(regions) for _ in range(self.lanes)],
            "modes": {name: {"dispatch": b.dispatch, "combine": b.combine} for name, b in layout.mode_bytes(s).items()},
            "total": layout.heap_bytes(s, self.lanes),
        }

    def region_bytes(self) -> dict[str, int]:
        """Bytes of one rank's heap by region, over all lanes: control, words, dispatch, combine, staging."""
        hint = self.size_hint()
        return {"control": hint["control"], **{name: self.lanes * n for name, n in hint["lanes"][0].items()}}


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _typed(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; give {wanted}")


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)  # which is a number to Python


def whole(name: str, value: Any) -> int:
    """TypeError for what is no whole number, as 2.0 and True."""
    _typed(_is(value, Integral), name, value, "a whole number")
    return int(value)


def _payload(name: str) -> Payload:
    if name not in tuple(PAYLOADS):
        raise ValueError(f"payload {name!r} is unknown; choose from {', '.join(PAYLOADS)}")
    return PAYLOADS[name]
