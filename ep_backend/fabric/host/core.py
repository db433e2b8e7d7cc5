"""What every mode shares: routing, the send core (pack), the place core and the combine core. No memory is shared here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ep_backend import layout
from ep_backend.errors import EpDisagree
from ep_backend.fabric.base import Call, Received
from ep_backend.fabric.host.heap import Bytes
from ep_backend.layout import Payload, Shape
from ep_backend.modes import Layout

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

CPU = torch.device("cpu")
FP8_MAX = 448.0
AMAX_FLOOR = 1e-4  # DeepEP's: keeps the scale of an all-zero group finite

_DTYPES = {
    Payload.BF16: torch.bfloat16,
    Payload.FP8: torch.float8_e4m3fn,
    Payload.FP8_UE8M0: torch.float8_e4m3fn,
    Payload.FP32: torch.float32,
}


def combine_dtype(payload: Payload) -> torch.dtype:
    return torch.float32 if payload is Payload.FP32 else torch.bfloat16


def zeros(rows: int, hidden: int) -> torch.Tensor:
    """Where sums are made: in fp32, whatever torch's default type and device are set to."""
    return torch.zeros(rows, hidden, dtype=torch.float32, device=CPU)


def to_bytes(t: torch.Tensor) -> Bytes:
    """The tensor's bytes, [rows, bytes a row]; shares memory."""
    if t.numel() == 0:
        return np.zeros((t.shape[0], t.shape[1] * t.element_size()), dtype=np.uint8)
    flat: Bytes = t.contiguous().view(torch.uint8).numpy()
    return flat


def from_bytes(rows: Bytes, dtype: torch.dtype, width: int) -> torch.Tensor:
    """[n, width] of that dtype from the first bytes of each row; a copy."""
    result = torch.empty(len(rows), width, dtype=dtype, device=CPU)
    if len(rows):
        result.view(torch.uint8).numpy()[:] = rows[:, : width * dtype.itemsize]
    return result


def hits(ids: Ints, owners: int, experts_each: int) -> Bools:
    """[T, owners]: whether a token has a pick among an owner's experts; owners are ranks or nodes."""
    hit = np.zeros((len(ids), owners), dtype=np.bool_)
    token, k = np.nonzero(ids >= 0)
    hit[token, ids[token, k] // experts_each] = True
    return hit


def copy_index(hit: Bools, owner: int) -> Ints:
    """[T]: which of a token's copies goes to that owner, counting its owners in order."""
    index: Ints = hit[:, :owner].sum(1, dtype=np.int64)
    return index


def first_picks(ids: Ints) -> Bools:
    """[T, K]: valid picks that do not repeat an earlier one of their row."""
    same = ids[:, :, None] == ids[:, None, :]
    earlier = np.tril(np.ones((ids.shape[1], ids.shape[1]), dtype=np.bool_), -1)
    unique: Bools = (ids >= 0) & ~(same & earlier).any(2)
    return unique


def merged_weights(ids: Ints, weights: Floats) -> Floats:
    """[T, K]: for each pick the summed weight of all picks of the same expert in its row."""
    same = (ids[:, :, None] == ids[:, None, :]).astype(np.float32)
    used = np.where(ids >= 0, weights, np.float32(0))  # nobody promises that the others are finite
    total: Floats = np.einsum("tij,tj->ti", same, used)
    return total


def quantize(x: torch.Tensor, payload: Payload) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [T, H], scales) with one scale a group of 128 channels: fp32 [T, H/128], or packed UE8M0 int32 [T, ceil(H/512)].

    scale = max(|x|, 1e-4) / 448; UE8M0 rounds it up to a power of two and keeps exponent + 127 in a byte.
    """
    tokens, hidden = x.shape
    groups = x.float().reshape(tokens, hidden // layout.SCALE_GROUP, layout.SCALE_GROUP)
    scale = groups.abs().amax(2).clamp(min=AMAX_FLOOR) / FP8_MAX
    if payload is Payload.FP8_UE8M0:
        exponent = torch.ceil(torch.log2(scale))
        scale = torch.exp2(exponent)
        packed = torch.zeros(tokens, layout.scale_bytes(payload, hidden), dtype=torch.uint8, device=x.device)
        packed[:, : exponent.shape[1]] = (exponent + 127).to(torch.uint8)
        scales = packed.view(torch.int32)
    else:
        scales = scale
    rows = (groups / scale[:, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return rows.reshape(tokens, hidden), scales


@dataclass(slots=True)
class Outgoing:
    """A call's tokens as records, and where each must go."""

    records: Bytes  # [T, record bytes]
    ids: Ints
    weights: Floats
    ranks: Bools  # [T, R]
    nodes: Bools  # [T, N]


