"""The host fabric: ranks are processes of one machine, the heap is shared memory. The executable specification."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import ModuleType

import torch

from ep_backend import layout
from ep_backend.config import BufferConfig
from ep_backend.errors import EpDisagree, EpError, EpFailed, EpRefused, WaitRecord
from ep_backend.fabric.base import Call, Received
from ep_backend.fabric.host import hybrid, rings, slots
from ep_backend.fabric.host.core import Ints
from ep_backend.fabric.host.faults import Faults
from ep_backend.fabric.host.heap import Bytes, Heap
from ep_backend.fabric.host.tasks import Beside, Blocked, Task, run
from ep_backend.fabric.meeting import Meeting
from ep_backend.modes import Layout, Mode, Placement
from ep_backend.stats import BufferStats, OpStats

GAVE_UP, LEFT = 1, 2  # in an abort word: the buffer is failed, or that rank has destroyed it
PROPOSAL_SHIFT = 16  # an intent word's count: proposal (8 bits) | mode | layout | payload


def _protocol(mode: Mode) -> ModuleType:
    if mode.spec.placement is Placement.RINGS:
        return rings
    return hybrid if mode.spec.two_hops else slots


class HostFabric:
    """One rank's end. Modes move records through :meth:`put`, :meth:`signal` and :meth:`await_word` only."""

    def __init__(self, config: BufferConfig, meeting: Meeting, faults: Faults) -> None:
        self.device = torch.device("cpu")
        self.stats = BufferStats()
        self.proposal = self.agreed = 0
        self.config = config
        self.shape = config.shape
        self.rank = meeting.rank
        self.node, self.gpu = divmod(meeting.rank, config.gpus_per_node)
        self.faults = faults
        self.words = layout.words(self.shape)
        self.allocated_bytes = layout.heap_bytes(self.shape, config.lanes)
        self._meeting = meeting
        self._regions = layout.lane(self.shape)
        self._failure: str | None = None
        self._executed: tuple[Mode | None, int] = (None, 0)
        self._lane_rounds = [0] * config.lanes
        self._answered = [0] * config.lanes  # the last epoch that had its combine
        self._beside: list[list[Beside]] = [[] for _ in range(config.lanes)]
        self._heap = Heap(self.allocated_bytes, meeting)

    # The four phases of a call.

    def start_dispatch(self, call: Call) -> None:
        self._intend(call.lane, call.epoch, self.proposal << PROPOSAL_SHIFT | _signature(call))
        stats = self.stats.mode(call.mode.value)
        stats.tokens += call.tokens
        stats.slots_high_water = max(stats.slots_high_water, call.tokens)
        stats.dispatch.calls += 1
        with stats.dispatch.timed("send"), self._refusal_first(call):
            if call.epoch != self._answered[call.lane] + 1:  # a peer may still be writing records of a refused epoch
                peers = range(self.shape.ranks)
                self.run(call, "dispatch", *(self.await_word(call, self.words.intent, peer, peer, []) for peer in peers))
            _protocol(call.mode).start_dispatch(self, call)

    def finish_dispatch(self, call: Call) -> Received:
        with self.stats.mode(call.mode.value).dispatch.timed("receive"), self._refusal_first(call):
            received: Received = _protocol(call.mode).finish_dispatch(self, call)
            self.check(call, "dispatch")  # modes that use the same words would not notice that they differ
        self._executed = (call.mode, call.epoch)
        # Every peer's word is of this epoch: it came before the peer's records, and the next needs this rank's combine.
        carried = {self.peek(call.lane, self.words.intent, r)[1] >> PROPOSAL_SHIFT for r in range(self.shape.ranks)}
        self.agreed = carried.pop() if len(carried) == 1 else 0
        for expert, n in enumerate(received.counts.tolist()):
            self.stats.expert_rows[expert] += n
        return received

    def start_combine(self, call: Call, y: torch.Tensor) -> None:
        stats = self.stats.mode(call.mode.value).combine
        stats.calls += 1
        with stats.timed("send"):
            _protocol(call.mode).start_combine(self, call, y)

    def finish_combine(self, call: Call, out: torch.Tensor) -> None:
        # Where alone torch lets a tensor be written that was made in inference mode, as `out` may have been.
        with self.stats.mode(call.mode.value).combine.timed("receive"), torch.inference_mode():
            _protocol(call.mode).finish_combine(self, call, out)
            if self.faults.corrupt_combine and out.numel():
                out[:, 0] += 1
        self._lane_rounds[call.lane] += 1
        self._answered[call.lane] = call.epoch

    # What modes are made of.

    def relay(self, node: int, source: int) -> int:
        """The rank of ``node`` on the source's rail."""
        return node * self.shape.gpus_per_node + source % self.shape.gpus_per_node

    def ranks_of(self, node: int) -> range:
        g = self.shape.gpus_per_node
        return range(node * g, node * g + g)

    def put(self, op: OpStats, dst: int, target: Bytes, at: Ints | slice, rows: Bytes, forwarded: bool = False) -> None:
        """Write rows into a peer's memory and count them."""
        self.faults.at("before_data")
        target[at, : rows.shape[1]] = rows
        op.count(self._path(dst), len(rows), rows.nbytes)
        if forwarded:
            op.count("forwarded", len(rows), rows.nbytes)

    def signal(self, dst: int, lane: int, array: int, index: int, epoch: int, count: int) -> None:
        """Release: whoever sees this word sees every row put before it."""
        self.faults.at("before_signal")
        self._heap.store(dst, self._word(lane, array, index), layout.signal_word(epoch, count))

    def peek(self, lane: int, array: int, index: int) -> tuple[int, int]:
        """(epoch, count) of one of this rank's own words; acquire."""
        word = self._heap.load(self.rank, self._word(lane, array, index))
        return layout.signal_epoch(word), layout.signal_count(word)

    def await_word(self, call: Call, array: int, index: int, peer: int, seen: list[int]) -> Task:
        """Wait for the word to reach the call's epoch, then append its count to ``seen``."""
        while True:
            epoch, count = self.peek(call.lane, array, index)
            if epoch == call.epoch:
                self.faults.at("after_wait")
                seen.append(count)
                return
            yield Blocked(peer, (call.epoch, 0), (epoch, count))

    def dispatch_rows(self, rank: int, lane: int, segment: int, count: int, stride: int) -> Bytes:
        base = layout.lane_offset(self.shape, lane) + self._regions.dispatch
        return self._heap.rows(rank, base + segment, count, stride)

    def combine_rows(self, rank: int, lane: int, segment: int, count: int, stride: int) -> Bytes:
        base = layout.lane_offset(self.shape, lane) + self._regions.combine
        return self._heap.rows(rank, base + segment, count, stride)

    def run(self, call: Call, op: str, *tasks: Task) -> None:
        """Run tasks of one phase with bounded waits."""

        def record(b: Blocked) -> WaitRecord:
            return WaitRecord(op, call.mode.value, call.lane, call.epoch, self.rank, b.peer, b.expected, b.seen)

        def waited(peer: int, seconds: float) -> None:
            self.stats.wait_s[peer] += seconds

        left: set[int] = set()

        def check(blocked: list[Blocked]) -> None:
            self.check(call, op)
            for b in blocked:
                if b.peer in left:  # it had before this turn, so that the word cannot be on its way
                    raise EpFailed(f"rank {b.peer} has destroyed the buffer, and rank {self.rank} waits for it in {record(b)}")
            left.update(peer for peer in range(self.shape.ranks) if self._heap.load(self.rank, 8 * peer) == LEFT)

        run(tasks, record, self.config.timeout_s, check, waited, self._go_on_beside)

    def check(self, call: Call, op: str) -> None:
        """Raise if a peer failed, refused this epoch, or called something else in it."""
        reason = self.failure()
        if reason is not None:
            raise EpFailed(f"rank {self.rank}, {op} of {call.mode.value}: {reason}")
        if op != "dispatch":
            return
        for peer in range(self.shape.ranks):
            epoch, signature = self.peek(call.lane, self.words.intent, peer)
            # A peer in a later epoch cannot have completed this one without us, so somebody refused it.
            if epoch > call.epoch or (epoch == call.epoch and signature == layout.REFUSED):
                raise EpRefused(self._refusal(call))
            signature &= (1 << PROPOSAL_SHIFT) - 1
            if epoch == call.epoch and signature != _signature(call):
                raise EpDisagree(
                    f"in epoch {epoch} of lane {call.lane} rank {self.rank} called {_describe(_signature(call))} "
                    f"and rank {peer} called {_describe(signature)}; all ranks must choose the same"
                )

    def beside(self, call: Call, *tasks: Task) -> None:
        """Begin what peers need of this rank whatever its caller does next: any wait keeps it going."""
        self._beside[call.lane] = [Beside(task) for task in tasks]

    def join(self, call: Call) -> list[Task]:
        """Wait for what the call began beside its phase."""
        return [task.join() for task in self._beside[call.lane]]

    # Agreement, failure and the end.

    def refuse(self, rounds: list[tuple[int, int]], reason: str) -> None:
        try:
            for lane, epoch in rounds:
                self._meeting.post(_refusal(lane, epoch, self.rank), (reason, rounds))
        except EpError:  # the store may be gone with its rank; peers are told all the same, but not why
            if len(rounds) > 1:  # nor which rounds are used up, without which lanes would part
                raise
        for lane, epoch in rounds:  # whoever sees one has all that was posted
            self._intend(lane, epoch, layout.REFUSED)

    def refused_with(self, lane: int, epoch: int) -> list[tuple[int, int]]:
        return [used for _, _, rounds in self._refusals(lane, epoch) for used in rounds]

    def capturing(self) -> bool:
        return False

    def aside(self, lane: int) -> AbstractContextManager[None]:
        return nullcontext()

    def uses(self, *tensors: torch.Tensor | None) -> None: ...

    def executed(self) -> tuple[Mode | None, int]:
        return self._executed

    def lane_rounds(self) -> list[int]:
        return list(self._lane_rounds)

    def abort(self, reason: str) -> None:
        self._failure = self._failure or reason
        with suppress(EpError):  # the store may be gone with its rank; the words below still tell that we gave up
            self._meeting.post(f"abort/{self.rank}", reason, seconds=0.5)
        for peer in range(self.shape.ranks):
            self._heap.store(peer, 8 * self.rank, GAVE_UP)

    def failure(self) -> str | None:
        if self._failure is None:
            for peer in range(self.shape.ranks):
                if self._heap.load(self.rank, 8 * peer) == GAVE_UP:
                    self._failure = self._meeting.peek(f"abort/{peer}", f"rank {peer} gave up")
        return self._failure

    def transports(self) -> dict[str, list[int]]:
        paths: dict[str, list[int]] = {"local": [], "scale_up": [], "scale_out": []}
        for peer in range(self.shape.ranks):
            paths[self._path(peer)].append(peer)
        return paths

    def destroy(self) -> None:
        if self.failure() is None:
            for peer in range(self.shape.ranks):
                self._heap.store(peer, 8 * self.rank, LEFT)
        self._failure = self._failure or "destroyed"
        self._meeting.rendezvous("destroy", min(self.config.timeout_s, 5.0))
        self._heap.close()

    def _path(self, peer: int) -> str:
        if peer == self.rank:
            return "local"
        return "scale_up" if peer // self.shape.gpus_per_node == self.node else "scale_out"

    def _word(self, lane: int, array: int, index: int) -> int:
        return layout.lane_offset(self.shape, lane) + array + 8 * index

    def _intend(self, lane: int, epoch: int, signature: int) -> None:
        for peer in range(self.shape.ranks):
            word = layout.signal_word(epoch, signature)
            self._heap.store(peer, self._word(lane, self.words.intent, self.rank), word)

    def _go_on_beside(self) -> bool:
        return any([task.step() for lane in self._beside for task in lane])

    @contextmanager
    def _refusal_first(self, call: Call) -> Iterator[None]:
        """Records of a refused epoch may be overwritten while they are read; then the refusal is the error to report."""
        try:
            yield
        except BaseException as e:
            for task in self._beside[call.lane]:
                task.end()
            if isinstance(e, (IndexError, ValueError)):
                self.check(call, "dispatch")
            raise

    def _refusals(self, lane: int, epoch: int) -> list[tuple[int, str, list[tuple[int, int]]]]:
        """Each rank that refused the epoch, why, and what it used up with it."""
        none: tuple[str, list[tuple[int, int]]] = "", []
        said = [(peer, *self._meeting.peek(_refusal(lane, epoch, peer), none)) for peer in range(self.shape.ranks)]
        return [each for each in said if each[1]]

    def _refusal(self, call: Call) -> str:
        epoch = f"dispatch epoch {call.epoch} of lane {call.lane}"
        for peer, reason, _ in self._refusals(call.lane, call.epoch):
            return f"rank {peer} refused {epoch}: {reason}"
        return f"{epoch} was refused, and the process group's store does not say why"


def _refusal(lane: int, epoch: int, rank: int) -> str:
    return f"refused/{lane}/{epoch}/{rank}"


def _signature(call: Call) -> int:
    """What ranks must agree on, in the low bits of an intent word."""
    return call.repeats << 10 | call.mode.code << 8 | list(Layout).index(call.layout) << 4 | call.payload


def _describe(signature: int) -> str:
    mode, form = list(Mode)[signature >> 8 & 3], list(Layout)[signature >> 4 & 15]
    handle = ", with a handle" if signature >> 10 else ""
    return f"{mode.value} ({form.value}, {layout.Payload(signature & 15).name.lower()}{handle})"
