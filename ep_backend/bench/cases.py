"""A case's inputs, and a plain reference."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from ep_backend.bench.suites import Case


@dataclass(slots=True)
class Inputs:
    """Every rank's; ranks draw the same numbers, so that each can check the whole."""

    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]

    def hash(self) -> str:
        h = hashlib.sha256()
        for i in self.ids:
            h.update(i.numpy().tobytes())
        return h.hexdigest()[:12]


def draw(case: Case, ranks: int, seed: int = 0) -> Inputs:
    """On the CPU. Routing: "uniform", "zipf" (exponent 1 over the experts), "hot" (half of all picks on rank 0's experts)."""
    g = torch.Generator().manual_seed(seed)
    popularity = torch.ones(case.experts)
    if case.routing == "zipf":
        popularity = 1.0 / torch.arange(1, case.experts + 1)
    elif case.routing == "hot":
        popularity[: case.experts // ranks] *= ranks - 1
    elif case.routing != "uniform":
        raise ValueError(f"routing {case.routing!r} is unknown; choose uniform, zipf or hot")
    inputs = Inputs([], [], [])
    for _ in range(ranks):
        inputs.x.append(torch.randn(case.tokens, case.hidden, generator=g).to(torch.bfloat16))
        odds = popularity.expand(case.tokens, -1)
        inputs.ids.append(torch.multinomial(odds, case.top_k, generator=g).to(torch.int64))
        inputs.weights.append(torch.rand(case.tokens, case.top_k, generator=g) + 0.1)
    return inputs


def expected(case: Case, inputs: Inputs, rank: int) -> torch.Tensor:
    """Combine's result for experts that multiply by 1 + id / E, in fp32, without any rounding on the way."""
    factor = 1.0 + inputs.ids[rank].float() / case.experts
    return inputs.x[rank].float() * (factor * inputs.weights[rank]).sum(1, keepdim=True)
