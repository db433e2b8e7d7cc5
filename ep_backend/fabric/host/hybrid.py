"""hybrid: a token crosses the rail once a node, then goes once to each GPU of that node that owns one of its experts.

Hop 1, source to its relay (the rank of the other node on its rail): channels of slots, a tail word that grows as records
are written and a total. Hop 2, relay to GPUs: direct's segments [source rank], with the relay as the writer. A source is
the relay of its own node. Combine returns the same way: GPUs send partial sums to the relay, which adds them in fp32 and
sends one row a token back over the rail. A relay answers a source only after all GPUs of its node have answered it, so a
returned word frees the slots of that whole node. What a rank does as a relay goes on in any of its waits, so that ranks may
drive their lanes in different orders.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ep_backend import layout
from ep_backend.fabric.base import Call, Received
from ep_backend.fabric.host.core import (
    Arrived,
    Ints,
    Outgoing,
    Segment,
    combine_dtype,
    copy_index,
    fields,
    from_bytes,
    hits,
    pack,
    partial_sums,
    place,
    to_bytes,
    zeros,
)
from ep_backend.fabric.host.heap import Bytes
from ep_backend.fabric.host.tasks import Blocked, Task
from ep_backend.layout import RAIL_CHANNELS

if TYPE_CHECKING:
    from ep_backend.fabric.host.fabric import HostFabric

TAIL_RECORDS = 4  # records a tail update covers: forwarding starts while later ones are still on their way


@dataclass(slots=True)
class _State:
    sent: Outgoing
    relayed: dict[int, tuple[Ints, Ints, Ints]] = field(default_factory=dict)  # by node: ids, token, slot
    arrived: Arrived | None = None
    own: torch.Tensor | None = None  # this node's sums of this rank's tokens, never rounded


def _channel_slots(f: HostFabric, tokens: Ints) -> list[Ints]:
    """Tokens by rail channel."""
    return [tokens[tokens % RAIL_CHANNELS == c] for c in range(RAIL_CHANNELS)]


def start_dispatch(f: HostFabric, call: Call) -> None:
    s = f.shape
    op = f.stats.mode(call.mode.value).dispatch
    out = pack(call, s, f.rank)
    state = call.state = _State(out)
    for step in range(1, s.nodes):
        node = (f.node + step) % s.nodes
        relay = f.relay(node, f.rank)
        for channel, tokens in enumerate(_channel_slots(f, np.nonzero(out.nodes[:, node])[0])):
            index = f.node * RAIL_CHANNELS + channel
            at = layout.rail_segment(s, f.node, channel)
            target = f.dispatch_rows(relay, call.lane, at, s.rail_limit, out.records.shape[1])
            f.faults.at("before_count")
            f.signal(relay, call.lane, f.words.rail_total, index, call.epoch, len(tokens))
            for start in range(0, len(tokens), TAIL_RECORDS):
                part = tokens[start : start + TAIL_RECORDS]
                where = slice(start, start + len(part))
                f.put(op, relay, target, where, out.records[part])
                f.signal(relay, call.lane, f.words.rail_tail, index, call.epoch, where.stop)
    # This node's own records take the same second hop, with this rank as their relay.
    own = np.nonzero(out.nodes[:, f.node])[0]
    slot = own % RAIL_CHANNELS * s.rail_limit + own // RAIL_CHANNELS
    forward = _Forward(f, call, f.rank)
    forward.records(out.records[own], slot)
    forward.finish()
    state.relayed[f.node] = (out.ids[own], own, slot)
    f.beside(call, *(_relay(f, call, node) for node in range(s.nodes) if node != f.node))


class _Forward:
    """Second hop of one source's records: segment [source] at each GPU of this node."""

    def __init__(self, f: HostFabric, call: Call, source: int) -> None:
        self.f, self.call, self.source = f, call, source
        self.sent = [0] * f.shape.gpus_per_node

    def records(self, records: Bytes, slot: Ints) -> None:
        f, s, call = self.f, self.f.shape, self.call
        wire = layout.record(call.payload, s.hidden, s.top_k)
        ids = fields(records, wire.ids, s.top_k, np.int32).astype(np.int64)
        fields(records, wire.rows, 1, np.int32)[:, 0] = slot  # where the partial sum will be added
        hit = hits(ids, s.ranks, s.local_experts)
        for g, dst in enumerate(f.ranks_of(f.node)):
            chosen = records[hit[:, dst]]
            at = layout.source_segment(s, self.source, call.max_tokens)
            target = f.dispatch_rows(dst, call.lane, at, call.max_tokens, wire.bytes)
            where = slice(self.sent[g], self.sent[g] + len(chosen))
            op = f.stats.mode(call.mode.value).dispatch
            f.put(op, dst, target, where, chosen, forwarded=self.source != f.rank)
            self.sent[g] = where.stop

    def finish(self) -> None:
        f, call = self.f, self.call
        for g, dst in enumerate(f.ranks_of(f.node)):
            f.signal(dst, call.lane, f.words.arrival, self.source, call.epoch, self.sent[g])


