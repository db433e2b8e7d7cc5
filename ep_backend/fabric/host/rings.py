"""normal: counts first, then records through bounded rings, over a relay between nodes.

Every source has one stream to each GPU: over the rail to its relay's ring [source node], from there into ring [source
rank] of the GPUs of that node (a source is the relay of its own node). A ring has a tail word at its reader and a head
word, the credit, at its writer; its size does not depend on the tokens. Partial sums come back the same way in the same
order, so neither side needs an index: a relay takes each record's partial sums from the rings of the GPUs it went to,
adds them in fp32 and sends one row home. Streams of different sources share nothing, so no source can block another.
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
    Bools,
    Outgoing,
    Segment,
    combine_dtype,
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
from ep_backend.stats import OpStats

if TYPE_CHECKING:
    from ep_backend.fabric.host.fabric import HostFabric


@dataclass(slots=True)
class _Ring:
    """One end of a ring; ``done`` is what this end has written or read in this epoch."""

    peer: int
    rows: Bytes
    tail: tuple[int, int]  # word array and ring, at the reader
    head: tuple[int, int]  # at the writer
    done: int = 0

    def __post_init__(self) -> None:
        self.tail, self.head = (
            (array, layout.RING_CHANNELS * ring) for array, ring in (self.tail, self.head)
        )  # all in channel 0


@dataclass(slots=True)
class _State:
    sent: Outgoing
    counts: list[int]  # by source rank: records for this rank
    rail_counts: list[int]  # by source node: records to relay
    relayed: dict[int, Bools] = field(default_factory=dict)  # by source node: [n, G] which GPUs got it
    arrived: Arrived | None = None
    received: Received | None = None
    home: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by node: sums of this rank's tokens


def _push(f: HostFabric, call: Call, op: OpStats, ring: _Ring, rows: Bytes, forwarded: bool = False) -> Task:
    """Write all rows, as the reader gives credit."""
    slots = len(ring.rows)
    sent = 0
    while sent < len(rows):
        epoch, consumed = f.peek(call.lane, *ring.head)
        if epoch != call.epoch:
            consumed = 0
        n = min(slots - (ring.done - consumed), len(rows) - sent)
        if n == 0:
            yield Blocked(ring.peer, (call.epoch, ring.done - slots + 1), (epoch, consumed))
            continue
        at = (ring.done + np.arange(n)) % slots
        f.put(op, ring.peer, ring.rows, at, rows[sent : sent + n], forwarded)
        ring.done += n
        sent += n
        f.signal(ring.peer, call.lane, *ring.tail, call.epoch, ring.done)
        yield None


def _pop(f: HostFabric, call: Call, ring: _Ring, most: int, out: list[Bytes]) -> Task:
    """Take one to ``most`` rows and give their slots back."""
    while True:
        epoch, tail = f.peek(call.lane, *ring.tail)
        n = min(tail - ring.done, most) if epoch == call.epoch else 0
        if n:
            break
        yield Blocked(ring.peer, (call.epoch, ring.done + 1), (epoch, tail))
    f.faults.at("after_wait")
    out.append(ring.rows[(ring.done + np.arange(n)) % len(ring.rows)].copy())
    ring.done += n
    f.faults.at("before_credit")
    f.signal(ring.peer, call.lane, *ring.head, call.epoch, ring.done)
    yield None


def _pop_exactly(f: HostFabric, call: Call, ring: _Ring, n: int, out: list[Bytes]) -> Task:
    taken = 0
    while taken < n:
        yield from _pop(f, call, ring, n - taken, out)
        taken += len(out[-1])


def start_dispatch(f: HostFabric, call: Call) -> None:
    """The whole dispatch: rings need their writer and their reader at work at once."""
    s, w = f.shape, f.words
    op = f.stats.mode(call.mode.value).dispatch
    out = pack(call, s, f.rank)
    wire = layout.record(call.payload, s.hidden, s.top_k)
    per_node = s.gpus_per_node
    state = call.state = _State(out, [], [])
    if call.repeats:
        state.counts, state.rail_counts = call.routing.counted
        # Counts would have told that every rank is in this epoch, also those that send nothing.
        f.run(call, "dispatch", *f.await_intents(call))
    else:
        _exchange_counts(f, call, state)

    def ring(reader: int, index: int) -> Bytes:
        return f.dispatch_rows(reader, call.lane, layout.ring_segment(s, index), s.ring_slots, wire.bytes)

    def send_rail(node: int) -> Task:
        relay = f.relay(node, f.rank)
        tail, head = (w.rail_ring_tail, f.node), (w.rail_ring_head, node)
        rail = _Ring(relay, ring(relay, s.ranks + f.node), tail, head)
        yield from _push(f, call, op, rail, out.records[out.nodes[:, node]])

    def forward(node: int) -> Task:
        source = f.relay(node, f.rank)
        streams = [
            _Ring(dst, ring(dst, source), (w.ring_tail, source), (w.ring_head, node * per_node + g))
            for g, dst in enumerate(f.ranks_of(f.node))
        ]
        tail, head = (w.rail_ring_tail, node), (w.rail_ring_head, f.node)
        rail = _Ring(source, ring(f.rank, s.ranks + node), tail, head) if node != f.node else None
        own = out.records[out.nodes[:, f.node]]
        total = len(own) if rail is None else state.rail_counts[node]
        went: list[Bools] = [np.zeros((0, per_node), dtype=np.bool_)]
        block: list[Bytes] = []
        done = 0
        while done < total:
            most = min(s.ring_slots, total - done)
            if rail is None:
                block.append(own[done : done + most])
            else:
                yield from _pop(f, call, rail, most, block)
            records = block.pop()
            done += len(records)
            ids = fields(records, wire.ids, s.top_k, np.int32).astype(np.int64)
            hit = hits(ids, s.ranks, s.local_experts)[:, f.ranks_of(f.node)]
            went.append(hit)
            for g, stream in enumerate(streams):
                yield from _push(f, call, op, stream, records[hit[:, g]], rail is not None)
        state.relayed[node] = np.concatenate(went)

    got: dict[int, list[Bytes]] = {source: [] for source in range(s.ranks)}

    def receive(source: int) -> Task:
        node, writer = source // per_node, f.relay(f.node, source)
        tail, head = (w.ring_tail, source), (w.ring_head, node * per_node + f.gpu)
        mine = _Ring(writer, ring(f.rank, source), tail, head)
        yield from _pop_exactly(f, call, mine, state.counts[source], got[source])

    f.run(
        call,
        "dispatch",
        *(send_rail(node) for node in range(s.nodes) if node != f.node),
        *(forward(node) for node in range(s.nodes)),
        *(receive(source) for source in range(s.ranks)),
    )
    none = np.zeros((0, wire.bytes), dtype=np.uint8)
    segments = [Segment(source, np.concatenate([none, *rows])) for source, rows in got.items()]
    state.received, state.arrived = place(call, s, f.rank, segments)


def _exchange_counts(f: HostFabric, call: Call, state: _State) -> None:
    s, w, out = f.shape, f.words, state.sent
    f.faults.at("before_count")
    for dst in range(s.ranks):
        f.signal(dst, call.lane, w.count, f.rank, call.epoch, int(out.ranks[:, dst].sum()))
    for node in range(s.nodes):
        n = int(out.nodes[:, node].sum())
        f.signal(f.relay(node, f.rank), call.lane, w.rail_count, f.node * layout.RING_CHANNELS, call.epoch, n)
    counts: list[list[int]] = [[] for _ in range(s.ranks)]
    rails: list[list[int]] = [[] for _ in range(s.nodes)]
    f.run(
        call,
        "dispatch",
        *(f.await_word(call, w.count, r, r, counts[r]) for r in range(s.ranks)),
        *(f.await_word(call, w.rail_count, n * layout.RING_CHANNELS, f.relay(n, f.rank), rails[n]) for n in range(s.nodes)),
    )
    state.counts = [c[0] for c in counts]
    state.rail_counts = [c[0] for c in rails]
    call.routing.counted = state.counts, state.rail_counts


def finish_dispatch(f: HostFabric, call: Call) -> Received:
    received: Received = call.state.received
    return received


def start_combine(f: HostFabric, call: Call, y: torch.Tensor) -> None:
    """The whole combine but the last sum."""
    s, w = f.shape, f.words
    op = f.stats.mode(call.mode.value).combine
    state: _State = call.state
    arrived = state.arrived
    assert arrived is not None
    partials = partial_sums(call, arrived, y)
    dtype, per_node = combine_dtype(call.payload), s.gpus_per_node
    stride = layout.combine_record_bytes(call.payload, s.hidden)

    def ring(reader: int, index: int) -> Bytes:
        return f.combine_rows(reader, call.lane, layout.back_segment(s, index), s.ring_slots, stride)

    def send_back(source: int, rows: Bytes) -> Task:
        relay = f.relay(f.node, source)
        index = source // per_node * per_node + f.gpu
        back = _Ring(relay, ring(relay, index), (w.back_tail, index), (w.back_head, source))
        yield from _push(f, call, op, back, rows)

    home: dict[int, list[torch.Tensor]] = {n: [zeros(0, s.hidden)] for n in range(s.nodes)}

    def merge(node: int) -> Task:
        """Add the partial sums of one source's records, a block at a time."""
        source, went = f.relay(node, f.rank), state.relayed[node]
        streams = []
        for g, peer in enumerate(f.ranks_of(f.node)):
            index = node * per_node + g
            streams.append(_Ring(peer, ring(f.rank, index), (w.back_tail, index), (w.back_head, source)))
        tail, head = (w.rail_back_tail, f.node), (w.rail_back_head, node)
        rail = _Ring(source, ring(source, s.ranks + f.node), tail, head) if node != f.node else None
        for start in range(0, len(went), s.ring_slots):
            block = went[start : start + s.ring_slots]
            total = zeros(len(block), s.hidden)
            for g, stream in enumerate(streams):
                records = np.nonzero(block[:, g])[0]
                rows: list[Bytes] = []
                yield from _pop_exactly(f, call, stream, len(records), rows)
                if rows:
                    part = from_bytes(np.concatenate(rows), dtype, s.hidden).float()
                    total[torch.from_numpy(records)] += part
            if rail is None:
                home[node].append(total)
            else:
                yield from _push(f, call, op, rail, to_bytes(total.to(dtype)), forwarded=True)

    def receive(node: int) -> Task:
        relay = f.relay(node, f.rank)
        tail, head = (w.rail_back_tail, node), (w.rail_back_head, f.node)
        rail = _Ring(relay, ring(f.rank, s.ranks + node), tail, head)
        rows: list[Bytes] = []
        yield from _pop_exactly(f, call, rail, int(state.sent.nodes[:, node].sum()), rows)
        home[node] += [from_bytes(part, dtype, s.hidden).float() for part in rows]

    others = [node for node in range(s.nodes) if node != f.node]
    f.run(
        call,
        "combine",
        *(send_back(source, partials[span]) for source, span, _ in arrived.spans()),
        *(merge(node) for node in range(s.nodes)),
        *(receive(node) for node in others),
    )
    for peer in range(s.ranks):  # nothing of this epoch is left here to be read
        f.faults.at("before_return")
        f.signal(peer, call.lane, w.returned, f.rank, call.epoch, len(partials))
    state.home = home


def finish_combine(f: HostFabric, call: Call, out: torch.Tensor) -> None:
    s, state = f.shape, call.state
    f.run(
        call,
        "combine",
        *(f.await_word(call, f.words.returned, peer, peer, []) for peer in range(s.ranks)),
    )
    total = zeros(call.tokens, s.hidden)
    for node, parts in state.home.items():
        total[torch.from_numpy(np.nonzero(state.sent.nodes[:, node])[0])] += torch.cat(parts)
    out.copy_(total)