def pack(call: Call, s: Shape, rank: int) -> Outgoing:
    """The send core: every token as one record of the wire."""
    ids: Ints = call.ids.to(torch.int64).numpy()
    weights: Floats = call.weights.numpy()
    x, scales = call.x, call.scales
    if scales is None and call.payload in (Payload.FP8, Payload.FP8_UE8M0):
        x, scales = quantize(x, call.payload)
    f = layout.record(call.payload, s.hidden, s.top_k)
    records = np.zeros((call.tokens, f.bytes), dtype=np.uint8)
    if call.tokens:
        data = to_bytes(x)
        records[:, : data.shape[1]] = data
        if scales is not None:
            data = to_bytes(scales)
            records[:, f.scales : f.scales + data.shape[1]] = data
        fields(records, f.ids, s.top_k, np.int32)[:] = ids
        fields(records, f.weights, s.top_k, np.float32)[:] = weights
        fields(records, f.source, 1, np.int32)[:, 0] = rank * call.max_tokens + np.arange(call.tokens)
    e = s.local_experts
    return Outgoing(records, ids, weights, hits(ids, s.ranks, e), hits(ids, s.nodes, e * s.gpus_per_node))


def fields(records: Bytes, offset: int, count: int, dtype: type) -> npt.NDArray[np.generic]:
    """A field of every record as [n, count]; shares memory where records are contiguous rows."""
    raw = records[:, offset : offset + count * np.dtype(dtype).itemsize]
    return raw.view(dtype)


@dataclass(slots=True)
class Segment:
    """Records of one source rank, in the order they were sent; of one local expert in the per_expert form."""

    source: int
    records: Bytes
    expert: int | None = None


@dataclass(slots=True)
class Arrived:
    """A receiver's own copy of what combine needs, so that the slots are free at once."""

    segments: list[tuple[int, int, int | None]]  # (source, records, expert) in row order
    ids: Ints  # [n, K] global
    token: Ints  # [n] index at the owner
    relay_slot: Ints  # [n] row at the relay (hybrid)
    # masked: one entry a (record, distinct local expert)
    pair_record: Ints
    pair_expert: Ints
    pair_row: Ints
    pair_weight: Floats

    def spans(self) -> list[tuple[int, slice, int | None]]:
        """(source, its records, expert) for each segment."""
        at, result = 0, []
        for source, n, expert in self.segments:
            result.append((source, slice(at, at + n), expert))
            at += n
        return result


