"""A MoE layer of DeepSeek-V3's shape for tests of engines' real experts: weights, routing, exact results, allowed error.

Error. Both layers, the one over several ranks and the engine's own in one process, are measured against the same experts in
fp32. Between the ranks nothing may get lost but what rounding to bf16 costs: a token's sum over one rank's experts is rounded
before it crosses, and the sum over ranks once more, each at most half a unit in the last place, 2**-9 of the value. So the
batch's relative distance to the exact result (Frobenius norm) may exceed that of the one-process layer by the spread that two
quantisations of the same kind have among each other, taken as a quarter, and by 2**-8.

Beside it no token may be far from the one-process layer's. In bf16 each side rounds a pick's row, a partial sum and the sum:
sqrt(6) roundings of 2**-9 / sqrt(3) are 0.003, and twice that for the activations between the products; allowed are 2**-6. In
FP8 (e4m3, a step of 2**-3) a side is 0.045 of the norm off: rounding costs 0.026, and it happens to the factors gate and up and
to their product. Both sides round, by other kernels with other scales (powers of two, or not): sqrt(2) * 0.045 = 0.064; allowed
are 2**-3. A pick that got lost or counted twice moves a token by 0.18 of its norm at least: routing weights differ by no more
than a factor of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import silu

from tests.core.pool import World

BLOCK = 128
E4M3_MAX = 448.0
TOKENS = [(0, 1, 7, 128), (512, 0, 128, 7), (128, 512, 1, 0), (7, 7, 512, 512), (1, 0, 0, 0)]
"""Rows of each rank, batch by batch. Every rank receives some; NOTHING is a batch of which none does."""
NOTHING = (0, 0, 0, 0)


@dataclass(frozen=True)
class Shape:
    """``limit``: most tokens a rank dispatches."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    limit: int


DEEPSEEK_V3 = Shape(hidden=7168, inner=2048, experts=32, top_k=8, limit=512)
"""All but the number of experts, 256 there: four processes hold them all, for each also computes what one process answers."""


@dataclass(frozen=True)
class Weights:
    """``w13`` [E, 2 I, H], gate before up, and ``w2`` [E, H, I]; bf16, or e4m3 with a scale for each 128 x 128 block.

    Scales are powers of two, so that an engine that wants them so changes no weight.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None

    @classmethod
    def make(cls, shape: Shape, fp8: bool, device: torch.device) -> Weights:
        """The same on every rank."""
        g = torch.Generator(device).manual_seed(7)
        made = []
        for rows, columns in ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)):
            each = [_random(rows, columns, g, device) for _ in range(shape.experts)]
            made.append(tuple(map(torch.stack, zip(*map(_quantised, each), strict=True))) if fp8 else (torch.stack(each), None))
        (w13, w13_scale), (w2, w2_scale) = made
        return cls(w13, w2, w13_scale, w2_scale)

    def of_rank(self, rank: int, size: int) -> Weights:
        """Those of its experts, as tensors of their own: engines change what they are given."""
        here = slice(rank * len(self.w13) // size, (rank + 1) * len(self.w13) // size)
        return Weights(*(None if t is None else t[here].clone() for t in (self.w13, self.w2, self.w13_scale, self.w2_scale)))

    def expert(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both matrices in fp32."""
        pairs = (self.w13, self.w13_scale), (self.w2, self.w2_scale)
        first, second = (w[number].float() if s is None else _dequantised(w[number], s[number]) for w, s in pairs)
        return first, second


