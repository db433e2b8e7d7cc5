"""Expert choices for tests and benchmarks: what routers do on good days and on bad ones."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]


class _Kind(Protocol):
    def __call__(
        self,
        rng: np.random.Generator,
        tokens: int,
        experts: int,
        top_k: int,
        ranks: int,
        alpha: float,
    ) -> Ids: ...


def make_routing(
    kind: str,
    rng: np.random.Generator,
    *,
    tokens: int,
    experts: int,
    top_k: int,
    ranks: int,
    alpha: float = 1.0,
) -> Ids:
    """Expert ids [tokens, top_k] of one rank; -1 for no expert. ``alpha`` is zipf's exponent and holes' share of -1."""
    if kind not in KINDS:
        raise ValueError(f"routing {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    ids = KINDS[kind](rng, tokens, experts, top_k, ranks, alpha)
    return ids.astype(np.int64, copy=False).reshape(tokens, top_k)


def make_weights(rng: np.random.Generator, ids: Ids) -> Weights:
    """Positive weights [tokens, top_k] that sum to 1 over a token's experts; 0 where there is none."""
    weights = np.where(ids >= 0, rng.random(ids.shape) + 0.1, 0.0)
    total = weights.sum(axis=1, keepdims=True)
    shares: Weights = (weights / np.where(total > 0, total, 1.0)).astype(np.float32)
    return shares


def _pick(rng: np.random.Generator, logits: NDArray[np.float64], tokens: int, top_k: int) -> Ids:
    """top_k different experts a token with probabilities exp(logits) (Gumbel's trick), -1 when there are too few."""
    noisy = logits + rng.gumbel(size=(tokens, logits.size))
    noisy[:, ~np.isfinite(logits)] = -np.inf
    order = np.argsort(-noisy, axis=1)[:, :top_k]
    ids = np.full((tokens, top_k), -1, np.int64)
    ids[:, : order.shape[1]] = order
    usable = int(np.isfinite(logits).sum())
    ids[:, usable:] = -1
    return ids


def _only(experts: int, allowed: NDArray[Any]) -> NDArray[np.float64]:
    return np.where(allowed, np.zeros(experts), -np.inf)


def _uniform(rng: np.random.Generator, tokens: int, experts: int, top_k: int, ranks: int, alpha: float) -> Ids:
    return _pick(rng, np.zeros(experts), tokens, top_k)


def _zipf(rng: np.random.Generator, tokens: int, experts: int, top_k: int, ranks: int, alpha: float) -> Ids:
    # Every rank must agree on who is popular, so that order comes from a fixed seed.
    popularity = np.random.default_rng(experts).permutation(experts)
    return _pick(rng, -alpha * np.log1p(popularity.astype(np.float64)), tokens, top_k)


def _hot_rank(rng: np.random.Generator, tokens: int, experts: int, top_k: int, ranks: int, alpha: float) -> Ids:
    return _pick(rng, _only(experts, np.arange(experts) < experts // ranks), tokens, top_k)


def _empty_ranks(rng: np.random.Generator, tokens: int, experts: int, top_k: int, ranks: int, alpha: float) -> Ids:
    owner = np.arange(experts) // (experts // ranks)
    return _pick(rng, _only(experts, owner % 2 == 0), tokens, top_k)


def _none(rng: np.random.Generator, tokens: int, experts: int, top_k: int, ranks: int, alpha: float) -> Ids:
    return np.full((tokens, top_k), -1, np.int64)


def _holes(rng: np.random.Generator, tokens: int, experts: int, top_k: int, ranks: int, alpha: float) -> Ids:
    ids = _uniform(rng, tokens, experts, top_k, ranks, alpha)
    return np.where(rng.random(ids.shape) < min(alpha, 1.0) / 2, -1, ids)


def _duplicates(rng: np.random.Generator, tokens: int, experts: int, top_k: int, ranks: int, alpha: float) -> Ids:
    few = rng.integers(0, experts, size=(tokens, max(1, top_k // 2)))
    return np.take_along_axis(few, rng.integers(0, few.shape[1], size=(tokens, top_k)), axis=1)


KINDS: dict[str, _Kind] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "hot_rank": _hot_rank,  # every token to rank 0, the others receive nothing
    "empty_ranks": _empty_ranks,  # odd ranks receive nothing
    "holes": _holes,  # some -1 in any slot
    "none": _none,  # all -1
    "duplicates": _duplicates,  # sampled with replacement
}
