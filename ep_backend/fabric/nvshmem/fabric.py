"""One rank's end of a buffer on a GPU: kernels that store to mapped peers."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ep_backend import layout
from ep_backend.config import BufferConfig
from ep_backend.errors import EpDisagree, EpError, EpFailed, EpTimeout, WaitRecord
from ep_backend.fabric.base import Call, Received
from ep_backend.fabric.meeting import Meeting
from ep_backend.fabric.nvshmem import launch, rings
from ep_backend.fabric.nvshmem.device import Gpu
from ep_backend.fabric.nvshmem.launch import STAGE_BYTES, Args, casts
from ep_backend.fabric.nvshmem.launches import Launches
from ep_backend.layout import Payload
from ep_backend.modes import Layout, Mode
from ep_backend.stats import BufferStats

log = logging.getLogger(__name__)

OPS = ("dispatch", "combine")
TIMEOUT, DISAGREE, ABORT, BAD_ID = 1, 2, 3, 4  # Fault of args.h
REPEATS = 1 << 5  # kRepeats
_DTYPES = {Payload.BF16: torch.bfloat16, Payload.FP8: torch.float8_e4m3fn, Payload.FP8_UE8M0: torch.float8_e4m3fn}


class DeviceStats(BufferStats):
    """Counters that live in device memory until somebody asks."""

    def __init__(self, fabric: NvshmemFabric) -> None:
        super().__init__()
        self._fabric = fabric

    def as_dict(self) -> dict[str, Any]:
        self._fabric.read_stats(self)
        return super().as_dict()


@dataclass(slots=True)
class _Counted:
    """What is known before a dispatch of normal moves data; rows are None where the host does not ask."""

    plan: torch.Tensor
    counts: torch.Tensor
    rows: int | None


@dataclass(slots=True)
class _State:
    """A call's launches: outputs, and what combine must know of every received record."""

    args: Args
    received: Received
    dispatch: tuple[int, ...]  # values of launch.CALL before the launch's own
    keep: tuple[torch.Tensor | None, ...]
    counted: _Counted | None
    y: torch.Tensor | None = None


