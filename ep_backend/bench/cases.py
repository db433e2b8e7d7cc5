"""A case's inputs, what dispatch and combine must make of them, and what must cross between ranks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ep_backend import layout
from ep_backend.bench.suites import Case
from ep_backend.fabric.host.core import quantize
from ep_backend.layout import Payload
from ep_backend.routing import make_routing, make_weights


@dataclass(slots=True)
class Inputs:
    """One rank's tensors, and every rank's expert ids."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    everyones_ids: list[NDArray[np.int64]]

    def hash(self) -> str:
        """Of all ranks' expert ids."""
        return hashlib.sha256(b"".join(i.tobytes() for i in self.everyones_ids)).hexdigest()[:12]


def draw(case: Case, rank: int, ranks: int, device: torch.device) -> Inputs:
    """The same on every start, on one kind of device."""
    everyones, weights = [], []
    for r in range(ranks):
        rng = np.random.default_rng((case.tokens, r))
        shape = {"tokens": case.tokens, "experts": case.experts, "top_k": case.top_k, "ranks": ranks}
        everyones.append(make_routing(case.routing, rng, **shape))
        weights.append(make_weights(rng, everyones[-1]))
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(case.tokens, case.hidden, generator=generator, device=device).to(torch.bfloat16)
    ids, mine = (torch.from_numpy(a[rank]).to(device) for a in (everyones, weights))
    return Inputs(x, ids, mine, everyones)


def expected(case: Case, inputs: Inputs) -> torch.Tensor:
    """Combine's result [T, H] in fp32 for experts that multiply by 1 + id / E; nothing but an FP8 cast is rounded."""
    x = inputs.x.float()
    if case.fp8:
        rows, scales = quantize(inputs.x, Payload.FP8)
        x = dequantized(rows, scales)
    return x * ((1.0 + inputs.ids.float() / case.experts) * inputs.weights).sum(1, keepdim=True)


def dequantized(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    groups = rows.float().reshape(*scales.shape, layout.SCALE_GROUP)
    return (groups * scales[..., None]).flatten(-2)


def crossing(case: Case, ids: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """[R, R] records that rank i must write for rank j in a dispatch; combine's are the transpose.

    One a token and rank that owns experts of it; over two hops one a node to the relay there, which has the sender's index,
    and from the relay one a rank.
    """
    ranks, gpus = len(ids), len(ids) // case.nodes
    records = np.zeros((ranks, ranks), np.int64)
    for source, picks in enumerate(ids):
        owners = np.zeros((len(picks), ranks), bool)
        np.put_along_axis(owners, picks // (case.experts // ranks), True, axis=1)
        if not case.two_hops:
            records[source] += owners.sum(0)
            continue
        for first in range(0, ranks, gpus):
            relay, node = first + source % gpus, slice(first, first + gpus)
            records[relay, node] += owners[:, node].sum(0)
            if relay != source:
                records[source, relay] += owners[:, node].any(1).sum()
    return records


def record_bytes(case: Case) -> dict[str, int]:
    """Of one record on a link, by operation."""
    payload = Payload.FP8 if case.fp8 else Payload.BF16
    return {
        "dispatch": layout.record(payload, case.hidden, case.top_k).bytes,
        "combine": layout.combine_record_bytes(payload, case.hidden),
    }


def predicted(case: Case, ids: list[NDArray[np.int64]], op: str) -> dict[str, Any]:
    """By the copy table: ``remote`` bytes each rank sends, and ``busiest_port``, most bytes in or out of a rank."""
    matrix = crossing(case, ids) if op == "dispatch" else crossing(case, ids).T
    remote = (matrix - np.diag(np.diag(matrix))) * record_bytes(case)[op]
    return {"remote": remote.sum(1).tolist(), "busiest_port": int(max(remote.sum(0).max(), remote.sum(1).max()))}
