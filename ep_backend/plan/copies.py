"""How many records one token sends: expectations over the routing, by where duplicates are removed.

Closed forms for uniform and group-limited routing; a measured histogram of expert load is sampled with a fixed seed.
Experts lie in order: rank r holds experts r*E/R to (r+1)*E/R - 1, and node n the ranks n*R/N to (n+1)*R/N - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SAMPLES = 4096
SEED = 0


@dataclass(frozen=True, slots=True)
class Copies:
    """Distinct destinations of one token (its own rank and node among them), as expectations.

    The two skews are the busiest GPU's (node's) share of the records over the mean, at least 1: its port sets the pace.
    """

    experts: float
    gpus: float
    nodes: float
    gpu_skew: float = 1.0
    node_skew: float = 1.0


def miss(total: int, own: int, picks: int) -> float:
    """Probability that no one of `picks` distinct experts out of `total` is one of `own`: C(total-own, K) / C(total, K)."""
    return comb(total - own, picks) / comb(total, picks)


def uniform(experts: int, top_k: int, ranks: int, nodes: int) -> Copies:
    """Every set of `top_k` experts equally likely: n * (1 - C(E - E/n, K) / C(E, K)) distinct places out of n.

    The formula that DeepEP's `get_theoretical_num_sms` uses (deep_ep/buffers/elastic.py).
    """
    return Copies(
        top_k,
        ranks * (1 - miss(experts, experts // ranks, top_k)),
        nodes * (1 - miss(experts, experts // nodes, top_k)),
    )


def group_limited(experts: int, top_k: int, ranks: int, nodes: int, groups: int, top_groups: int) -> Copies:
    """`top_groups` of `groups` equal groups are chosen uniformly, then `top_k` experts uniformly inside them."""
    return Copies(
        top_k,
        _limited_places(experts, top_k, ranks, groups, top_groups),
        _limited_places(experts, top_k, nodes, groups, top_groups),
    )


def exactly(experts: int, top_k: int, ranks: int, nodes: int, nodes_per_token: float) -> Copies:
    """A measured mean of distinct nodes a token; its picks are spread uniformly over the GPUs of as many nodes."""
    per_node = experts // nodes
    chosen = min(round(nodes_per_token * per_node), experts)
    gpus_of_chosen = ranks * nodes_per_token / nodes
    within = miss(max(chosen, top_k), min(experts // ranks, chosen), min(top_k, chosen))
    return Copies(top_k, min(gpus_of_chosen * (1 - within), top_k), nodes_per_token)


def measured(counts: Sequence[Sequence[float]], top_k: int, ranks: int, nodes: int) -> Copies:
    """Copies for a histogram of expert load, one row a layer: the mean over the layers of `SAMPLES` sampled tokens each.

    A token's experts are drawn without replacement in proportion to the counts (Gumbel's top-k trick).
    """
    import numpy as np

    rng = np.random.default_rng(SEED)
    layers = []
    for row in counts:
        weights = np.asarray(row, dtype=np.float64)
        with np.errstate(divide="ignore"):
            scores = np.log(weights) + rng.gumbel(size=(SAMPLES, weights.size))
        best = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
        layers.append(_counted(best, weights.size, ranks, nodes))
    means = np.mean([(c.gpus, c.nodes, c.gpu_skew, c.node_skew) for c in layers], axis=0)
    return Copies(top_k, *map(float, means))


def _counted(ids: NDArray[np.integer[Any]], experts: int, ranks: int, nodes: int) -> Copies:
    gpus, by_node = (_hits(ids, experts // places, places).mean(axis=0) for places in (ranks, nodes))
    return Copies(ids.shape[1], float(gpus.sum()), float(by_node.sum()), *(float(p.max() / p.mean()) for p in (gpus, by_node)))


def _hits(ids: NDArray[np.integer[Any]], experts_a_place: int, places: int) -> NDArray[np.bool_]:
    """Which places each token goes to: [T, places]."""
    import numpy as np

    hits = np.zeros((len(ids), places), dtype=bool)
    np.put_along_axis(hits, ids // experts_a_place, True, axis=1)
    return hits


def _limited_places(experts: int, top_k: int, places: int, groups: int, top_groups: int) -> float:
    """Distinct places of a token under the group limit. A place is a part of one group, or some whole groups."""
    per_group, per_place = experts // groups, experts // places
    allowed = top_groups * per_group
    if per_place <= per_group:
        return places * top_groups / groups * (1 - miss(allowed, per_place, top_k))
    held = groups // places
    hit = sum(
        comb(held, chosen)
        * comb(groups - held, top_groups - chosen)
        / comb(groups, top_groups)
        * (1 - miss(allowed, chosen * per_group, top_k))
        for chosen in range(1, min(held, top_groups) + 1)
    )
    return places * hit