def place(call: Call, s: Shape, rank: int, segments: list[Segment]) -> tuple[Received, Arrived]:
    """The place core: records, in order of source and slot, become the rows that the engine reads."""
    for g in segments:
        if len(g.records) > call.most:
            raise EpDisagree(
                f"in dispatch of {call.mode.value}, lane {call.lane}, epoch {call.epoch}, rank {g.source} sends "
                f"{len(g.records)} rows to rank {rank}, whose most_tokens={call.most}; give every rank the most that any sends"
            )
    f = layout.record(call.payload, s.hidden, s.top_k)
    records = np.concatenate([g.records for g in segments]) if segments else np.zeros((0, f.bytes), dtype=np.uint8)
    n, e, first = len(records), s.local_experts, rank * s.local_experts
    ids = fields(records, f.ids, s.top_k, np.int32).astype(np.int64)
    weights = fields(records, f.weights, s.top_k, np.float32).astype(np.float32)
    mine = (ids >= first) & (ids < first + e)
    local: Ints = np.where(mine, ids - first, -1)
    only = np.repeat(
        np.array([-1 if g.expert is None else g.expert for g in segments], dtype=np.int64),
        [len(g.records) for g in segments],
    )
    masked_ids = np.where((only[:, None] < 0) | (local == only[:, None]), local, -1)
    unique = first_picks(masked_ids)
    pair_record, k = np.nonzero(unique)
    pair_expert = local[pair_record, k]
    pair_weight = merged_weights(local, weights)[pair_record, k]
    pair_row, per_expert = _positions(pair_expert, e)

    hidden_dtype, width = _DTYPES[call.payload], layout.scale_bytes(call.payload, s.hidden) // 4
    scale_dtype = torch.float32 if call.payload is Payload.FP8 else torch.int32
    rows = from_bytes(records, hidden_dtype, s.hidden)
    scales = from_bytes(records[:, f.scales :], scale_dtype, width) if width else None
    if call.layout is Layout.COMPACT:
        counts = np.bincount(local[local >= 0], minlength=e)
        received = Received(
            rows,
            scales,
            torch.from_numpy(local.astype(np.int32)),
            torch.from_numpy(np.where(mine, weights, np.float32(0))),
            torch.from_numpy(counts.astype(np.int32)),
            n,
        )
        if not call.host_counts:
            received = _worst_case(received, call.most_rows(s.ranks))
    else:
        capacity = s.ranks * call.max_tokens
        at = torch.from_numpy(pair_expert), torch.from_numpy(pair_row)
        picked = torch.from_numpy(pair_record)
        sorted_rows = torch.empty(e, capacity, s.hidden, dtype=hidden_dtype, device=CPU)
        _bits(sorted_rows)[at] = _bits(rows)[picked]
        sorted_scales = None
        if scales is not None:
            padded = torch.empty(e, width, layout.align_up(capacity, 4), dtype=scale_dtype, device=CPU)
            sorted_scales = padded[:, :, :capacity].transpose(1, 2)
            sorted_scales[at] = scales[picked]
        counts_t = torch.from_numpy(per_expert.astype(np.int32))
        received = Received(sorted_rows, sorted_scales, None, None, counts_t, n)
    source = fields(records, f.source, 1, np.int32)[:, 0].astype(np.int64)
    arrived = Arrived(
        [(g.source, len(g.records), g.expert) for g in segments],
        ids,
        source % call.max_tokens,
        fields(records, f.rows, 1, np.int32)[:, 0].astype(np.int64),
        pair_record,
        pair_expert,
        pair_row,
        pair_weight,
    )
    return received, arrived


def partial_sums(call: Call, a: Arrived, y: torch.Tensor, weighted: bool = True) -> Bytes:
    """The combine core at the expert's rank: one row a record, [n, H bytes] in y's dtype, summed in fp32 and rounded once.

    compact rows are reduced already. ``weighted`` False (per_expert form) returns the record's one expert row as it is.
    """
    n = len(a.token)
    if call.layout is Layout.COMPACT:
        return to_bytes(y[:n])
    rows = y[torch.from_numpy(a.pair_expert), torch.from_numpy(a.pair_row)]
    if not weighted:
        return to_bytes(rows)
    total = zeros(n, y.shape[2])
    total.index_add_(
        0,
        torch.from_numpy(a.pair_record),
        rows.float() * torch.from_numpy(a.pair_weight)[:, None],
    )
    return to_bytes(total.to(y.dtype))


def _positions(owner: Ints, owners: int) -> tuple[Ints, Ints]:
    """Position of each entry among those of the same owner, and the number of entries by owner."""
    count: Ints = np.bincount(owner, minlength=owners).astype(np.int64)
    order = np.argsort(owner, kind="stable")
    start = np.cumsum(count) - count
    position = np.empty(len(owner), dtype=np.int64)
    position[order] = np.arange(len(owner)) - start[owner[order]]
    return position, count


def _worst_case(r: Received, rows: int) -> Received:
    """The same rows in tensors whose size does not depend on the count; ids behind the last row are -1."""

    def grow(t: torch.Tensor, fill: int | None) -> torch.Tensor:
        big = torch.empty(rows, *t.shape[1:], dtype=t.dtype, device=CPU)
        if fill is not None:
            big.fill_(fill)
        _bits(big)[: len(t)] = _bits(t)
        return big

    assert r.topk_ids is not None and r.topk_weights is not None
    return Received(
        grow(r.rows, None),
        grow(r.scales, None) if r.scales is not None else None,
        grow(r.topk_ids, -1),
        grow(r.topk_weights, 0),
        r.counts,
        None,
    )


def _bits(t: torch.Tensor) -> torch.Tensor:
    """FP8 has no indexed store on CPU; its bytes have."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t
