"""One rank's end of a buffer on a GPU: kernels that store to mapped peers."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ep_backend import layout
from ep_backend.config import MAX_RANKS, BufferConfig
from ep_backend.errors import EpDisagree, EpError, EpFailed, EpTimeout, WaitRecord
from ep_backend.fabric.base import Call, Received, other_round
from ep_backend.fabric.meeting import Meeting
from ep_backend.fabric.nvshmem import launches, rings
from ep_backend.fabric.nvshmem.device import Gpu
from ep_backend.fabric.nvshmem.launch import STAGE_BYTES, Args, Launch, Roles, casts
from ep_backend.fabric.nvshmem.launches import Launches
from ep_backend.fabric.nvshmem.outputs import ALIGN, COUNTS, PLACES, PLAN, Outputs, plan_words
from ep_backend.layout import Payload
from ep_backend.modes import Layout, Mode
from ep_backend.stats import BufferStats

log = logging.getLogger(__name__)

OPS = ("dispatch", "combine")
TIMEOUT, DISAGREE, ABORT, BAD_ID, SKIPPED, TOO_MANY, OTHER_ROUND = range(1, 8)  # Fault of args.h
SIGNATURE_BITS, REPEATS = 6, 1 << 5  # kSignatureBits, kRepeats
REFUSED = layout.REFUSED & (1 << SIGNATURE_BITS) - 1  # as kernels see it, for they compare signatures


class DeviceStats(BufferStats):
    """Counters that live in device memory until somebody asks."""

    def __init__(self, fabric: NvshmemFabric) -> None:
        super().__init__()
        self._fabric = fabric

    def as_dict(self) -> dict[str, Any]:
        self._fabric.read_stats(self)
        return super().as_dict()


class _Plan:
    """What all calls of one kind have in common: made for the first, so that the host does little for the others."""

    def __init__(self, call: Call, args: Args, made: Launches, outputs: Outputs) -> None:
        compact = call.layout is Layout.COMPACT
        self.args, self.outputs, self._made = args, outputs, made
        self.exact = call.exact
        self.kind = (not compact, casts(call), call.ids.dtype == torch.int64, made.ordered(call))  # as launch.CALL begins
        self.fill = compact and not call.exact
        self.channels = made.channels(call)
        self._launches: dict[tuple[str, bool, bool], tuple[Launch, ...]] = {}

    def launches(self, op: str, call: Call, send: bool, receive: bool) -> tuple[Launch, ...]:
        found = self._launches.get((op, send, receive))
        if found is None:
            found = self._launches[op, send, receive] = self._made.of(op, call, send=send, receive=receive)
        return found


@dataclass(slots=True)
class _Counted:
    """What is known before a dispatch of normal moves data; rows are None where the host does not ask."""

    plan: torch.Tensor
    counts: torch.Tensor
    rows: int | None


@dataclass(slots=True)
class _State:
    """What a call keeps until its combine; the rows, which engines give up early, only until its dispatch has ended."""

    plan: _Plan
    counted: _Counted | None
    capacity: int  # rows of the outputs
    rows: torch.Tensor | None
    beside: torch.Tensor
    y: torch.Tensor | None = None


def require_supported(config: BufferConfig) -> None:
    """ValueError for what the kernels cannot carry. Asks no device."""
    if config.ranks > MAX_RANKS:
        raise ValueError(f"{config.ranks} ranks; the kernels serve up to {MAX_RANKS}; choose a smaller EP size")
    widest = max(config.shape.record_bytes, config.shape.combine_bytes)
    rows = 3 if Mode.NORMAL in config.max_tokens else 2  # a sender's, a relay's and a receiver's
    if widest * rows > STAGE_BYTES:
        raise ValueError(f"hidden={config.hidden}: {rows} rows must fit {STAGE_BYTES} bytes of shared memory")


class NvshmemFabric:
    """Kernels run on the current stream; every phase is one launch, and both phases of an operation are one if nothing
    comes between them."""

    def __init__(self, config: BufferConfig, meeting: Meeting) -> None:
        require_supported(config)
        s = config.shape
        self._gpu = gpu = Gpu()
        if gpu.capturing():
            raise EpError("a buffer cannot be made while a CUDA graph is captured: it allocates; make it before")
        self.device = gpu.device
        self.config, self.shape, self.rank = config, s, meeting.rank
        self.allocated_bytes = layout.heap_bytes(s, config.lanes)
        self.stats: BufferStats = DeviceStats(self)
        self._meeting = meeting
        if not gpu.ends(config.timeout_s):
            raise EpError(
                f"rank {self.rank}: in {config.timeout_s:g} s {gpu.device} has not ended what it was given before, or it has "
                "failed; find out what it is at, then make the buffer again on all ranks"
            )
        gpu.join(self.allocated_bytes, meeting)
        self._kernels = gpu.kernels(meeting, rail_put=bool(s.staging))
        # Host memory that kernels write: 16 words of error report, then agreed, and received rows by lane.
        self._host = gpu.mapped(20)
        self._seen: memoryview[int] = self._host.numpy().data  # whose words are read fastest
        counters = 4 * (4 * s.ranks + 8) + s.ranks + s.local_experts
        self._counters = torch.zeros(counters, dtype=torch.int64, device=self.device)
        self._control = torch.zeros(4, dtype=torch.int64, device=self.device)
        self._lanes = torch.tensor([[1, 0, 0]] * config.lanes, dtype=torch.int64, device=self.device)
        self._puts = torch.zeros((config.lanes, s.nodes * (layout.CHANNELS + 1)), dtype=torch.int64, device=self.device)
        self._reason: str | None = None
        self._proposal = 0
        self._offers = self._withdrawn = 0  # proposals so far; those of which no dispatch can carry the token any more
        self._dispatching: set[int] = set()  # lanes between the phases of a dispatch
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
        self._refusals = {lane: args for (lane, *_), args in self._args.items()}  # any of a lane's: they share its words
        self._refused = [0] * config.lanes
        self._plans: dict[tuple[object, ...], _Plan] = {}

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
        self._note_withdrawal()
        self._dispatching.add(call.lane)
        plan = self._plan(call)
        counted = self._count(call, plan) if call.mode is Mode.NORMAL else None
        outputs = plan.outputs
        capacity = outputs.most if counted is None or counted.rows is None else counted.rows
        rows, beside = outputs.make(capacity)
        places = outputs.addresses(beside, capacity)
        if counted is not None:
            places[PLAN], places[COUNTS] = counted.plan.data_ptr(), counted.counts.data_ptr()
        self._pack(call, plan, rows.data_ptr(), places, capacity, waits=plan.exact and counted is None)
        call.state = _State(plan, counted, capacity, rows, beside)
        self._launch("dispatch", call, plan, send=True, receive=not call.split)

    def finish_dispatch(self, call: Call) -> Received:
        state: _State = call.state
        plan, counted, most = state.plan, state.counted, call.most_rows(self.shape.ranks)
        if call.split:
            self._launch("dispatch", call, plan, send=False, receive=True)
        self._dispatching.discard(call.lane)
        given, state.rows = state.rows, None
        assert given is not None
        if counted is not None:
            return plan.outputs.received(given, state.beside, counted.counts, state.capacity, counted.rows, most)
        rows = self._await_rows(call) if plan.exact else None
        return plan.outputs.received(given, state.beside, None, state.capacity, rows, most)

    def start_combine(self, call: Call, y: torch.Tensor) -> None:
        self._raise_failure()
        state: _State = call.state
        if call.aside:
            counted = state.counted
            self.uses(call.ids, call.weights, state.beside, *((counted.plan, counted.counts) if counted else ()))
        state.y = y
        if call.split:
            self._combine(call, state, None, send=True, receive=False)

    def finish_combine(self, call: Call, out: torch.Tensor) -> None:
        state: _State = call.state
        self._combine(call, state, out, send=not call.split, receive=True)
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

    def _plan(self, call: Call) -> _Plan:
        tokens = min(call.tokens, launches.SMALL + 1)  # beyond, launches do not depend on it
        # A launch holds its stream: lanes that two threads drive share none.
        form = call.lane, call.mode, call.layout, call.payload, call.repeats
        key = (*form, call.scales is None, call.ids.dtype, tokens, call.sms, call.host_counts, call.split)
        found = self._plans.get(key)
        if found is None:
            per_expert, ordered = self._launches.per_expert(call), self._launches.ordered(call)
            outputs = Outputs(self.shape, call, self.device, per_expert=per_expert, ordered=ordered)
            found = self._plans[key] = _Plan(call, self._args[form], self._launches, outputs)
        return found

    def _count(self, call: Call, plan: _Plan) -> _Counted:
        """normal's exchange of counts, so that its compact outputs have their exact size; waits for all ranks to call."""
        s, rows = self.shape, None
        if not call.repeats:
            words = layout.align_up(plan_words(s.ranks) + s.nodes * layout.RING_CHANNELS, ALIGN)
            kept = torch.empty(words + s.local_experts, dtype=torch.int32, device=self.device)
            counts = kept[words:]
        else:
            earlier: _Counted = call.routing.counted
            kept, rows = earlier.plan, earlier.rows if plan.exact else None
            counts = torch.empty(s.local_experts, dtype=torch.int32, device=self.device)
        if call.aside or call.repeats:  # which another stream may have allocated
            self.uses(kept)
        places = [0] * len(PLACES)
        places[PLAN], places[COUNTS] = kept.data_ptr(), counts.data_ptr()
        waits = plan.exact and rows is None
        self._pack(call, plan, 0, places, 0, waits=waits)
        self._launch("count", call, plan, send=True, receive=True)
        counted = _Counted(kept, counts, self._await_rows(call) if waits else rows)
        if waits or not call.repeats:
            call.routing.counted = counted
        return counted

    def _pack(self, call: Call, plan: _Plan, rows: int, places: list[int], capacity: int, *, waits: bool) -> None:
        """Values of launch.CALL up to combine's. ``waits``: the host for the number of rows."""
        host_rows = 0
        if waits:
            self._seen[17 + call.lane] = 0
            host_rows = self._host.data_ptr() + 8 * (17 + call.lane)
        scales = 0 if call.scales is None else call.scales.data_ptr()
        given = call.tokens, call.most, call.x.data_ptr(), scales, call.ids.data_ptr(), call.weights.data_ptr()
        taken = rows, *places[:PLAN], plan.outputs.stride(capacity), plan.fill, host_rows, *places[PLAN:]
        shares = plan.channels, layout.ceil_div(call.tokens, plan.channels)
        plan.args.dispatch((*plan.kind, *given, *taken, capacity, *shares))

    def _combine(self, call: Call, state: _State, out: torch.Tensor | None, *, send: bool, receive: bool) -> None:
        assert state.y is not None
        state.plan.args.combine(call.stays, state.y.data_ptr(), 0 if out is None else out.data_ptr())
        self._launch("combine", call, state.plan, send=send, receive=receive)

    def _launch(self, op: str, call: Call, plan: _Plan, *, send: bool, receive: bool) -> None:
        args, stream, side = plan.args, self._gpu.stream(), self._sides[call.lane]
        for one in plan.launches(op, call, send, receive):
            args.launch(one)
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

    # Agreement, failure and the end.

    @property
    def proposal(self) -> int:
        return self._proposal

    @proposal.setter
    def proposal(self, token: int) -> None:
        self._proposal = token
        self._offers += token != 0
        self._control[:1].fill_(token)

    @property
    def agreed(self) -> int:
        if self._withdrawn == self._offers or self.capturing():  # in a capture nothing runs that could agree
            return 0
        self._gpu.finish_stream()
        return int(self._seen[16])

    def _note_withdrawal(self) -> None:
        """A dispatch may carry a token that is withdrawn meanwhile. Only once the device knows too, and the dispatches before
        this one are whole, no later one carries it."""
        offers = self._offers
        if self._withdrawn == offers or self._proposal or self._dispatching or self.capturing():
            return
        if not self._gpu.read(self._control)[0]:
            self._withdrawn = offers

    def refuse(self, rounds: list[tuple[int, int]], reason: str) -> None:
        log.warning("rank %d refused a dispatch: %s", self.rank, reason)
        with suppress(EpError):  # the store may be gone with its rank; peers are told all the same, but not why
            self._meeting.post(f"refused/{self.rank}", reason, seconds=0.5)
        if self.capturing():  # a capture that fails is no graph, and no round was to take place
            return
        for lane, _ in rounds:
            own = self._own[lane]  # behind whatever the lane was given, on this stream and its own
            own.fork()
            with own.current():
                one = Launch("refuse", blocks=1, warps=1, roles=Roles())  # holds its stream, as all do
                self._kernels[one.kernel].launch(one, self._refusals[lane], self._gpu.stream())
            own.join()
            self._refused[lane] += 1

    def refused_with(self, lane: int, epoch: int) -> list[tuple[int, int]]:
        return []

    def capturing(self) -> bool:
        return self._gpu.capturing()

    def executed(self) -> tuple[Mode | None, int]:
        _, _, mode, epoch = self._gpu.read(self._control)
        return (list(Mode)[mode - 1] if mode else None), epoch

    def lane_rounds(self) -> list[int]:
        return [epoch - 1 - refused for (epoch, *_), refused in zip(self._gpu.read(self._lanes), self._refused, strict=True)]

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
        if (kind == DISAGREE and seen == REFUSED) or kind == SKIPPED:
            said = self._meeting.peek(f"refused/{peer}", "see its own error")
            return EpDisagree(
                f"rank {peer} refused the call that was {where} on rank {self.rank}: {said}. The buffer is failed on all "
                "ranks; correct that rank's arguments, then rebuild it on each"
            )
        if kind == TOO_MANY:
            return EpDisagree(
                f"in {where}, rank {peer} sends {seen} rows to rank {self.rank}, whose most_tokens={expected}; "
                "give every rank the most that any sends"
            )
        if kind == OTHER_ROUND:
            return EpDisagree(f"in {where}, {other_round(self.rank, expected, peer, seen)}")
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
        s, values = self.shape, self._gpu.read(self._counters)
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
        if self._gpu.ends(self.config.timeout_s + 5.0):
            return self._heap.close(min(self.config.timeout_s, 5.0))
        log.warning(
            "rank %d: %s is still at work, or has failed; %d bytes stay until the process ends",
            *(self.rank, self.device, self.allocated_bytes),
        )


def _describe(signature: int) -> str:
    mode, form = list(Mode)[signature >> 3 & 3], list(Layout)[signature >> 2 & 1]
    handle = ", with a handle" if signature & REPEATS else ""
    return f"{mode.value} ({form.value}, {Payload(signature & 3).name.lower()}{handle})"
