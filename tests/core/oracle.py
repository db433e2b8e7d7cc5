"""What every rank must receive and get back, computed from the inputs of all ranks without any communication.

A :class:`Case` holds those inputs (the same on every rank, from a seed): what an all-gather in fp32 would bring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ep_backend import routing

E4M3_MAX = 448.0
BF16_HALF_ULP = 2.0**-8  # relative, at most
PAYLOADS = ("bf16", "fp32", "fp8", "fp8_ue8m0")  # rows as the caller gives them
CASTS = {"fp8_cast": "fp32", "fp8_ue8m0_cast": "ue8m0"}  # bf16 rows, cast by dispatch


@dataclass
class Case:
    """Inputs of one call on all ranks."""

    experts: int
    top_k: int
    hidden: int
    x: list[torch.Tensor]  # fp32, bf16-representable
    ids: list[torch.Tensor]  # int64
    weights: list[torch.Tensor]

    @property
    def ranks(self) -> int:
        return len(self.x)

    @property
    def local(self) -> int:
        return self.experts // self.ranks

    def owner(self, ids: torch.Tensor) -> torch.Tensor:
        """Rank of each pick, -1 for none."""
        return torch.where(ids >= 0, ids // self.local, -1)


def make_case(
    seed: int,
    tokens: list[int],
    *,
    kind: str = "uniform",
    experts: int = 24,
    top_k: int = 4,
    hidden: int = 256,
) -> Case:
    """``tokens`` by rank. Weights where there is no expert are garbage that must not be used."""
    rng = np.random.default_rng(seed)
    x, ids, weights = [], [], []
    for count in tokens:
        picks = routing.make_routing(kind, rng, tokens=count, experts=experts, top_k=top_k, ranks=len(tokens))
        w = np.where(picks >= 0, routing.make_weights(rng, picks), np.float32(7e8))
        values = torch.from_numpy(rng.standard_normal((count, hidden), np.float32))
        x.append(values.bfloat16().float())
        ids.append(torch.from_numpy(picks))
        weights.append(torch.from_numpy(w.astype(np.float32)))
    return Case(experts, top_k, hidden, x, ids, weights)


def quantise(x: torch.Tensor, payload: str) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 rows and their scales for every 128 channels: fp32, or exponents packed four to an int32."""
    groups = x.float().unflatten(1, (-1, 128))
    scale = groups.abs().amax(2).clamp_min(1e-4) / E4M3_MAX
    if payload == "fp8_ue8m0":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    rows = (groups / scale[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
    if payload == "fp8":
        return rows, scale
    exponents = (torch.log2(scale).round().int() + 127).numpy().astype(np.uint8)
    packed = np.zeros((len(x), -(-exponents.shape[1] // 4) * 4), np.uint8)
    packed[:, : exponents.shape[1]] = exponents
    return rows, torch.from_numpy(packed.view(np.int32))


def unpack(scales: torch.Tensor, groups: int) -> torch.Tensor:
    """fp32 scales [N, groups] of either format."""
    if scales.dtype == torch.float32:
        return scales
    flat = np.ascontiguousarray(scales.numpy()).view(np.uint8)[:, :groups]
    return torch.from_numpy(np.exp2(flat.astype(np.float32) - 127))


def dequantise(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return rows.float()
    groups = rows.float().unflatten(1, (-1, 128))
    return (groups * unpack(scales, groups.shape[1])[:, :, None]).flatten(1)


def wire(x: torch.Tensor, payload: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What rows of ``payload`` hold for ``x``."""
    base = payload.removesuffix("_cast")
    if base in ("fp8", "fp8_ue8m0"):
        return quantise(x, base)
    return (x.bfloat16() if base == "bf16" else x), None


def given(x: torch.Tensor, payload: str) -> tuple[Any, dict[str, Any]]:
    """dispatch's x and keyword arguments for ``payload``."""
    if payload in CASTS:
        return x.bfloat16(), {"fp8": CASTS[payload]}
    rows, scales = wire(x, payload)
    return (rows if scales is None else (rows, scales)), {}


def expert(e: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Each expert is another affine map; ``e`` [N] global ids, ``x`` [N, H] fp32."""
    slope = 1.0 + (e % 11).float() / 8
    offset = (e % 7).float() / 4 - 0.75
    return x * slope[:, None] + offset[:, None]


def answer_dtype(payload: str) -> torch.dtype:
    return torch.float32 if payload == "fp32" else torch.bfloat16


def check_dispatch(case: Case, rank: int, got: Any, *, layout: str, payload: str, max_tokens: int) -> None:
    """Rows are copies of what was sent; ids, weights and counts are exact."""
    first = rank * case.local
    if layout == "compact":
        _check_compact(case, rank, got, payload, max_tokens)
        return
    height = case.ranks * max_tokens
    assert tuple(got.rows.shape) == (case.local, height, case.hidden), got.rows.shape
    assert got.topk_ids is None and got.topk_weights is None
    if got.scales is not None:
        assert got.scales.shape[:2] == got.rows.shape[:2], got.scales.shape
        assert got.scales.stride(1) == 1, f"scales are not column-major: {got.scales.stride()}"
        assert got.scales.shape[2] == 1 or got.scales.stride(2) % 4 == 0, got.scales.stride()
    counts = got.counts.cpu()
    for e in range(case.local):
        mine = [(ids == first + e).any(1) for ids in case.ids]
        sent = torch.cat([x[m] for x, m in zip(case.x, mine, strict=True)])
        count = int(counts[e])
        assert count == len(sent), f"expert {first + e}: count {count}, expected {len(sent)}"
        scales = got.scales[e, :count].cpu() if got.scales is not None else None
        check_rows(sent, got.rows[e, :count].cpu(), scales, payload, ordered=False)


def _check_compact(case: Case, rank: int, got: Any, payload: str, max_tokens: int) -> None:
    first = rank * case.local
    picks = [torch.where(case.owner(i) == rank, i - first, -1) for i in case.ids]
    here = [(p >= 0).any(1) for p in picks]
    ids = torch.cat([p[h] for p, h in zip(picks, here, strict=True)])
    weights = torch.cat([w[h] for w, h in zip(case.weights, here, strict=True)])
    weights = torch.where(ids >= 0, weights, 0.0)
    sent = torch.cat([x[h] for x, h in zip(case.x, here, strict=True)])
    n = len(sent)
    if got.num_rows is None:
        assert got.rows.shape[0] == case.ranks * max_tokens, got.rows.shape
        assert (got.topk_ids[n:] == -1).all(), "ids behind the last row"
        assert (got.topk_weights[n:] == 0).all(), "weights behind the last row"
    else:
        assert got.num_rows == n == got.rows.shape[0], (got.num_rows, n, got.rows.shape)
    assert got.topk_ids.dtype == torch.int32 and got.topk_weights.dtype == torch.float32
    assert torch.equal(got.topk_ids[:n].cpu().long(), ids), "local expert ids"
    assert torch.equal(got.topk_weights[:n].cpu(), weights), "weights"
    want = torch.bincount(ids[ids >= 0], minlength=case.local)
    assert torch.equal(got.counts.cpu().long(), want), f"counts {got.counts}, expected {want}"
    scales = got.scales[:n].cpu() if got.scales is not None else None
    check_rows(sent, got.rows[:n].cpu(), scales, payload, ordered=True)


def check_rows(
    sent: torch.Tensor,
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    payload: str,
    *,
    ordered: bool,
) -> None:
    """``rows`` are ``sent`` on the wire: bit for bit, or within half an e4m3 ulp if dispatch made the cast."""
    if payload in CASTS:
        assert scales is not None
        _check_cast(sent, rows, scales, payload, ordered)
        return
    want_rows, want_scales = wire(sent, payload)
    want, have = _bytes(want_rows, want_scales), _bytes(rows, scales)
    if not ordered:
        want, have = _sorted(want), _sorted(have)
    assert want.shape == have.shape and (want == have).all(), f"rows differ from what was sent ({payload})"


def _bytes(rows: torch.Tensor, scales: torch.Tensor | None) -> np.ndarray[Any, Any]:
    parts = [rows.contiguous().view(torch.uint8).numpy()]
    if scales is not None:
        # One column-major row counts as contiguous, but does not have the strides of one.
        packed = scales.clone(memory_format=torch.contiguous_format)
        parts.append(packed.view(torch.uint8).numpy())
    return np.concatenate(parts, axis=1)


def _sorted(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return rows[np.lexsort(rows.T[:16])] if len(rows) else rows


def _check_cast(sent: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor, payload: str, ordered: bool) -> None:
    values = dequantise(rows, scales)
    if not ordered and len(sent):
        nearest = torch.cdist(values, sent).argmin(1)
        assert len(set(nearest.tolist())) == len(sent), "a row arrived twice"
        sent = sent[nearest]
    groups = sent.unflatten(1, (-1, 128))
    scale = unpack(scales, groups.shape[1])
    ideal = groups.abs().amax(2).clamp_min(1e-4) / E4M3_MAX
    ratio = scale / ideal
    if payload == "fp8_cast":
        assert ((ratio - 1).abs() < 1e-5).all(), "scale is not amax / 448"
    else:
        assert ((ratio > 1 - 1e-5) & (ratio < 2 + 1e-5)).all(), "scale is not the next power of two"
    half_ulp = torch.maximum(groups.abs() * 2**-4, scale[:, :, None] * 2**-10)
    off = (values.unflatten(1, (-1, 128)) - groups).abs()
    assert (off <= half_ulp * 1.001).all(), "cast is off by more than half an e4m3 ulp"


def run_experts(case: Case, rank: int, got: Any, *, layout: str, payload: str) -> torch.Tensor:
    """What the engine's experts make of a dispatch. Rows that hold no token become NaN."""
    first = rank * case.local
    dtype = answer_dtype(payload)
    rows, device = got.rows, got.rows.device
    y = torch.full(rows.shape, float("nan"), dtype=dtype)
    scales = got.scales.cpu() if got.scales is not None else None
    rows = rows.cpu()
    if layout == "masked":
        for e, count in enumerate(got.counts.tolist()):
            values = dequantise(rows[e, :count], scales[e, :count] if scales is not None else None)
            y[e, :count] = expert(torch.full((count,), first + e), values).to(dtype)
        return y.to(device)
    ids, weights = got.topk_ids.cpu().long(), got.topk_weights.cpu()
    live = (ids >= 0).any(1)
    values = dequantise(rows[live], scales[live] if scales is not None else None)
    total = torch.zeros_like(values)
    for k in range(case.top_k):
        part = weights[live, k, None] * expert(ids[live, k] + first, values)
        total += torch.where(ids[live, k, None] >= 0, part, 0.0)
    y[live] = total.to(dtype)
    return y.to(device)


def check_combine(
    case: Case,
    rank: int,
    out: torch.Tensor,
    *,
    layout: str,
    payload: str,
    nodes: int = 1,
    per_expert: bool = False,
) -> None:
    """``out`` is the weighted sum within half an ulp of each partial that crosses a link and of the result.

    ``nodes``: how many nodes two hops span, each with its own partials. ``per_expert``: every expert's row crosses.
    """
    ids, weights = case.ids[rank], case.weights[rank].double()
    sent = dequantise(*wire(case.x[rank], payload))
    shape = (case.ranks, len(ids), case.hidden)
    partial = torch.zeros(shape, dtype=torch.float64)
    crossing = torch.zeros(shape[1:], dtype=torch.float64)
    size = torch.zeros_like(crossing)
    slack = torch.zeros_like(crossing)
    dtype = answer_dtype(payload)
    for k in range(case.top_k):
        live = ids[:, k] >= 0
        e = ids[live, k]
        y = expert(e, sent[live])
        # An unweighted row is rounded by the engine, before combine sees it.
        term = (y.to(dtype) if layout == "masked" else y).double() * weights[live, k, None]
        partial[case.owner(e), live.nonzero()[:, 0]] += term
        size[live] += term.abs()
        if payload in CASTS:  # another rounding of ties than the oracle's
            slack[live] += (2**-3 * sent[live].abs() + 1e-4) * weights[live, k, None] * 2.5
            if layout == "masked":  # and the engine then rounds a small value's row to the next number
                slack[live] += 2 * BF16_HALF_ULP * y.abs() * weights[live, k, None]
    want = partial.sum(0)
    if dtype == torch.float32:
        bound = 1e-6 * size.clamp_min(1.0)
    else:
        crossing = size if per_expert else partial.abs().sum(0)
        if nodes > 1:
            crossing = crossing + partial.unflatten(0, (nodes, -1)).sum(1).abs().sum(0)
        bound = BF16_HALF_ULP * (crossing + want.abs()) * 1.01 + 1e-6 * size + slack
    assert out.shape == want.shape and out.dtype == dtype, (out.shape, out.dtype)
    off = (out.cpu().double() - want).abs()
    wrong = ~(off <= bound)  # NaN is wrong
    assert not wrong.any(), (
        f"{int(wrong.any(1).sum())} of {len(out)} tokens are off, "
        f"first {int(wrong.any(1).nonzero()[0, 0])}, by up to {float(off.nan_to_num(1e30).max()):.3g}"
    )
