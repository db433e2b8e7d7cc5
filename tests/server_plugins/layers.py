"""MoE layers of the vLLM adapter in test workers, and the same MoE computed by one process."""

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch.nn.functional import silu
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

from ep_backend.modes import Family, Layout
from ep_backend.policy import Role, family_of
from ep_backend.settings import Settings
from server_plugins.vllm.choice import Choice
from server_plugins.vllm.cpu_experts import CPUBatchedExperts
from server_plugins.vllm.manager import EpManager
from server_plugins.vllm.prepare_finalize import EpBatched, EpStandard
from tests.core.pool import World

HIDDEN, INNER, EXPERTS, TOP_K, LIMIT = 256, 32, 12, 4, 12
W1 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=torch.Generator().manual_seed(1)) / 16
W2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=torch.Generator().manual_seed(2)) / 16


class Manager(EpManager):
    """As in a worker, but without vLLM's groups; the test sets lane and mode."""

    lane = 0

    def __init__(self, world: World, settings: Settings, lanes: int) -> None:
        role = settings.role or Role.UNIFIED
        family = family_of(role, settings.mode)
        layout = settings.layout or (Layout.MASKED if family is Family.DECODE else Layout.COMPACT)
        self.choice = Choice(settings, role, settings.mode, family, lanes, layout)
        self.flip = SimpleNamespace(mode=settings.mode, state=lambda: {"mode": str(settings.mode)})
        self.sms = None
        self.cpu_group, self.rank, self.world_size = world.group, world.rank, world.size
        self.gpus_per_node = settings.gpus_per_node or world.size
        self.buffers: list[Any] = []
        self._by_shape: dict[Any, Any] = {}
        self._fallbacks: Counter[str] = Counter()


@dataclass
class Batch:
    """One rank's tokens and their routing."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor = field(init=False)

    @classmethod
    def make(cls, seed: int, tokens: int, dtype: torch.dtype = torch.float32, top_k: int = TOP_K) -> "Batch":
        g = torch.Generator().manual_seed(seed)
        ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:top_k] for _ in range(tokens)] or [torch.zeros(top_k)])
        ids = ids[:tokens].int()
        ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
        return cls(torch.randn(tokens, HIDDEN, generator=g).to(dtype), ids, torch.rand(tokens, top_k, generator=g))

    def expected(self, weights_on_input: bool = False) -> torch.Tensor:
        out = torch.zeros(len(self.x), HIDDEN)
        for t, (ids, weights) in enumerate(zip(self.ids.tolist(), self.weights.tolist(), strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                if expert >= 0:
                    row = self.x[t].float()
                    out[t] += one_expert(row * weight, expert) if weights_on_input else weight * one_expert(row, expert)
        return out


def one_expert(x: torch.Tensor, expert: int) -> torch.Tensor:
    gate, up = (x @ W1[expert].t()).chunk(2, -1)
    return (silu(gate) * up) @ W2[expert].t()


class Layer:
    """Prepare, experts and finalize of one rank, in steps."""

    def __init__(
        self,
        world: World,
        settings: dict[str, Any],
        *,
        lanes: int = 1,
        dtype: torch.dtype = torch.float32,
        top_k: int = TOP_K,
        quant_config: Any = FUSED_MOE_UNQUANTIZED_CONFIG,
        tables: Any = None,
        share: int = 1,
    ) -> None:
        self.manager = Manager(world, Settings(**settings), lanes)
        self.quant_config = quant_config
        local = EXPERTS // world.size
        mine = range(world.rank * local, (world.rank + 1) * local)
        self.experts = [int(tables[1][e]) for e in mine] if tables else list(mine)
        moe = SimpleNamespace(
            max_num_tokens=LIMIT,
            experts_per_token=top_k,
            hidden_dim=HIDDEN,
            num_experts=EXPERTS,
            num_local_experts=local,
            in_dtype=dtype,
            sp_size=share,
        )
        cls = EpBatched if self.manager.batched else EpStandard
        self.pf = cls(self.manager, moe, quant_config, tables)
        self.pf.post_init_setup(
            SimpleNamespace(expects_unquantized_inputs=False, supports_packed_ue8m0_act_scales=lambda: False)
        )

    def __enter__(self) -> "Layer":
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self.manager.buffers:
            buffer.destroy()

    def prepare(self, b: Batch, lane: int = 0, on_input: bool = False) -> tuple[Any, Any]:
        """The hook, if the mode has one, and what to call for the rows."""
        self.manager.lane = lane
        step = self.pf.prepare_async(b.x, b.weights, b.ids, EXPERTS, None, on_input, self.quant_config, False)
        return step if isinstance(step, tuple) else (None, step)

    def compute(self, received: Any, on_input: bool = False) -> torch.Tensor:
        rows, scales, meta, ids, weights = received
        assert scales is None
        if ids is None:
            out = torch.full_like(rows, float("nan"))
            w1, w2 = (w[self.experts].to(rows.dtype) for w in (W1, W2))
            CPUBatchedExperts.apply(None, out, rows, w1, w2, expert_tokens_meta=meta)
            return out
        out = torch.full(rows.shape, float("nan"))  # as rows behind the last one may be
        for n in range(len(rows)):
            if weights[n].any():
                out[n] = 0.0
            for expert, weight in zip(ids[n].tolist(), weights[n].tolist(), strict=True):
                if weight:
                    y = one_expert(rows[n].float(), self.experts[expert])
                    out[n] += y if on_input else weight * y
        return out.to(rows.dtype)

    def finalize(self, b: Batch, y: torch.Tensor, lane: int = 0, on_input: bool = False) -> tuple[Any, Any]:
        self.manager.lane = lane
        b.out = torch.full_like(b.x, float("nan"))
        delegate = self.pf.activation_format == mk.FusedMoEActivationFormat.BatchedExperts
        impl = TopKWeightAndReduceDelegate() if delegate else TopKWeightAndReduceNoOP()
        step = self.pf.finalize_async(b.out, y, b.weights, b.ids, on_input, impl)
        return step if isinstance(step, tuple) else (None, step)

    def run(self, b: Batch, on_input: bool = False) -> None:
        """One whole layer, without overlap."""
        y = self.compute(finish(self.prepare(b, on_input=on_input)), on_input)
        finish(self.finalize(b, y, on_input=on_input))


def finish(step: tuple[Any, Any]) -> Any:
    hook, receive = step
    if hook is not None:
        hook()
    return receive()


def check(b: Batch, tolerance: float = 1e-5, **expected: Any) -> None:
    torch.testing.assert_close(b.out.float(), b.expected(**expected), rtol=tolerance, atol=tolerance)
