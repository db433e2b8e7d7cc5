"""The routing simulation that was published for node-limited routing: which experts tokens pick, and what they then send."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


def pick(scores: NDArray[np.floating[Any]], top_k: int, groups: int = 1, top_groups: int = 1) -> NDArray[np.integer[Any]]:
    """The `top_k` best experts of each row, inside the row's best groups; a group's score is the sum of its two best."""
    tokens, experts = scores.shape
    if top_groups < groups:
        grouped = scores.reshape(tokens, groups, experts // groups)
        strength = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
        keep = np.argpartition(-strength, top_groups - 1, axis=1)[:, :top_groups]
        allowed = np.zeros((tokens, groups), dtype=bool)
        np.put_along_axis(allowed, keep, True, axis=1)
        scores = np.where(np.repeat(allowed, experts // groups, axis=1), scores, -np.inf)
    return np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]


class Crossing(NamedTuple):
    """Mean records a token sends to other nodes if duplicates are removed per expert (not at all), per GPU or per node; and its
    distinct nodes, its own among them."""

    per_expert: float
    per_gpu: float
    per_node: float
    nodes: float


def crossing(ids: NDArray[np.integer[Any]], experts: int, ranks: int, nodes: int, source: int = 0) -> Crossing:
    """Of tokens ([T, K] expert ids) that are all of one node, the source."""
    sent = []
    for row in ids.tolist():
        gpus, on = ({expert * places // experts for expert in row} for places in (ranks, nodes))
        picks = sum(expert * nodes // experts != source for expert in row)
        sent.append((picks, sum(gpu * nodes // ranks != source for gpu in gpus), len(on - {source}), len(on)))
    return Crossing(*np.mean(sent, axis=0).tolist())