@dataclass
class Batch:
    """``x`` [T, H] bf16, ``ids`` [T, K] int32 with -1 for no expert, ``weights`` [T, K] fp32."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, seed: int, tokens: int, device: torch.device) -> Batch:
        """The first token goes to every rank, and nothing is dropped of it."""
        g = torch.Generator().manual_seed(seed)
        ids = torch.rand(tokens, shape.experts, generator=g).argsort(1)[:, : shape.top_k].int()
        ids[torch.rand(ids.shape, generator=g) < 0.05] = -1
        spread = shape.experts // shape.top_k
        ids[:1] = torch.arange(shape.top_k, dtype=torch.int32) * spread + seed % spread
        weights = torch.rand(tokens, shape.top_k, generator=g) / 2 + 0.5
        x = torch.randn(tokens, shape.hidden, generator=g).bfloat16()
        return cls(x.to(device), ids.to(device), (weights / weights.sum(1, keepdim=True)).to(device))

    def without_holes(self) -> Batch:
        """The same sums for experts that know no -1."""
        return replace(self, ids=self.ids.clamp(min=0), weights=torch.where(self.ids < 0, 0.0, self.weights))

    def refill(self, batch: Batch) -> None:
        """Become that batch, in place, with rows of nothing behind it: what a CUDA graph of these rows replays."""
        more = len(self.x) - len(batch.x)
        self.x.copy_(torch.cat([batch.x, batch.x.new_zeros(more, batch.x.size(1))]))
        self.ids.copy_(torch.cat([batch.ids, batch.ids.new_full((more, batch.ids.size(1)), -1)]))
        self.weights.copy_(torch.cat([batch.weights, batch.weights.new_zeros(more, batch.weights.size(1))]))


_weights: dict[tuple[Shape, bool], Weights] = {}


def weights(world: World, shape: Shape, fp8: bool) -> Weights:
    """Of all experts, kept between tests."""
    key = (shape, fp8)
    if key not in _weights:
        _weights[key] = Weights.make(shape, fp8, world.device)
    return _weights[key]


def exact(weights: Weights, batch: Batch) -> torch.Tensor:
    """[T, H] in fp32, by all experts in one process."""
    out = torch.zeros(batch.x.shape, device=batch.x.device)
    for number in range(len(weights.w13)):
        token, pick = (batch.ids == number).nonzero(as_tuple=True)
        if len(token):
            w13, w2 = weights.expert(number)
            gate, up = (batch.x[token].float() @ w13.t()).chunk(2, -1)
            out.index_add_(0, token, batch.weights[token, pick, None] * ((silu(gate) * up) @ w2.t()))
    return out


def check(got: torch.Tensor, one_process: torch.Tensor, truth: torch.Tensor, fp8: bool) -> float:
    """AssertionError unless the error is what this module allows; the batch's distance to the exact result."""
    assert got.shape == truth.shape and got.dtype == torch.bfloat16, (got.shape, got.dtype)
    if not len(got):
        return 0.0
    assert got.isfinite().all(), f"{int((~got.isfinite()).any(1).sum())} of {len(got)} tokens are not finite"
    ours, theirs = (float((out.float() - truth).norm() / truth.norm()) for out in (got, one_process))
    allowed = 2**-3 if fp8 else 2**-6
    assert theirs <= allowed, f"one process lost {theirs:.5f} of the exact result's norm itself, so it proves nothing"
    assert ours <= 1.25 * theirs + 2**-8, f"{ours:.5f} of the exact result's norm lost, by one process {theirs:.5f}"
    off = (got.float() - one_process.float()).norm(dim=1) / truth.norm(dim=1)
    worst = int(off.argmax())
    assert off[worst] <= allowed, f"token {worst} of {len(got)} is {float(off[worst]):.5f} of its norm off"
    return ours


def picks_of(shape: Shape, seeds: list[int], tokens: list[int], rank: int) -> torch.Tensor:
    """[e]: rows that the rank's experts get from all ranks' batches of those seeds and sizes."""
    ids = torch.cat([Batch.make(shape, s, t, torch.device("cpu")).ids for s, t in zip(seeds, tokens, strict=True)])
    local = shape.experts // len(seeds)
    return torch.bincount(ids[ids >= 0].flatten(), minlength=shape.experts)[rank * local : (rank + 1) * local]


def _random(rows: int, columns: int, g: torch.Generator, device: torch.device) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=g, device=device) / columns**0.5).bfloat16()


def _quantised(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = w.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = torch.exp2(torch.log2(blocks.abs().amax((1, 3)) / E4M3_MAX).ceil())
    return (blocks / scale[:, None, :, None]).view(w.shape).to(torch.float8_e4m3fn), scale


def _dequantised(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return w.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
