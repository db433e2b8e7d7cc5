"""direct and low_latency: one hop into slots that have one writer a segment.

per_rank form: a token goes once to each rank that owns one of its experts, into segment [source]. per_expert form:
once for each distinct expert, into segment [local expert][source]. The last store of a segment is its word, the count.
The destination's combine of the same epoch says that its slots are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ep_backend import layout
from ep_backend.fabric.base import Call, Received
from ep_backend.fabric.host.core import (
    Arrived,
    Outgoing,
    Segment,
    combine_dtype,
    copy_index,
    first_picks,
    from_bytes,
    hits,
    merged_weights,
    pack,
    partial_sums,
    place,
    zeros,
)
from ep_backend.fabric.host.tasks import Task
from ep_backend.modes import Mode

if TYPE_CHECKING:
    from ep_backend.fabric.host.fabric import HostFabric


@dataclass(slots=True)
class _State:
    sent: Outgoing
    arrived: Arrived | None = None


def _per_expert(f: HostFabric, call: Call) -> bool:
    return call.mode is Mode.LOW_LATENCY and bool(f.shape.per_expert)


def start_dispatch(f: HostFabric, call: Call) -> None:
    s, t = f.shape, call.max_tokens
    op = f.stats.mode(call.mode.value).dispatch
    out = pack(call, s, f.rank)
    call.state = _State(out)
    stride = out.records.shape[1]
    for step in range(s.ranks):
        dst = (f.rank + step) % s.ranks
        if not _per_expert(f, call):
            tokens = np.nonzero(out.ranks[:, dst])[0]
            segment = f.dispatch_rows(dst, call.lane, layout.source_segment(s, f.rank, t), t, stride)
            f.put(op, dst, segment, slice(0, len(tokens)), out.records[tokens])
            f.faults.at("before_count")
            f.signal(dst, call.lane, f.words.arrival, f.rank, call.epoch, len(tokens))
            continue
        for expert in range(s.local_experts):
            tokens = np.nonzero((out.ids == dst * s.local_experts + expert).any(1))[0]
            at = layout.expert_segment(s, expert, f.rank, t)
            segment = f.dispatch_rows(dst, call.lane, at, t, stride)
            f.put(op, dst, segment, slice(0, len(tokens)), out.records[tokens])
            f.faults.at("before_count")
            index = expert * s.ranks + f.rank
            f.signal(dst, call.lane, f.words.expert_arrival, index, call.epoch, len(tokens))


def finish_dispatch(f: HostFabric, call: Call) -> Received:
    s, t = f.shape, call.max_tokens
    stride = layout.record(call.payload, s.hidden, s.top_k).bytes
    got: dict[tuple[int, int | None], Segment] = {}

    def receive(source: int, expert: int | None) -> Task:
        array, index, at = f.words.arrival, source, layout.source_segment(s, source, t)
        if expert is not None:
            array, index = f.words.expert_arrival, expert * s.ranks + source
            at = layout.expert_segment(s, expert, source, t)
        count: list[int] = []
        yield from f.await_word(call, array, index, source, count)
        rows = f.dispatch_rows(f.rank, call.lane, at, count[0], stride)
        got[source, expert] = Segment(source, rows.copy(), expert)

    experts: list[int | None] = list(range(s.local_experts)) if _per_expert(f, call) else [None]
    order = [(source, expert) for expert in experts for source in range(s.ranks)]
    f.run(call, "dispatch", *(receive(*key) for key in order))
    received, call.state.arrived = place(call, s, f.rank, [got[key] for key in order])
    return received


def start_combine(f: HostFabric, call: Call, y: torch.Tensor) -> None:
    s, t = f.shape, call.max_tokens
    op = f.stats.mode(call.mode.value).combine
    a: Arrived = call.state.arrived
    by_expert = _per_expert(f, call)
    rows = partial_sums(call, a, y, weighted=not by_expert)
    stride = layout.combine_record_bytes(call.payload, s.hidden)
    if by_expert:  # to the row of the pick
        expert = f.rank * s.local_experts + a.pair_expert
        copy = np.argmax(a.ids[a.pair_record] == expert[:, None], axis=1)
    else:  # to the row of the copy
        copy = copy_index(hits(a.ids, s.ranks, s.local_experts), f.rank)
    returned = [0] * s.ranks
    for source, span, _ in a.spans():
        for c in np.unique(copy[span]):
            chosen = copy[span] == c
            target = f.combine_rows(source, call.lane, layout.combine_segment(s, int(c), t), t, stride)
            f.put(op, source, target, a.token[span][chosen], rows[span][chosen])
        returned[source] += span.stop - span.start
    for source, n in enumerate(returned):  # every peer, also one that got nothing: its slots here are free
        f.faults.at("before_return")
        f.signal(source, call.lane, f.words.returned, f.rank, call.epoch, n)


def finish_combine(f: HostFabric, call: Call, out: torch.Tensor) -> None:
    s, t = f.shape, call.max_tokens
    sent: Outgoing = call.state.sent
    f.run(
        call,
        "combine",
        *(f.await_word(call, f.words.returned, peer, peer, []) for peer in range(s.ranks)),
    )
    stride = layout.combine_record_bytes(call.payload, s.hidden)
    total = zeros(call.tokens, s.hidden)
    if _per_expert(f, call):
        present = first_picks(sent.ids)
        weight = merged_weights(sent.ids, sent.weights)
    else:
        copies = sent.ranks.sum(1)
        present = np.arange(s.rank_copies) < copies[:, None]
        weight = np.ones_like(present, dtype=np.float32)
    for copy in range(present.shape[1]):
        tokens = np.nonzero(present[:, copy])[0]
        area = f.combine_rows(f.rank, call.lane, layout.combine_segment(s, copy, t), t, stride)
        rows = from_bytes(area[tokens], combine_dtype(call.payload), s.hidden).float()
        total[torch.from_numpy(tokens)] += rows * torch.from_numpy(weight[tokens, copy])[:, None]
    out.copy_(total)