def _relay(f: HostFabric, call: Call, node: int) -> Task:
    """Forward what arrives over the rail from one node, channel by channel as their tails grow."""
    s, source = f.shape, f.relay(node, f.rank)
    wire = layout.record(call.payload, s.hidden, s.top_k)
    forward = _Forward(f, call, source)
    taken = [0] * RAIL_CHANNELS
    totals: list[int] = []
    for channel in range(RAIL_CHANNELS):
        index = node * RAIL_CHANNELS + channel
        yield from f.await_word(call, f.words.rail_total, index, source, totals)
    kept: list[tuple[Ints, Ints, Ints]] = []
    while taken != totals:
        moved = False
        for channel in range(RAIL_CHANNELS):
            epoch, tail = f.peek(call.lane, f.words.rail_tail, node * RAIL_CHANNELS + channel)
            if epoch != call.epoch or tail == taken[channel]:
                continue
            f.faults.at("after_wait")
            at = layout.rail_segment(s, node, channel)
            rows = f.dispatch_rows(f.rank, call.lane, at, s.rail_limit, wire.bytes)
            records = rows[taken[channel] : tail].copy()
            slot = channel * s.rail_limit + np.arange(taken[channel], tail)
            forward.records(records, slot)
            ids = fields(records, wire.ids, s.top_k, np.int32).astype(np.int64)
            token = fields(records, wire.source, 1, np.int32)[:, 0].astype(np.int64)
            kept.append((ids, token % call.max_tokens, slot))
            taken[channel] = tail
            moved = True
        yield None if moved else Blocked(source, (call.epoch, sum(totals)), (call.epoch, sum(taken)))
    forward.finish()
    empty = np.zeros((0, s.top_k), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    parts = kept or [empty]
    call.state.relayed[node] = (
        np.concatenate([p[0] for p in parts]),
        np.concatenate([p[1] for p in parts]),
        np.concatenate([p[2] for p in parts]),
    )


def finish_dispatch(f: HostFabric, call: Call) -> Received:
    s = f.shape
    wire = layout.record(call.payload, s.hidden, s.top_k)
    got: dict[int, Segment] = {}

    def receive(source: int) -> Task:
        count: list[int] = []
        writer = f.relay(f.node, source)
        yield from f.await_word(call, f.words.arrival, source, writer, count)
        at = layout.source_segment(s, source, call.max_tokens)
        rows = f.dispatch_rows(f.rank, call.lane, at, count[0], wire.bytes)
        # Channels reach the relay in any order; rows are promised in order of the token.
        got[source] = Segment(source, rows[np.argsort(fields(rows, wire.source, 1, np.int32)[:, 0])])

    f.run(call, "dispatch", *f.join(call), *(receive(source) for source in range(s.ranks)))
    segments = [got[source] for source in range(s.ranks)]
    received, call.state.arrived = place(call, s, f.rank, segments)
    return received


def start_combine(f: HostFabric, call: Call, y: torch.Tensor) -> None:
    s = f.shape
    op = f.stats.mode(call.mode.value).combine
    a: Arrived = call.state.arrived
    rows = partial_sums(call, a, y)
    stride = layout.combine_record_bytes(call.payload, s.hidden)
    hit = hits(a.ids, s.ranks, s.local_experts)
    first = f.node * s.gpus_per_node
    copy = copy_index(hit[:, first:], f.gpu)  # among the GPUs of this node
    for source, span, _ in a.spans():
        relay, node = f.relay(f.node, source), source // s.gpus_per_node
        for c in np.unique(copy[span]):
            chosen = copy[span] == c
            at = layout.relay_segment(s, node, int(c))
            target = f.combine_rows(relay, call.lane, at, RAIL_CHANNELS * s.rail_limit, stride)
            f.put(op, relay, target, a.relay_slot[span][chosen], rows[span][chosen])
        f.faults.at("before_return")
        index = node * s.gpus_per_node + f.gpu
        f.signal(relay, call.lane, f.words.relay_returned, index, call.epoch, span.stop - span.start)
    f.beside(call, *(_return(f, call, node) for node in range(s.nodes) if node != f.node))


def _return(f: HostFabric, call: Call, node: int) -> Task:
    """Add the partial sums of one source's tokens and send them home, or keep them if they are this rank's own."""
    s, source = f.shape, f.relay(node, f.rank)
    for g, peer in enumerate(f.ranks_of(f.node)):
        index = node * s.gpus_per_node + g
        yield from f.await_word(call, f.words.relay_returned, index, peer, [])
    ids, token, slot = call.state.relayed[node]
    dtype = combine_dtype(call.payload)
    stride = layout.combine_record_bytes(call.payload, s.hidden)
    hit = hits(ids, s.ranks, s.local_experts)[:, f.ranks_of(f.node)]
    total = zeros(len(ids), s.hidden)
    for copy in range(s.gpu_copies):
        present = np.nonzero(hit.sum(1) > copy)[0]
        at = layout.relay_segment(s, node, copy)
        area = f.combine_rows(f.rank, call.lane, at, RAIL_CHANNELS * s.rail_limit, stride)
        total[torch.from_numpy(present)] += from_bytes(area[slot[present]], dtype, s.hidden).float()
    if node == f.node:
        call.state.own = total
        return
    copy_of = copy_index(hits(ids, s.nodes, s.local_experts * s.gpus_per_node), f.node)
    rows = to_bytes(total.to(dtype))
    op = f.stats.mode(call.mode.value).combine
    for c in np.unique(copy_of):
        chosen = copy_of == c
        at = layout.combine_segment(s, int(c), call.max_tokens)
        target = f.combine_rows(source, call.lane, at, call.max_tokens, stride)
        f.put(op, source, target, token[chosen], rows[chosen], forwarded=True)
    f.faults.at("before_return")
    f.signal(source, call.lane, f.words.returned, f.rank, call.epoch, len(ids))


def finish_combine(f: HostFabric, call: Call, out: torch.Tensor) -> None:
    s = f.shape
    others = [f.relay(node, f.rank) for node in range(s.nodes) if node != f.node]
    f.run(
        call,
        "combine",
        *f.join(call),
        _return(f, call, f.node),
        *(f.await_word(call, f.words.returned, relay, relay, []) for relay in others),
    )
    stride = layout.combine_record_bytes(call.payload, s.hidden)
    dtype = combine_dtype(call.payload)
    nodes = call.state.sent.nodes
    total = zeros(call.tokens, s.hidden)
    for node in range(s.nodes):
        tokens = np.nonzero(nodes[:, node])[0]
        if node == f.node:
            rows = call.state.own
        else:
            rows = zeros(len(tokens), s.hidden)
            copy = copy_index(nodes, node)[tokens]
            for c in np.unique(copy):
                chosen = np.nonzero(copy == c)[0]
                at = layout.combine_segment(s, int(c), call.max_tokens)
                area = f.combine_rows(f.rank, call.lane, at, call.max_tokens, stride)
                home = from_bytes(area[tokens[chosen]], dtype, s.hidden).float()
                rows[torch.from_numpy(chosen)] = home
        total[torch.from_numpy(tokens)] += rows
    out.copy_(total)
