"""EpBuffer: expert-parallel dispatch and combine over one symmetric buffer that serves every mode."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from ep_backend.arguments import Arguments, ScaleFormat
from ep_backend.config import TIMEOUT_S, BufferConfig, timeout_seconds, whole
from ep_backend.dispatched import Dispatched, Handle
from ep_backend.errors import EpError, EpFailed, EpRefused, EpTimeout
from ep_backend.fabric.base import Call, Fabric, Received
from ep_backend.modes import Layout, Mode

if TYPE_CHECKING:
    from ep_backend.fabric.host.faults import Faults

T = TypeVar("T")


@dataclass(slots=True)
class _LaneState:
    epoch: int = 0
    call: Call | None = None
    pending: str | None = None  # what must happen before the lane's next operation


class EpBuffer:
    """One symmetric buffer a process group and model shape, for every mode it is given capacity for.

    The constructor is collective: all ranks of ``group`` call it with equal arguments, otherwise it raises on every one
    of them. It allocates everything; :meth:`size_hint` says how much beforehand.

    Args:
        group: torch.distributed process group; only its store is used to meet.
        hidden: H. A multiple of 8, and of 128 for FP8.
        num_experts: E, a multiple of the ranks; redundant experts count.
        top_k: K, 1 to 32.
        max_tokens: most tokens a rank dispatches in one call, by mode name; 0 or absent: the mode takes no memory.
        lanes: 1, or 2 for two micro-batches in flight.
        payloads: what rows may be on the wire: "bf16", "fp8", "fp8_ue8m0", and "fp32" on the host fabric.
        gpus_per_node: ranks of one scale-up domain, consecutive; smaller than the host makes virtual nodes. Default all.
        fabric: "host" or "nvshmem"; default nvshmem where CUDA is available.
        timeout_s: bound of every wait, in seconds.
        low_latency_form: "per_rank" (one copy a GPU), "per_expert" (one copy an expert), "auto" (per_rank for mapped peers).
        rail: how hybrid reaches other nodes: "peer" stores ("auto" too), or remote "put"s; on the host fabric always alike.
        ring_slots: records one ring of normal mode holds; default 1024 to 256, by the number of ranks.
        deterministic: same bits and row order from run to run (the host fabric always is).
    """

    def __init__(
        self,
        group: Any,
        *,
        hidden: int,
        num_experts: int,
        top_k: int,
        max_tokens: Mapping[str, int],
        lanes: int = 1,
        payloads: tuple[str, ...] = ("bf16", "fp8", "fp8_ue8m0"),
        gpus_per_node: int | None = None,
        fabric: str | None = None,
        timeout_s: float = TIMEOUT_S,
        low_latency_form: str = "auto",
        rail: str = "auto",
        ring_slots: int | None = None,
        deterministic: bool = False,
        faults: Faults | None = None,
    ) -> None:
        from ep_backend.fabric import make_fabric
        from ep_backend.fabric.meeting import Meeting

        name = _fabric(fabric)
        self._destroyed, self._process = False, os.getpid()
        meeting = Meeting(group)
        config: BufferConfig | None = None
        error: ValueError | TypeError | None = None
        seconds = TIMEOUT_S
        try:
            seconds = timeout_seconds(timeout_s)
            config = BufferConfig.make(
                meeting.size,
                hidden=hidden,
                num_experts=num_experts,
                top_k=top_k,
                max_tokens=max_tokens,
                lanes=lanes,
                payloads=payloads,
                gpus_per_node=gpus_per_node,
                fabric=name,
                timeout_s=timeout_s,
                low_latency_form=low_latency_form,
                rail=rail,
                ring_slots=ring_slots,
                deterministic=deterministic,
            )
        except (ValueError, TypeError) as e:
            error = e
        self.rank = meeting.rank
        try:
            with meeting.together(seconds):
                meeting.agree(config.as_dict() if config else {}, error)
                assert config is not None
                self._fabric: Fabric = make_fabric(name, config, meeting, faults)
        except EpError as e:
            if error is not None:  # nobody came to be told
                raise error from e
            raise
        self.config = config
        self._lanes = [_LaneState() for _ in range(config.lanes)]
        self._arguments = Arguments(self, config, self._fabric.device)
        self._bytes = config.region_bytes()
        self._error: str | None = None
        self._fabric.stats.expert_rows = [0] * config.shape.local_experts

    @staticmethod
    def size_hint(ranks: int, **arguments: Any) -> dict[str, Any]:
        """Bytes a rank that a buffer of these constructor arguments allocates; see :meth:`BufferConfig.size_hint`."""
        return BufferConfig.make(ranks, **{**arguments, "fabric": _fabric(arguments.get("fabric"))}).size_hint()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of this rank's symmetric heap."""
        return self._fabric.allocated_bytes

    @property
    def num_ranks(self) -> int:
        return self.config.ranks

    @property
    def local_experts(self) -> int:
        return self.config.shape.local_experts

    def describe(self) -> str:
        """Shape, capacities (a rank and in total), memory and the transport to each peer, one fact a line."""
        c = self.config
        hint = c.size_hint()
        lines = [
            f"ep_backend buffer, rank {self.rank} of {c.ranks} ({c.shape.nodes} nodes x {c.gpus_per_node}), "
            f"{c.fabric} fabric, {self.allocated_bytes} bytes",
            f"hidden {c.hidden}, {c.num_experts} experts ({c.shape.local_experts} a rank), top-{c.top_k}, {c.lanes} lanes",
        ]
        for mode, tokens in c.max_tokens.items():
            need = hint["modes"][mode.value]
            lines.append(
                f"{mode.value}: {tokens} tokens a rank, {tokens * c.ranks} in total, "
                f"dispatch {need['dispatch']} and combine {need['combine']} bytes a lane"
            )
        lines += [f"{path}: ranks {', '.join(map(str, peers)) or 'none'}" for path, peers in self._fabric.transports().items()]
        return "\n".join(lines)

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        mode: str | Mode,
        layout: str | Layout | None = None,
        lane: int = 0,
        fp8: ScaleFormat | None = None,
        handle: Handle | None = None,
        return_hook: bool = False,
        async_finish: bool = False,
        host_counts: bool = True,
        most_tokens: int | None = None,
        sms: int | None = None,
    ) -> Dispatched:
        """Send each token to the ranks that own its experts.

        Args:
            x: [T, H] bf16 (fp32 on a buffer with that payload), or (e4m3 [T, H], scales [T, H/128] fp32 or
                [T, ceil(H/512)] int32). T may be 0 and may differ between ranks.
            topk_ids: [T, K] int32 or int64 global expert ids; -1 for no expert; duplicates sum. Combine reads them again, as
                does a dispatch that repeats them: leave them as they are until then. x is free once the dispatch is done.
            topk_weights: [T, K] fp32, likewise.
            mode: one that the buffer has capacity for; equal on all ranks, like layout, lane and payload.
            layout: "compact" or "masked"; default the mode's own.
            lane: which micro-batch.
            fp8: cast bf16 rows to e4m3 on the way, with this scale format.
            handle: repeat that dispatch's routing (then topk_ids and topk_weights stay None); normal mode skips its counts, so
                that there all ranks must repeat the same dispatch.
            return_hook: return after the send phase; ``hook()`` of the result runs the receive phase.
            async_finish: run on a stream of the lane's own, behind what the current one was given so far, and return an event
                (None on a CPU) behind the receive phase, for which a stream waits before it reads the result.
            host_counts: cut compact rows to the exact number, which the host waits for; False never waits.
            most_tokens: most tokens that any rank sends in this call, equal on all ranks: what bounds compact rows that the
                host does not count. Default max_tokens of the mode. A rank's own tokens are held to it, and a peer that sends
                more is an EpDisagree.
            sms: most SMs the kernels use (CUDA only).

        Raises:
            ValueError, TypeError: an argument breaks a rule; nothing was sent and the buffer goes on working. On GPUs the host
                does not read topk_ids: an id outside the model is an EpError, and the buffer is failed.
            EpRefused: a peer's arguments did; the buffer goes on working (host fabric).
            EpTimeout, EpDisagree, EpFailed: the buffer is failed and must be rebuilt on all ranks. On GPUs, whose hosts may be
                far ahead of their kernels, also if some ranks refused their arguments and others did not.
            RuntimeError: the lane still has an operation in flight.
        """
        self._check_alive()
        try:
            state = self._lane(lane)
        except (ValueError, TypeError) as e:
            # Which round of which lane this was to be nobody can tell.
            self._refuse([idle for idle, other in enumerate(self._lanes) if other.pending is None], e)
            raise
        if state.pending is not None:
            raise RuntimeError(
                f"lane {lane} has {state.pending} pending, so dispatch cannot start; finish it, or use another of the "
                f"{len(self._lanes)} lanes (pending: {self._pending()})"
            )
        epoch = state.epoch + 1
        try:
            routing = x, topk_ids, topk_weights
            call = self._arguments.call(*routing, mode, layout, lane, epoch, fp8, handle, sms, host_counts, most_tokens)
            spec = call.mode.spec
            if return_hook and async_finish:
                raise ValueError(
                    "return_hook and async_finish exclude each other: a hook is the receive phase, not yet started"
                )
            if not spec.graph and self._fabric.capturing():
                raise ValueError(
                    f"mode {call.mode.value} cannot be captured in a graph: its host waits for counts; "
                    "use direct or hybrid, or no graph"
                )
            if call.exact and self._fabric.capturing():
                raise ValueError("a captured dispatch cannot wait for the number of rows: use host_counts=False, or masked")
            if return_hook and not spec.hook:
                raise ValueError(
                    f"mode {call.mode.value} has no receive hook (its rings need both sides at work); "
                    "use async_finish, or a mode with slots"
                )
        except Exception as e:
            self._refuse([lane], e)
            raise
        call.split, call.aside = return_hook, async_finish
        state.epoch, state.call, state.pending = epoch, call, "dispatch"
        found: list[Received] = []

        def finish() -> None:
            self._check_there()
            if state.call is not call or state.pending not in ("dispatch", "dispatch hook"):
                raise RuntimeError("this dispatch hook has already run")
            found.append(self._run(state, self._fabric.finish_dispatch, call))
            call.answer = tuple(found[0].rows.shape)
            state.pending = "combine"

        result = Handle(call, call.routing, self)
        if async_finish:
            with self._fabric.aside(lane):
                self._fabric.uses(call.x, call.scales, call.ids, call.weights)
                self._run(state, self._fabric.start_dispatch, call)
                finish()
                event = self._event()
            got = found[0]
            self._fabric.uses(got.rows, got.scales, got.topk_ids, got.topk_weights, got.counts)
            return Dispatched(found, result, None, event)
        self._run(state, self._fabric.start_dispatch, call)
        if return_hook:
            state.pending = "dispatch hook"
            return Dispatched(found, result, finish)
        finish()
        return Dispatched(found, result, None)

    @overload
    def combine(
        self,
        y: torch.Tensor,
        handle: Handle,
        *,
        out: torch.Tensor | None = ...,
        return_hook: Literal[False] = ...,
        async_finish: Literal[False] = ...,
    ) -> torch.Tensor: ...
    @overload
    def combine(
        self,
        y: torch.Tensor,
        handle: Handle,
        *,
        out: torch.Tensor | None = ...,
        return_hook: bool = ...,
        async_finish: bool = ...,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]: ...
    def combine(
        self,
        y: torch.Tensor,
        handle: Handle,
        *,
        out: torch.Tensor | None = None,
        return_hook: bool = False,
        async_finish: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return expert outputs to the tokens' owners and sum them in fp32.

        compact: ``y`` [N, H], each row already weighted and reduced over this rank's experts; combine sums over ranks.
        masked: ``y`` [e, R x max_tokens, H], one unweighted row per (token, expert); combine weights and sums. Rows at and
        beyond a count are not read. A token without experts gets zeros.

        Returns [T, H] in y's dtype; with ``return_hook`` (out, hook), with ``async_finish``, which is that of :meth:`dispatch`,
        (out, event). ``out`` may be part of y.
        Each partial sum that leaves a rank is rounded once to y's dtype, then the result.
        """
        self._check_alive()
        self._arguments.handle(handle, "the handle of the dispatch's result")
        for name, t in (("y", y), ("out", out)):
            if not isinstance(t, torch.Tensor) and (t is not None or name == "y"):
                raise TypeError(f"{name} is a {type(t).__name__}; give a torch.Tensor")
        call = handle.call
        if call is None or (state := self._lanes[call.lane]).call is not call or state.pending != "combine":
            raise RuntimeError(
                f"combine needs the handle of the finished dispatch of its lane, once ({self._pending()} pending)"
            )
        if return_hook and async_finish:
            raise ValueError("return_hook and async_finish exclude each other")
        if return_hook and not call.mode.spec.hook:
            raise ValueError(f"mode {call.mode.value} has no receive hook; use async_finish")
        y = self._arguments.answer(y, call)
        result, total = self._arguments.sums(out, y, call.tokens)
        call.split, call.aside = return_hook, call.aside or async_finish

        def finish() -> None:
            self._check_there()
            if state.call is not call or state.pending not in ("combine", "combine hook"):
                raise RuntimeError("this combine hook has already run")
            self._run(state, self._fabric.finish_combine, call, total)
            if total is not result:
                with torch.inference_mode():  # in which the result may have been made
                    result.copy_(total)
            state.call = state.pending = handle.call = None

        if async_finish:
            with self._fabric.aside(call.lane):
                self._fabric.uses(y, result, total)
                self._run(state, self._fabric.start_combine, call, y)
                finish()
                return result, self._event()
        self._run(state, self._fabric.start_combine, call, y)
        if return_hook:
            state.pending = "combine hook"
            return result, finish
        finish()
        return result

    def propose(self, token: int) -> None:
        """Carry a proposal, 1 to 255, in this rank's following dispatches; 0 withdraws it.

        How ranks change something at the same step without a barrier: see :meth:`agreed`.
        """
        if not 0 <= (number := whole("token", token)) <= 255:
            raise ValueError(f"token={token!r}; a proposal is a number from 1 to 255, or 0 for none")
        self._fabric.proposal = number

    def agreed(self) -> int:
        """The proposal that every rank carried in the last finished dispatch, else 0. The same on all ranks."""
        return self._fabric.agreed

    def stats(self) -> dict[str, Any]:
        """Counters since construction; see :meth:`ep_backend.stats.BufferStats.as_dict`."""
        mode, epoch = self._fabric.executed()
        return {
            **self._fabric.stats.as_dict(),
            "mode_executed": mode.value if mode else None,
            "epoch": epoch,
            "lane_rounds": self._fabric.lane_rounds(),
            "max_tokens": {mode.value: tokens for mode, tokens in self.config.max_tokens.items()},
            "failed": self._error or self._fabric.failure(),
            "buffer_bytes": self._bytes,
        }

    def failure(self) -> str | None:
        """Why the buffer is failed, or None. Cheap: for a watchdog."""
        return self._error or self._fabric.failure()

    def abort(self, reason: str = "abort() was called") -> None:
        """Fail the buffer on all ranks, for a caller that cannot go on between a dispatch and its combine."""
        if self._destroyed or self._forked():
            return
        self._error = self._error or f"rank {self.rank}: {reason}"
        self._fabric.abort(self._error)

    def destroy(self) -> None:
        """Release the buffer. Waits at most the timeout for the other ranks, never raises, may be called twice."""
        if self._destroyed or self._forked():
            return
        self._destroyed = True
        if hasattr(self, "_fabric"):
            self._fabric.destroy()

    def __enter__(self) -> EpBuffer:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:  # else peers would wait for what this rank does no more
            self.abort(f"{type(error).__name__}: {error}")
        self.destroy()

    def _lane(self, lane: int) -> _LaneState:
        if not 0 <= (number := whole("lane", lane)) < len(self._lanes):
            raise ValueError(f"lane={lane}; this buffer was made with lanes={len(self._lanes)}")
        return self._lanes[number]

    def _pending(self) -> str:
        ops = [
            f"{s.pending} of {s.call.mode.value} in lane {i}, epoch {s.epoch}"
            for i, s in enumerate(self._lanes)
            if s.pending and s.call
        ]
        return "; ".join(ops) or "nothing"

    def _refuse(self, lanes: list[int], error: Exception) -> None:
        """These lanes' next rounds do not take place, and peers hear why."""
        for lane in lanes:
            self._lanes[lane].epoch += 1
        rounds = [(lane, self._lanes[lane].epoch) for lane in lanes]
        self._fabric.refuse(rounds, f"{type(error).__name__}: {error}")

    def _forked(self) -> bool:
        """Whether this is a child's copy, with whose memory the child could break its parent's rounds."""
        return os.getpid() != self._process

    def _check_there(self) -> None:
        if self._destroyed:
            raise EpFailed("the buffer was destroyed; make a new one on all ranks")
        if self._forked():
            raise EpFailed(
                f"process {os.getpid()} is a fork of the buffer's process {self._process}, to which the buffer belongs; "
                "make it behind the fork, or start processes by spawn"
            )

    def _check_alive(self) -> None:
        self._check_there()
        reason = self.failure()
        if reason is not None:
            raise EpFailed(f"the buffer is failed and must be rebuilt on all ranks. First failure: {reason}")

    def _run(self, state: _LaneState, step: Callable[..., T], *args: Any) -> T:
        """Run a phase; a refusal ends the call only, anything else fails the buffer here and on its peers."""
        try:
            return step(*args)
        except EpRefused:
            call, state.call, state.pending = state.call, None, None
            assert call is not None
            for lane, epoch in self._fabric.refused_with(call.lane, call.epoch):
                other = self._lanes[lane]
                other.epoch += other.pending is None and other.epoch + 1 == epoch
            raise
        except BaseException as e:
            self._fabric.stats.timeouts += isinstance(e, EpTimeout)
            said = str(e) or type(e).__name__  # as an interrupt, which says nothing
            self._error = self._error or (said if said.startswith("rank ") else f"rank {self.rank}: {said}")
            self._fabric.abort(self._error)
            raise

    def _event(self) -> Any:
        if self._fabric.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._fabric.device))
        return event


def _fabric(name: str | None) -> str:
    return name if name is not None else ("nvshmem" if torch.cuda.is_available() else "host")
