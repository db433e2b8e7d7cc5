"""What callers give to a buffer's operations, checked before anything is sent."""

from __future__ import annotations

from typing import Literal

import torch

from ep_backend.config import BufferConfig, whole
from ep_backend.dispatched import Handle
from ep_backend.fabric.base import Call, Routing
from ep_backend.layout import Payload, scale_bytes
from ep_backend.modes import Layout, Mode, parse_mode

Kind = tuple[Mode, Layout, Payload]
ScaleFormat = Literal["fp32", "ue8m0"]


class Arguments:
    """Those of one buffer's dispatches and combines."""

    def __init__(self, owner: object, config: BufferConfig, device: torch.device) -> None:
        self._owner, self._config, self._device = owner, config, device
        self._kinds: dict[tuple[object, ...], Kind] = {}  # that were found good

    def call(
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
        c, device = self._config, self._device
        if handle is not None:
            self.handle(handle, "the handle of an earlier dispatch, or None")
            if ids is not None or weights is not None:
                raise ValueError("a handle brings its routing along; leave topk_ids and topk_weights None")
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
        chosen, _, payload = kind
        most, shape = c.max_tokens[chosen], rows.shape
        if len(shape) != 2 or shape[1] != c.hidden:
            raise ValueError(f"x has shape {list(shape)}; this buffer takes [T, {c.hidden}]")
        tokens = shape[0]
        if tokens > most:
            raise ValueError(
                f"{tokens} tokens exceed max_tokens={most} of mode {chosen.value} (a rank, one call); "
                "raise max_tokens or send smaller batches"
            )
        if most_tokens is not None and tokens > (most_tokens := whole("most_tokens", most_tokens)):
            raise ValueError(
                f"{tokens} tokens exceed most_tokens={most_tokens} of this call; give every rank the most that any sends"
            )
        if scales is not None:
            width = scale_bytes(payload, c.hidden) // 4
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
            *kind,
            lane,
            epoch,
            most,
            tokens,
            _aligned(rows),
            scales.contiguous() if scales is not None else None,
            routing,
            sms,
            host_counts,
            chosen is Mode.NORMAL and routing.counted is not None,
            most_tokens=None if most_tokens is None else min(most_tokens, most),
        )

    def _kind(
        self, mode: str | Mode, layout: str | Layout | None, x: torch.dtype, scales: torch.dtype | None, fp8: ScaleFormat | None
    ) -> Kind:
        """Of calls with these arguments and types of tensors."""
        c = self._config
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
        return mode, shape, self._payload(x, scales, fp8)

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
            takes = (torch.bfloat16, torch.float32) if self._config.fabric == "host" else (torch.bfloat16,)
            if x not in takes:
                raise TypeError(f"x is {x}; the FP8 cast takes bfloat16")
            payload = Payload.FP8 if fp8 == "fp32" else Payload.FP8_UE8M0
        else:
            found = {torch.bfloat16: Payload.BF16, torch.float32: Payload.FP32}.get(x)
            if found is None:
                raise TypeError(f"x is {x}; use bfloat16, or (float8_e4m3fn, scales)")
            payload = found
        if payload not in self._config.payloads:
            have = ", ".join(p.name.lower() for p in self._config.payloads)
            raise TypeError(
                f"payload {payload.name.lower()} (x is {x}) is not among this buffer's payloads ({have}); "
                "name it in the constructor"
            )
        return payload

    def handle(self, handle: object, right: str) -> None:
        if not isinstance(handle, Handle):
            raise TypeError(f"handle is a {type(handle).__name__}; give {right}")
        if handle.owner is not self._owner:
            raise ValueError("the handle belongs to another buffer; each buffer takes the handles of its own dispatches")

    def answer(self, y: torch.Tensor, call: Call) -> torch.Tensor:
        """What the experts made of the call's rows."""
        want = torch.float32 if call.payload is Payload.FP32 else torch.bfloat16
        if y.dtype != want:
            raise TypeError(f"y is {y.dtype}; the answer to a {call.payload.name.lower()} dispatch is {want}")
        if y.device != self._device:
            raise TypeError(f"y is on {y.device}, the buffer on {self._device}")
        assert call.answer is not None
        if y.shape != call.answer:
            raise ValueError(f"y has shape {list(y.shape)}; this dispatch returned {list(call.answer)}")
        return _aligned(y)

    def sums(self, out: torch.Tensor | None, y: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Combine's result, and where its sums are made."""
        hidden = self._config.hidden
        if out is None:
            out = torch.empty(tokens, hidden, dtype=y.dtype, device=y.device)
            return out, out
        if out.shape != (tokens, hidden) or out.dtype != y.dtype or out.device != y.device or not out.is_contiguous():
            given = f"a {'contiguous' if out.is_contiguous() else 'strided'} {list(out.shape)} {out.dtype} on {out.device}"
            raise ValueError(f"out is {given}; combine writes a contiguous {[tokens, hidden]} {y.dtype} on {y.device}")
        if out.requires_grad:
            raise ValueError("out requires a gradient, which combine does not give; give out.detach()")
        # Sums are written while other rows of y are still read, so they need memory of their own.
        shared = out.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and out.numel() > 0
        return out, torch.empty_like(out) if shared or out.data_ptr() % 16 else out


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """Contiguous, on the 16 bytes that bulk copies and vector accesses need: a view may begin anywhere."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t