class NvshmemFabric:
    """Kernels run on the current stream; every phase is one launch, and both phases of an operation are one if nothing
    comes between them."""

    def __init__(self, config: BufferConfig, meeting: Meeting) -> None:
        self._supported(config)
        s = config.shape
        self._gpu = gpu = Gpu()
        self.device = gpu.device
        self.config, self.shape, self.rank = config, s, meeting.rank
        self.allocated_bytes = layout.heap_bytes(s, config.lanes)
        self.stats: BufferStats = DeviceStats(self)
        self._meeting = meeting
        gpu.finish()
        gpu.join(self.allocated_bytes, meeting)
        self._kernels = gpu.kernels(rail_put=bool(s.staging))
        # Host memory that kernels write: 16 words of error report, then agreed, and received rows by lane.
        self._host = gpu.mapped(20)
        self._seen = self._host.numpy()
        counters = 4 * (4 * s.ranks + 8) + s.ranks + s.local_experts
        self._counters = torch.zeros(counters, dtype=torch.int64, device=self.device)
        self._control = torch.zeros(4, dtype=torch.int64, device=self.device)
        self._lanes = torch.tensor([[1, 0, 0]] * config.lanes, dtype=torch.int64, device=self.device)
        self._puts = torch.zeros((config.lanes, s.nodes * (layout.CHANNELS + 1)), dtype=torch.int64, device=self.device)
        self._reason: str | None = None
        self._proposal = 0
        self._sides = [gpu.side() for _ in range(config.lanes)]
        self._own = [gpu.side() for _ in range(config.lanes)]
        self._launches = Launches(s, config.lanes, gpu.multiprocessors, config.deterministic)
        control = max(layout.lane_offset(s, i) + layout.lane(s).dispatch for i in range(config.lanes))
        # Only hybrid by puts stores to no rank of another node.
        far = bool(s.staging) and set(config.max_tokens) == {Mode.HYBRID}
        near = [r for r in range(s.ranks) if not far or r // s.gpus_per_node == self.rank // s.gpus_per_node]
        self._heap = gpu.heap(self.allocated_bytes, control, meeting, near)
        self._args = {
            key: self._lane_args(*key)
            for key in itertools.product(range(config.lanes), config.max_tokens, Layout, config.payloads, (False, True))
        }

    def _supported(self, config: BufferConfig) -> None:
        if config.ranks > launch.MAX_RANKS:
            raise ValueError(f"{config.ranks} ranks; the peer kernels serve up to {launch.MAX_RANKS} of one NVLink domain")
        widest = max(config.shape.record_bytes, config.shape.combine_bytes)
        rows = 3 if Mode.NORMAL in config.max_tokens else 2  # a sender's, a relay's and a receiver's
        if widest * rows > STAGE_BYTES:
            raise ValueError(f"hidden={config.hidden}: {rows} rows must fit {STAGE_BYTES} bytes of shared memory")

    def _lane_args(self, lane: int, mode: Mode, form: Layout, payload: Payload, repeats: bool) -> Args:
        s, host, in_rings = self.shape, self._host.data_ptr(), mode is Mode.NORMAL
        words, regions, at = layout.words(s), layout.lane(s), layout.lane_offset(s, lane)
        tokens = self.config.max_tokens[mode]
        return Args(
            self._heap.peers,
            rank=self.rank,
            ranks=s.ranks,
            local_experts=s.local_experts,
            top_k=s.top_k,
            hidden=s.hidden,
            control=self._control.data_ptr(),
            report=host,
            stats=self._counters.data_ptr(),
            timeout_ns=int(self.config.timeout_s * 1e9),
            lane=lane,
            mode=mode.code,
            max_tokens=tokens,
            state=self._lanes.data_ptr() + 24 * lane,
            intent=at + words.intent,
            stream_count=at + words.stream_count,
            stream_tail=at + words.stream_tail,
            stream_returned=at + words.stream_returned,
            expert_arrival=at + words.expert_arrival,
            returned=at + words.returned,
            rail_tail=at + words.rail_tail,
            rail_total=at + words.rail_total,
            relay_returned=at + words.relay_returned,
            rail_arrived=at + words.rail_arrived,
            rail_rows=at + words.rail_rows,
            staging=at + regions.staging,
            staged_rows=at + regions.staging + s.hybrid * s.record_bytes,
            puts=self._puts.data_ptr() + 8 * lane * self._puts.shape[1],
            slots=at + regions.dispatch,
            slot_segment=layout.ring_segment(s, 1) if in_rings else layout.source_segment(s, 1, tokens),
            lines=at + regions.lines,
            line_row=s.line_row,
            area=at + regions.combine,
            area_segment=layout.back_segment(s, 1) if in_rings else layout.combine_segment(s, 1, tokens),
            gpus=s.gpus_per_node,
            rail_slots=at + regions.dispatch + layout.rail_segment(s, 0, 0),
            rail_segment=layout.rail_segment(s, 1, 0) - layout.rail_segment(s, 0, 0),
            relay_area=at + regions.combine + layout.relay_segment(s, 0, 0),
            relay_segment=layout.relay_segment(s, 0, 1) - layout.relay_segment(s, 0, 0),
            relay_node=layout.relay_segment(s, 1, 0) - layout.relay_segment(s, 0, 0),
            rail_count=at + words.rail_count,
            ring_tail=at + words.ring_tail,
            ring_head=at + words.ring_head,
            rail_ring_tail=at + words.rail_ring_tail,
            rail_ring_head=at + words.rail_ring_head,
            back_tail=at + words.back_tail,
            back_head=at + words.back_head,
            rail_back_tail=at + words.rail_back_tail,
            rail_back_head=at + words.rail_back_head,
            ring_share=min(s.ring_slots // rings.channels(s), rings.MOST_SHARE),
            payload=payload,
            signature=REPEATS * repeats | mode.code << 3 | list(Layout).index(form) << 2 | payload,
            agreed=host + 8 * 16,
        )

    # The four phases of a call.

    def start_dispatch(self, call: Call) -> None:
        self._raise_failure()
        counted = self._count(call) if call.mode is Mode.NORMAL else None
        call.state = state = self._prepare(call, counted)
        self._launch("dispatch", call, state.args, state.dispatch, send=True, receive=not call.split)

    def finish_dispatch(self, call: Call) -> Received:
        state: _State = call.state
        if call.split:
            self._launch("dispatch", call, state.args, state.dispatch, send=False, receive=True)
        if call.layout is Layout.COMPACT and call.host_counts and state.received.num_rows is None:
            state.received = _cut(state.received, self._await_rows(call))
        return state.received

    def start_combine(self, call: Call, y: torch.Tensor) -> None:
        self._raise_failure()
        state: _State = call.state
        if call.aside:
            self.uses(*state.keep, state.received.counts, state.counted.plan if state.counted else None)
        state.y = y
        if call.split:
            self._launch("combine", call, state.args, self._answer(call, y, None), send=True, receive=False)

    def finish_combine(self, call: Call, out: torch.Tensor) -> None:
        state: _State = call.state
        assert state.y is not None
        answer = self._answer(call, state.y, out)
        self._launch("combine", call, state.args, answer, send=not call.split, receive=True)
        state.y = None

    @contextmanager
    def aside(self, lane: int) -> Iterator[None]:
        own = self._own[lane]
        own.fork()
        with own.current():
            yield

    def uses(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                self._gpu.uses(tensor)

    def _count(self, call: Call) -> _Counted:
        """normal's exchange of counts, so that its compact outputs have their exact size; waits for all ranks to call."""
        s, earlier = self.shape, call.repeats.state if call.repeats is not None and rings.repeats(call) else None
        plan_words = s.ranks * (layout.CHANNELS + 2) + s.nodes * layout.RING_CHANNELS
        plan = self._empty((plan_words,), torch.int32) if earlier is None else earlier.counted.plan
        if call.aside:
            self.uses(plan)
        counts = self._empty((s.local_experts,), torch.int32)
        exact = call.layout is Layout.COMPACT and call.host_counts
        rows = earlier.received.num_rows if exact and earlier is not None else None
        waits = exact and rows is None
        values = self._values(call, (None, None, None, None, counts), 0, waits, (plan.data_ptr(), 0, 0, 0, 0, 0), 0)
        self._launch("count", call, self._args_of(call), values, send=True, receive=True)
        return _Counted(plan, counts, self._await_rows(call) if waits else rows)

    def _prepare(self, call: Call, counted: _Counted | None) -> _State:
        s = self.shape
        capacity, masked = s.ranks * call.max_tokens, call.layout is Layout.MASKED
        if counted is not None and counted.rows is not None:
            capacity = counted.rows
        words = layout.scale_bytes(call.payload, s.hidden) // 4
        scale_dtype = torch.float32 if call.payload is Payload.FP8 else torch.int32
        ids = weights = scales = None
        stride = 0
        if masked:
            rows = self._empty((s.local_experts, capacity, s.hidden), _DTYPES[call.payload])
            if words:
                stride = layout.align_up(capacity, 4)
                columns = self._empty((s.local_experts, words, stride), scale_dtype)
                scales = columns[:, :, :capacity].transpose(1, 2)
        else:
            rows = self._empty((capacity, s.hidden), _DTYPES[call.payload])
            scales = self._empty((capacity, words), scale_dtype) if words else None
            ids = self._empty((capacity, s.top_k), torch.int32)
            weights = self._empty((capacity, s.top_k), torch.float32)
        counts = self._empty((s.local_experts,), torch.int32) if counted is None else counted.counts
        # plan | target | position | pick_weight | relay, 32 bits each
        plan_words = s.ranks * (layout.CHANNELS + 2) if counted is None else 0
        relayed = {Mode.HYBRID: 3, Mode.NORMAL: 1}.get(call.mode, 0) * s.nodes * call.max_tokens if s.nodes > 1 else 0
        if self._launches.per_expert(call):
            sizes = (plan_words + s.local_experts * (s.ranks + 1), s.local_experts * capacity, 0, 0)
        else:
            sizes = (plan_words, capacity, capacity * s.top_k if masked else 0, relayed)
        records = self._empty((sizes[0] + sizes[1] + 2 * sizes[2] + sizes[3],), torch.int32)
        target = records.data_ptr() + 4 * sizes[0]
        position = target + 4 * sizes[1]
        weight, relay = position + 4 * sizes[2], position + 8 * sizes[2]
        plan = records.data_ptr() if counted is None else counted.plan.data_ptr()
        waits = call.host_counts and not masked and counted is None
        kept = None
        if counted is not None and self._launches.ordered(call):
            kept = self._empty((capacity, layout.record(call.payload, s.hidden, s.top_k).bytes), torch.uint8)
        scratch = (plan, target, position, weight, relay, _address(kept))
        values = self._values(call, (rows, scales, ids, weights, counts), stride, waits, scratch, capacity)
        received = Received(rows, scales, ids, weights, counts, counted.rows if counted is not None else None)
        return _State(self._args_of(call), received, values, (records, rows, kept), counted)

    def _values(
        self,
        call: Call,
        outputs: tuple[torch.Tensor | None, ...],
        stride: int,
        waits: bool,
        scratch: tuple[int, ...],
        capacity: int,
    ) -> tuple[int, ...]:
        """Those of launch.CALL before the launch's own. ``waits``: the host for the number of rows."""
        masked, host_rows = call.layout is Layout.MASKED, 17 + call.lane
        if waits:
            self._seen[host_rows] = 0
        channels = self._launches.channels(call)
        rows, scales, ids, weights, counts = map(_address, outputs)
        return (
            *(
                int(masked),
                int(casts(call)),
                int(call.ids.dtype == torch.int64),
                int(self._launches.ordered(call)),
                call.tokens,
            ),
            *(call.x.data_ptr(), _address(call.scales), call.ids.data_ptr(), call.weights.data_ptr()),
            *(rows, scales, ids, weights, counts, stride),
            *(int(not masked and not call.host_counts), self._host.data_ptr() + 8 * host_rows if waits else 0),
            *(*scratch, capacity, channels, layout.ceil_div(call.tokens, channels)),
            *(0, 0, 0),
        )

    def _args_of(self, call: Call) -> Args:
        return self._args[call.lane, call.mode, call.layout, call.payload, rings.repeats(call)]

    def _answer(self, call: Call, y: torch.Tensor, out: torch.Tensor | None) -> tuple[int, ...]:
        state: _State = call.state
        # Between the phases of a split call the caller may use y's memory for something else.
        stays = call.layout is Layout.COMPACT and not call.split
        return (*state.dispatch[:-3], int(stays), y.data_ptr(), _address(out))

    def _launch(self, op: str, call: Call, args: Args, values: tuple[int, ...], *, send: bool, receive: bool) -> None:
        stream, side = self._gpu.stream(), self._sides[call.lane]
        for one in self._launches.of(op, call, send=send, receive=receive):
            args.pack(values, one)
            if one.forks:
                side.fork()
            if one.joins:
                side.join()
            self._kernels[one.kernel].launch(one, args, side.stream if one.side else stream)
            if one.closes:
                side.join()

    def _await_rows(self, call: Call) -> int:
        deadline = time.monotonic() + self.config.timeout_s + 5.0
        at = 17 + call.lane
        while not self._seen[at]:
            self._raise_failure()
            if time.monotonic() > deadline:
                raise EpError(f"rank {self.rank}: the dispatch kernel did not run in {self.config.timeout_s + 5:g} s")
        return int(self._seen[at]) - 1

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    # Agreement, failure and the end.

    @property
    def proposal(self) -> int:
        return self._proposal

    @proposal.setter
    def proposal(self, token: int) -> None:
        self._proposal = token
        self._control[:1].fill_(token)

    @property
    def agreed(self) -> int:
        if not self.proposal:  # nor can all ranks carry one
            return 0
        self._gpu.finish_stream()
        return int(self._seen[16])

    def refuse(self, lane: int, epoch: int, reason: str) -> None:
        """Peers are not told: kernels number rounds on the device, so a corrected call takes the same epoch."""
        log.warning("rank %d refused a dispatch in lane %d: %s", self.rank, lane, reason)

    def capturing(self) -> bool:
        return self._gpu.capturing()

    def executed(self) -> tuple[Mode | None, int]:
        _, _, mode, epoch = self._control.tolist()
        return (list(Mode)[mode - 1] if mode else None), epoch

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason
        for peer in self._heap.peers if self._heap.base else ():
            if peer:  # a rank that only puts reach runs into its timeout
                self._gpu.set_word(peer + 8 * self.rank)

    def failure(self) -> str | None:
        if self._reason is None and self._seen[0]:
            self._reason = str(self._error())
        return self._reason

    def _raise_failure(self) -> None:
        if self._seen[0]:
            raise self._error()

    def _error(self) -> EpError:
        kind, op, mode, lane, epoch, peer, expected, seen = (int(v) for v in self._seen[:8])
        where = f"{OPS[op]} of {list(Mode)[mode].value}, lane {lane}, epoch {epoch}"
        if kind == TIMEOUT:
            pair = [(layout.signal_epoch(w), layout.signal_count(w)) for w in (expected, seen)]
            record = WaitRecord(OPS[op], list(Mode)[mode].value, lane, epoch, self.rank, peer, *pair)
            return EpTimeout(record, self.config.timeout_s)
        if kind == DISAGREE:
            return EpDisagree(
                f"in {where}, rank {self.rank} called {_describe(expected)} and rank {peer} called {_describe(seen)}; "
                "all ranks must choose the same"
            )
        if kind == ABORT:
            return EpFailed(f"rank {self.rank}: rank {peer} gave up before {where}")
        return EpError(
            f"rank {self.rank}, {where}: token {expected} has topk id {seen}; ids lie in 0..{self.shape.experts - 1}, "
            "or -1 for no expert"
        )

    def transports(self) -> dict[str, list[int]]:
        each = self.shape.gpus_per_node
        others = [r for r in range(self.shape.ranks) if r != self.rank]
        near = [r for r in others if r // each == self.rank // each]
        return {"local": [self.rank], "scale_up": near, "scale_out": [r for r in others if r not in near]}

    def read_stats(self, stats: BufferStats) -> None:
        """Copy the device's counters; waits for the kernels before."""
        s, values = self.shape, self._counters.tolist()
        size = 4 * s.ranks + 8
        for mode in self.config.max_tokens:
            rows, scalars = values[size * mode.code :][: 4 * s.ranks], values[size * mode.code + 4 * s.ranks :][:8]
            m = stats.mode(mode.value)
            m.dispatch.calls, m.combine.calls, m.tokens, m.slots_high_water = scalars[:4]
            for op, forwarded in ((m.dispatch, scalars[4:6]), (m.combine, scalars[6:])):
                op.records["forwarded"], op.bytes["forwarded"] = forwarded
            for op, first in ((m.dispatch, 0), (m.combine, 2)):
                for path, peers in self.transports().items():
                    op.records[path] = sum(rows[first * s.ranks + p] for p in peers)
                    op.bytes[path] = sum(rows[(first + 1) * s.ranks + p] for p in peers)
        waits = values[4 * size :][: s.ranks]
        stats.wait_s.update({peer: ns / 1e9 for peer, ns in enumerate(waits) if ns})
        stats.expert_rows = values[4 * size + s.ranks :]

    def destroy(self) -> None:
        self._reason = self._reason or "destroyed"
        if self._heap.base:
            self._gpu.finish()
        self._heap.close(min(self.config.timeout_s, 5.0))


def _address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _cut(r: Received, n: int) -> Received:
    assert r.topk_ids is not None and r.topk_weights is not None
    scales = r.scales[:n] if r.scales is not None else None
    return Received(r.rows[:n], scales, r.topk_ids[:n], r.topk_weights[:n], r.counts, n)


def _describe(signature: int) -> str:
    mode, form = list(Mode)[signature >> 3 & 3], list(Layout)[signature >> 2 & 1]
    handle = ", with a handle" if signature & REPEATS else ""
    return f"{mode.value} ({form.value}, {Payload(signature & 3).name.lower()}{handle})"
