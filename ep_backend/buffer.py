"""EpBuffer: expert-parallel dispatch and combine over one symmetric buffer that serves every mode."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from ep_backend import layout as memory
from ep_backend.config import TIMEOUT_S, BufferConfig, timeout_seconds, whole
from ep_backend.errors import EpError, EpFailed, EpRefused, EpTimeout
from ep_backend.fabric.base import Call, Fabric, Received, Routing
from ep_backend.layout import Payload
from ep_backend.modes import Layout, Mode, parse_mode

if TYPE_CHECKING:
    from ep_backend.fabric.host.faults import Faults

log = logging.getLogger(__name__)

T = TypeVar("T")
Hook = Callable[[], None]
ScaleFormat = Literal["fp32", "ue8m0"]


@dataclass(slots=True, eq=False)
class Handle:
    """What combine needs to answer a dispatch. Opaque. Its combine ends it; a later dispatch may still repeat its routing, for
    which it keeps the caller's topk_ids and topk_weights."""

    call: Call | None  # until its combine
    routing: Routing
    owner: EpBuffer


class Dispatched:
    """Result of a dispatch. With ``return_hook`` the tensors exist once ``hook()`` has run.

    compact: ``rows`` [N, H] in order of source rank and token, ``topk_ids`` [N, K] int32 local expert ids (-1 elsewhere),
    ``topk_weights`` [N, K] fp32 (0 elsewhere), ``scales`` [N, H/128] fp32 or [N, ceil(H/512)] int32, row-major.
    N is exact when the host knows the count (``num_rows``), else R x most_tokens with ids -1 behind the last row.
    masked: ``rows`` [e, R x max_tokens, H], ``scales`` [e, R x max_tokens, H/128] fp32 or [.., ceil(H/512)] int32 with
    dimension 1 contiguous (column-major, padded to 16 bytes, as TMA wants it); ids and weights are None.
    ``counts`` [e] int32: received rows by local expert (compact: picks by local expert).
    """

    __slots__ = ("_call", "handle", "hook", "event")

    def __init__(self, call: Call, handle: Handle, hook: Hook | None, event: Any = None) -> None:
        self._call = call
        self.handle = handle
        self.hook = hook
        self.event = event

    @property
    def _received(self) -> Received:
        if self._call.received is None:
            raise RuntimeError("dispatch is not finished: call its hook() before reading the result")
        return self._call.received

    @property
    def rows(self) -> torch.Tensor:
        return self._received.rows

    @property
    def scales(self) -> torch.Tensor | None:
        return self._received.scales

    @property
    def topk_ids(self) -> torch.Tensor | None:
        return self._received.topk_ids

    @property
    def topk_weights(self) -> torch.Tensor | None:
        return self._received.topk_weights

    @property
    def counts(self) -> torch.Tensor:
        return self._received.counts

    @property
    def num_rows(self) -> int | None:
        return self._received.num_rows


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a dispatch's arguments ask for, beside its tensors."""

    mode: Mode
    layout: Layout
    payload: Payload


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
        self._kinds: dict[tuple[object, ...], _Kind] = {}  # that were found good
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
            handle: repeat that dispatch's routing (then topk_ids and topk_weights stay None); normal mode skips its counts.
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
            call = self._make_call(*routing, mode, layout, lane, epoch, fp8, handle, sms, host_counts, most_tokens)
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
            if call.layout is Layout.COMPACT and host_counts and self._fabric.capturing():
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

        def finish() -> None:
            self._check_there()
            if state.call is not call or state.pending not in ("dispatch", "dispatch hook"):
                raise RuntimeError("this dispatch hook has already run")
            call.received = self._run(state, self._fabric.finish_dispatch, call)
            state.pending = "combine"

        result = Handle(call, call.routing, self)
        if async_finish:
            with self._fabric.aside(lane):
                self._fabric.uses(call.x, call.scales, call.ids, call.weights)
                self._run(state, self._fabric.start_dispatch, call)
                finish()
                event = self._event()
            got = call.received
            assert got is not None
            self._fabric.uses(got.rows, got.scales, got.topk_ids, got.topk_weights, got.counts)
            return Dispatched(call, result, None, event)
        self._run(state, self._fabric.start_dispatch, call)
        if return_hook:
            state.pending = "dispatch hook"
            return Dispatched(call, result, finish)
        finish()
        return Dispatched(call, result, None)

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
        if not isinstance(handle, Handle):
            raise TypeError(f"handle is a {type(handle).__name__}; give the handle of the dispatch's result")
        for name, t in (("y", y), ("out", out)):
            if not isinstance(t, torch.Tensor) and (t is not None or name == "y"):
                raise TypeError(f"{name} is a {type(t).__name__}; give a torch.Tensor")
        if handle.owner is not self:
            raise ValueError("the handle belongs to another buffer")
        call = handle.call
        if call is None or (state := self._lanes[call.lane]).call is not call or state.pending != "combine":
            raise RuntimeError(
                f"combine needs the handle of the finished dispatch of its lane, once ({self._pending()} pending)"
            )
        if return_hook and async_finish:
            raise ValueError("return_hook and async_finish exclude each other")
        if return_hook and not call.mode.spec.hook:
            raise ValueError(f"mode {call.mode.value} has no receive hook; use async_finish")
        y = self._check_rows(y, call)
        tokens, hidden = call.tokens, self.config.hidden
        if out is None:
            total = result = torch.empty(tokens, hidden, dtype=y.dtype, device=y.device)
        else:
            if out.shape != (tokens, hidden) or out.dtype != y.dtype or out.device != y.device or not out.is_contiguous():
                right = f"a contiguous {[tokens, hidden]} {y.dtype} on {y.device}"
                raise ValueError(f"out is {_describe(out)}; combine writes {right}")
            if out.requires_grad:
                raise ValueError("out requires a gradient, which combine does not give; give out.detach()")
            result = out
            # Sums are written while other rows of y are still read, so they need memory of their own.
            total = torch.empty_like(out) if _share_memory(out, y) or out.data_ptr() % 16 else out
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

    def _make_call(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        mode: str | Mode,
        layout: str | Layout | None,
        lane: int,
        epoch: int,
        fp8: ScaleFormat | None,
        handle: Handle | None,
        sms: int | None,
        host_counts: bool,
        most_tokens: int | None,
    ) -> Call:
        c, device = self.config, self._fabric.device
        if handle is not None:
            if not isinstance(handle, Handle):
                raise TypeError(f"handle is a {type(handle).__name__}; give the handle of an earlier dispatch, or None")
            if ids is not None or weights is not None:
                raise ValueError("a handle brings its routing along; leave topk_ids and topk_weights None")
            if handle.owner is not self:
                raise ValueError("the handle belongs to another buffer")
            ids, weights = handle.routing.ids, handle.routing.weights
        if ids is None or weights is None:
            raise ValueError("dispatch needs topk_ids and topk_weights (or the handle of an earlier dispatch)")
        if isinstance(x, tuple) and len(x) != 2:
            raise TypeError(f"x is a tuple of {len(x)}; give a tensor, or rows with their scales")
        rows, scales = x if isinstance(x, tuple) else (x, None)
        for name, t in (("x", rows), ("scales", scales), ("topk_ids", ids), ("topk_weights", weights)):
            if t is None and name == "scales":
                continue
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"{name} is a {type(t).__name__}; give a torch.Tensor")
            if t.device != device:
                raise TypeError(f"{name} is on {t.device}, the buffer on {device}; move it there")
            if t.layout is not torch.strided:
                raise TypeError(f"{name} is {t.layout}; give a dense tensor, as to_dense() makes it")
        form = mode, layout, rows.dtype, None if scales is None else scales.dtype, fp8
        try:
            kind = self._kinds.get(form)
        except TypeError:  # something that cannot be looked up, which _kind refuses
            kind = None
        if kind is None:
            kind = self._kinds[form] = self._kind(*form)
        most, shape = c.max_tokens[kind.mode], rows.shape
        if len(shape) != 2 or shape[1] != c.hidden:
            raise ValueError(f"x has shape {list(shape)}; this buffer takes [T, {c.hidden}]")
        tokens = shape[0]
        if tokens > most:
            raise ValueError(
                f"{tokens} tokens exceed max_tokens={most} of mode {kind.mode.value} (a rank, one call); "
                "raise max_tokens or send smaller batches"
            )
        if most_tokens is not None and tokens > (most_tokens := whole("most_tokens", most_tokens)):
            raise ValueError(
                f"{tokens} tokens exceed most_tokens={most_tokens} of this call; give every rank the most that any sends"
            )
        if scales is not None:
            width = memory.scale_bytes(kind.payload, c.hidden) // 4
            if scales.shape != (tokens, width):
                raise ValueError(f"scales have shape {list(scales.shape)}; use [{tokens}, {width}]")
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"topk_ids is {ids.dtype}; use int32 or int64")
        if weights.dtype != torch.float32:
            raise TypeError(f"topk_weights is {weights.dtype}; use float32")
        for name, t in (("topk_ids", ids), ("topk_weights", weights)):
            if t.shape != (tokens, c.top_k):
                whose = "the handle's " if handle is not None else ""
                raise ValueError(f"{whose}{name} has shape {list(t.shape)}; x and top_k make it [{tokens}, {c.top_k}]")
        if sms is not None and (sms := whole("sms", sms)) < 1:
            raise ValueError(f"sms={sms!r}; give at least 1, or None for the mode's default")
        if ids.is_cpu and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < -1 or high >= c.num_experts:
                raise ValueError(
                    f"topk_ids hold {low if low < -1 else high}; ids lie in 0..{c.num_experts - 1}, or -1 for no expert"
                )
        if handle is None:
            routing = Routing(ids.contiguous(), (weights.detach() if weights.requires_grad else weights).contiguous())
        else:
            routing = handle.routing
        return Call(
            kind.mode,
            kind.layout,
            kind.payload,
            lane,
            epoch,
            most,
            tokens,
            _aligned(rows),
            scales.contiguous() if scales is not None else None,
            routing,
            sms,
            host_counts,
            kind.mode is Mode.NORMAL and routing.counted is not None,
            most_tokens=None if most_tokens is None else min(most_tokens, most),
        )

    def _kind(
        self, mode: str | Mode, layout: str | Layout | None, x: torch.dtype, scales: torch.dtype | None, fp8: ScaleFormat | None
    ) -> _Kind:
        """Of calls with these arguments and types of tensors."""
        c = self.config
        mode = parse_mode(mode)
        if mode not in c.max_tokens:
            have = ", ".join(f"{m.value}={n}" for m, n in c.max_tokens.items())
            raise ValueError(f"mode {mode.value} has no capacity in this buffer ({have}); give it max_tokens")
        if layout is not None and layout not in [v.value for v in Layout]:
            raise ValueError(f"layout {layout!r} is unknown; choose compact or masked")
        shape = Layout(layout) if layout is not None else mode.spec.layout
        if shape is Layout.COMPACT and mode is Mode.LOW_LATENCY and c.shape.per_expert:
            raise ValueError(
                "low_latency in its per_expert form sends one row an expert, so it has no compact layout; "
                "use masked, or low_latency_form='per_rank'"
            )
        return _Kind(mode, shape, self._payload(x, scales, fp8))

    def _payload(self, x: torch.dtype, scales: torch.dtype | None, fp8: ScaleFormat | None) -> Payload:
        if scales is not None:
            if x != torch.float8_e4m3fn:
                raise TypeError(f"x with scales is {x}; use float8_e4m3fn")
            if fp8 is not None:
                raise ValueError("x is quantised already; fp8 asks for a cast of bf16 rows")
            payload = {torch.float32: Payload.FP8, torch.int32: Payload.FP8_UE8M0}.get(scales)
            if payload is None:
                raise TypeError(f"scales are {scales}; use float32, or int32 for packed UE8M0")
        elif fp8 is not None:
            if fp8 not in ("fp32", "ue8m0"):
                raise ValueError(f"fp8={fp8!r}; choose the scale format 'fp32' or 'ue8m0'")
            takes = (torch.bfloat16, torch.float32) if self.config.fabric == "host" else (torch.bfloat16,)
            if x not in takes:
                raise TypeError(f"x is {x}; the FP8 cast takes bfloat16")
            payload = Payload.FP8 if fp8 == "fp32" else Payload.FP8_UE8M0
        else:
            found = {torch.bfloat16: Payload.BF16, torch.float32: Payload.FP32}.get(x)
            if found is None:
                raise TypeError(f"x is {x}; use bfloat16, or (float8_e4m3fn, scales)")
            payload = found
        if payload not in self.config.payloads:
            have = ", ".join(p.name.lower() for p in self.config.payloads)
            raise TypeError(
                f"payload {payload.name.lower()} (x is {x}) is not among this buffer's payloads ({have}); "
                "name it in the constructor"
            )
        return payload

    def _check_rows(self, y: torch.Tensor, call: Call) -> torch.Tensor:
        want = torch.float32 if call.payload is Payload.FP32 else torch.bfloat16
        received = call.received
        assert received is not None
        if y.dtype != want:
            raise TypeError(f"y is {y.dtype}; the answer to a {call.payload.name.lower()} dispatch is {want}")
        if y.device != self._fabric.device:
            raise TypeError(f"y is on {y.device}, the buffer on {self._fabric.device}")
        if y.shape != received.rows.shape:
            raise ValueError(f"y has shape {list(y.shape)}; this dispatch returned {list(received.rows.shape)}")
        return _aligned(y)


def _fabric(name: str | None) -> str:
    return name if name is not None else ("nvshmem" if torch.cuda.is_available() else "host")


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """Contiguous, on the 16 bytes that bulk copies and vector accesses need: a view may begin anywhere."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0


def _describe(t: torch.Tensor) -> str:
    kind = "contiguous" if t.is_contiguous() else "strided"
    return f"a {kind} {list(t.shape)} {t.dtype} on {t.device}"


__all__ = ["Dispatched", "EpBuffer", "EpError", "Handle"]
