"""Where everything lies in one rank's symmetric heap: the Python counterpart of kernels/include/ep/layout.h.

Same names, same integers; tests/core/test_layout.py compiles the header and compares. Bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

SCALE_GROUP = 128
MAX_TOP_K = 32
RECORD_ALIGN = 32
REGION_ALIGN = 1024
RAIL_CHANNELS = 4
RING_CHANNELS = 24
CHANNELS = 128
LINE_TOKENS = 512
COUNT_BITS = 24
COUNT_MASK = (1 << COUNT_BITS) - 1
REFUSED = COUNT_MASK  # in an intent word: that rank does not take part in the epoch


def align_up(n: int, a: int) -> int:
    return (n + a - 1) // a * a


def ceil_div(n: int, d: int) -> int:
    return -(-n // d)


def signal_word(epoch: int, count: int) -> int:
    return epoch << COUNT_BITS | count


def signal_epoch(word: int) -> int:
    return word >> COUNT_BITS


def signal_count(word: int) -> int:
    return word & COUNT_MASK


class Payload(IntEnum):
    """What a dispatched row consists of on the wire."""

    BF16 = 0
    FP8 = 1  # e4m3 with one fp32 scale per 128 channels
    FP8_UE8M0 = 2  # e4m3 with power-of-two scales, four exponents packed in an int32
    FP32 = 3


@dataclass(frozen=True, slots=True)
class Record:
    """Field offsets of one dispatched token: payload | scales | ids | weights | rows | source."""

    scales: int
    ids: int
    weights: int
    rows: int
    source: int
    bytes: int


def payload_bytes(p: Payload, hidden: int) -> int:
    return {Payload.FP32: 4, Payload.BF16: 2}.get(p, 1) * hidden


def scale_bytes(p: Payload, hidden: int) -> int:
    if p is Payload.FP8:
        return hidden // SCALE_GROUP * 4
    if p is Payload.FP8_UE8M0:
        return ceil_div(hidden // SCALE_GROUP, 4) * 4
    return 0


def record(p: Payload, hidden: int, top_k: int) -> Record:
    scales = align_up(payload_bytes(p, hidden), 16)
    ids = align_up(scales + scale_bytes(p, hidden), RECORD_ALIGN)
    weights = ids + 4 * top_k
    rows = weights + 4 * top_k
    source = rows + 4 * top_k
    return Record(scales, ids, weights, rows, source, align_up(source + 4, RECORD_ALIGN))


def combine_record_bytes(p: Payload, hidden: int) -> int:
    return align_up((4 if p is Payload.FP32 else 2) * hidden, RECORD_ALIGN)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a buffer is made for; equal on all ranks. Mode fields hold max_tokens a rank, 0 for a mode that is not there."""

    ranks: int
    gpus_per_node: int
    experts: int
    top_k: int
    hidden: int
    normal: int
    direct: int
    low_latency: int
    hybrid: int
    per_expert: int
    staging: int
    ring_slots: int
    record_bytes: int
    combine_bytes: int

    @property
    def nodes(self) -> int:
        return self.ranks // self.gpus_per_node

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def rank_copies(self) -> int:
        return min(self.ranks, self.top_k)

    @property
    def node_copies(self) -> int:
        return min(self.nodes, self.top_k)

    @property
    def gpu_copies(self) -> int:
        return min(self.gpus_per_node, self.top_k)

    @property
    def line_row(self) -> int:
        return 0 if self.low_latency > LINE_TOKENS or self.per_expert else self.combine_bytes

    @property
    def line_bytes(self) -> int:
        return self.low_latency * self.rank_copies * self.line_row

    @property
    def rail_limit(self) -> int:
        return ceil_div(self.hybrid, RAIL_CHANNELS)


@dataclass(frozen=True, slots=True)
class Words:
    """Offsets of one lane's signal words (u64 arrays); see layout.h for their indices, PROTOCOL.md for their meaning."""

    intent: int
    arrival: int
    expert_arrival: int
    returned: int
    stream_count: int
    stream_tail: int
    stream_returned: int
    rail_tail: int
    rail_total: int
    rail_arrived: int
    rail_rows: int
    relay_returned: int
    count: int
    rail_count: int
    ring_tail: int
    ring_head: int
    rail_ring_tail: int
    rail_ring_head: int
    back_tail: int
    back_head: int
    rail_back_tail: int
    rail_back_head: int
    bytes: int


