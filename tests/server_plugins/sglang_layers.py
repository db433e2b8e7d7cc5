"""MoE layers of the SGLang adapter in test workers, and the same MoE computed by one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.dp_attention import set_is_extend_in_batch
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import DeepEPMode
from sglang.srt.runtime_context import SpawnRanks, get_flags, publish
from sglang.srt.server_args import ServerArgs
from torch.nn.functional import silu

from ep_backend.modes import Family
from ep_backend.policy import AUTO, Role
from ep_backend.settings import Settings
from server_plugins.sglang.dispatcher import EpDispatcher, EpTboDispatcher
from server_plugins.sglang.plan import Plan
from server_plugins.sglang.runtime import Runtime
from tests.core.pool import World
from tests.server_plugins.sglang_cpu import experts

HIDDEN, INNER, EXPERTS, TOP_K, LIMIT = 640, 32, 12, 4, 12
W13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=torch.Generator().manual_seed(1)) / 16
W2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=torch.Generator().manual_seed(2)) / 16
FAMILY = {"normal": "prefill", "direct": "prefill", "low_latency": "decode", "hybrid": "decode"}
DEEPEP = {("prefill",): DeepEPMode.NORMAL, ("decode",): DeepEPMode.LOW_LATENCY}


@dataclass
class Batch:
    """One rank's tokens and their routing."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor = field(init=False)

    @classmethod
    def make(cls, seed: int, tokens: int, dtype: torch.dtype = torch.float32) -> Batch:
        g = torch.Generator().manual_seed(seed)
        picks = [torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(tokens)]
        ids = torch.stack(picks) if picks else torch.zeros(0, TOP_K)
        ids = ids.int()
        ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
        return cls(torch.randn(tokens, HIDDEN, generator=g).to(dtype), ids, torch.rand(tokens, TOP_K, generator=g))

    @property
    def routing(self) -> StandardTopKOutput:
        return StandardTopKOutput(self.weights, self.ids, None)

    def expected(self) -> torch.Tensor:
        """In fp32, by one process that has all experts."""
        out = torch.zeros(len(self.x), HIDDEN)
        for t, (ids, weights) in enumerate(zip(self.ids.tolist(), self.weights.tolist(), strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                if expert >= 0:
                    gate, up = (self.x[t].float() @ W13[expert].t()).chunk(2, -1)
                    out[t] += weight * ((silu(gate) * up) @ W2[expert].t())
        return out


class Layer:
    """Dispatcher and experts of one rank's MoE layer, in SGLang's steps."""

    def __init__(
        self,
        world: World,
        families: tuple[str, ...],
        max_tokens: dict[str, int],
        *,
        lanes: int = 1,
        gpus_per_node: int | None = None,
        dtype: torch.dtype = torch.float32,
        mode: str = AUTO,
    ) -> None:
        _publish(families)
        plan = Plan.model_validate(
            {
                "role": Role.UNIFIED if len(families) > 1 else Role(families[0]),
                "families": families,
                "capacity": max_tokens,
                "tokens": dict.fromkeys(families, LIMIT),
                "lanes": lanes,
                "ranks": world.size,
                "gpus_per_node": gpus_per_node or world.size,
                "decode_graphs": False,
                "fabric": "host",
            }
        )
        self.runtime = Runtime(plan, Settings.model_validate({"mode": mode, "timeout_s": 30.0}), world.group)
        local = EXPERTS // world.size
        config = SimpleNamespace(
            num_experts=EXPERTS,
            num_local_experts=local,
            hidden_size=HIDDEN,
            top_k=TOP_K,
            params_dtype=dtype,
            runner_backend=None,
        )
        self.dispatcher = EpTboDispatcher(config, self.runtime)
        mine = slice(world.rank * local, (world.rank + 1) * local)
        self.weights = SimpleNamespace(w13_weight=W13[mine].to(dtype), w2_weight=W2[mine].to(dtype))
        self.forward(families[0])

    def __enter__(self) -> Layer:
        self.runtime.allocate()
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.destroy()

    @property
    def inner(self) -> EpDispatcher:
        return self.dispatcher._inners[0]

    @property
    def counted(self) -> dict[str, Any]:
        return self.runtime.status()["modes"]

    def forward(self, family: str) -> None:
        """The forward mode that SGLang agreed on for the next batch."""
        set_is_extend_in_batch(Family(family) is Family.PREFILL)

    def run(self, b: Batch) -> None:
        """One whole layer, without overlap."""
        b.out = self.dispatcher.combine(
            combine_input=experts(self.weights, self.dispatcher.dispatch(hidden_states=b.x, topk_output=b.routing))
        )

    def check(self, b: Batch, tolerance: float = 1e-5) -> None:
        torch.testing.assert_close(b.out.float(), b.expected(), rtol=tolerance, atol=tolerance)


def layer(world: World, mode: str, **more: Any) -> Layer:
    """One that runs this mode in every batch."""
    return Layer(world, (FAMILY[mode],), {mode: LIMIT}, mode=mode, **more)


def _publish(families: tuple[str, ...]) -> None:
    """What a scheduler knows when its layers are built."""
    global _published
    if not _published:
        publish(ServerArgs(model_path="dummy"), role="test", ranks=SpawnRanks(world_rank=0))
        _published = True
    get_flags().moe.deepep_mode = DEEPEP.get(families, DeepEPMode.AUTO)


_published = False