def words(s: Shape) -> Words:
    lengths = {
        "intent": s.ranks,
        "arrival": s.ranks,
        "expert_arrival": s.experts if s.per_expert else 0,
        "returned": s.ranks,
        "stream_count": s.ranks * (CHANNELS + 1),
        "stream_tail": s.ranks * CHANNELS,
        "stream_returned": s.ranks * CHANNELS,
        "rail_tail": s.nodes * CHANNELS,
        "rail_total": s.nodes * (CHANNELS + 1),
        "rail_arrived": s.nodes * CHANNELS if s.staging else 0,
        "rail_rows": s.nodes if s.staging else 0,
        "relay_returned": s.ranks,
        "count": s.ranks,
        "rail_count": s.nodes * RING_CHANNELS,
        "ring_tail": s.ranks * RING_CHANNELS,
        "ring_head": s.ranks * RING_CHANNELS,
        "rail_ring_tail": s.nodes * RING_CHANNELS,
        "rail_ring_head": s.nodes * RING_CHANNELS,
        "back_tail": s.ranks * RING_CHANNELS,
        "back_head": s.ranks * RING_CHANNELS,
        "rail_back_tail": s.nodes * RING_CHANNELS,
        "rail_back_head": s.nodes * RING_CHANNELS,
    }
    offsets: dict[str, int] = {}
    at = 0
    for name, length in lengths.items():
        offsets[name] = at
        at = align_up(at + 8 * length, 128)
    return Words(**offsets, bytes=align_up(at, REGION_ALIGN))


@dataclass(frozen=True, slots=True)
class ModeBytes:
    """Payload bytes one mode needs in a lane."""

    dispatch: int
    combine: int


def slot_mode_bytes(s: Shape, max_tokens: int, per_expert: bool) -> ModeBytes:
    slots = s.experts if per_expert else s.ranks
    copies = s.top_k if per_expert else s.rank_copies
    return ModeBytes(slots * max_tokens * s.record_bytes, copies * max_tokens * s.combine_bytes)


def low_latency_bytes(s: Shape) -> ModeBytes:
    per_rank = slot_mode_bytes(s, s.low_latency, False)
    if not s.per_expert:
        return per_rank
    per_expert = slot_mode_bytes(s, s.low_latency, True)
    return ModeBytes(max(per_rank.dispatch, per_expert.dispatch), max(per_rank.combine, per_expert.combine))


def hybrid_bytes(s: Shape) -> ModeBytes:
    rail = s.nodes * RAIL_CHANNELS * s.rail_limit
    return ModeBytes(
        (rail + s.ranks * s.hybrid) * s.record_bytes,
        (rail * s.gpu_copies + s.node_copies * s.hybrid) * s.combine_bytes,
    )


def normal_bytes(s: Shape) -> ModeBytes:
    if s.normal == 0:
        return ModeBytes(0, 0)
    rings = s.ranks + (s.nodes if s.nodes > 1 else 0)
    return ModeBytes(rings * s.ring_slots * s.record_bytes, rings * s.ring_slots * s.combine_bytes)


def mode_bytes(s: Shape) -> dict[str, ModeBytes]:
    """Payload bytes of each mode the shape has, by mode name."""
    every = {
        "normal": normal_bytes(s),
        "direct": slot_mode_bytes(s, s.direct, False),
        "low_latency": low_latency_bytes(s),
        "hybrid": hybrid_bytes(s),
    }
    return {name: b for name, b in every.items() if getattr(s, name)}


@dataclass(frozen=True, slots=True)
class Lane:
    """Offsets of a lane's regions from the lane's start."""

    words: int
    lines: int
    dispatch: int
    combine: int
    staging: int
    bytes: int


def lane(s: Shape) -> Lane:
    modes = mode_bytes(s).values()
    lines = words(s).bytes
    dispatch = align_up(lines + s.line_bytes, REGION_ALIGN)
    combine = align_up(dispatch + max((b.dispatch for b in modes), default=0), REGION_ALIGN)
    staging = align_up(combine + max((b.combine for b in modes), default=0), REGION_ALIGN)
    staged = s.hybrid * (s.record_bytes + s.nodes * s.combine_bytes) if s.staging else 0
    return Lane(0, lines, dispatch, combine, staging, align_up(staging + staged, REGION_ALIGN))


def abort_bytes(s: Shape) -> int:
    return align_up(8 * s.ranks, REGION_ALIGN)


def lane_offset(s: Shape, lane_idx: int) -> int:
    return abort_bytes(s) + lane_idx * lane(s).bytes


def heap_bytes(s: Shape, lanes: int) -> int:
    return lane_offset(s, lanes)


def source_segment(s: Shape, source: int, max_tokens: int) -> int:
    return source * max_tokens * s.record_bytes


def expert_segment(s: Shape, local_expert: int, source: int, max_tokens: int) -> int:
    return (local_expert * s.ranks + source) * max_tokens * s.record_bytes


def rail_segment(s: Shape, source_node: int, channel: int) -> int:
    slot = s.ranks * s.hybrid + (source_node * RAIL_CHANNELS + channel) * s.rail_limit
    return slot * s.record_bytes


def ring_segment(s: Shape, ring: int) -> int:
    return ring * s.ring_slots * s.record_bytes


def combine_segment(s: Shape, copy: int, max_tokens: int) -> int:
    return copy * max_tokens * s.combine_bytes


def relay_segment(s: Shape, source_node: int, copy: int) -> int:
    rail = RAIL_CHANNELS * s.rail_limit
    row = s.node_copies * s.hybrid + (source_node * s.gpu_copies + copy) * rail
    return row * s.combine_bytes


def back_segment(s: Shape, ring: int) -> int:
    return ring * s.ring_slots * s.combine_bytes
