"""One rank's MoE layer of SGLang 0.5.17 on a GPU: its own DeepGEMM runner, our dispatcher.

SGLang's groups are left out, for NCCL wants a GPU a rank; what they and the scheduler would have set is set here.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")  # else the first product of a shape compiles those of all sizes

import sglang.srt.layers.moe.moe_runner.deep_gemm as deep_gemm_runner
import torch
from sglang.srt.layers.dp_attention import set_is_extend_in_batch
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import DeepEPMode, MoeA2ABackend, MoeRunnerBackend
from sglang.srt.runtime_context import get_flags, publish
from sglang.srt.server_args import ServerArgs

from ep_backend.modes import Family
from ep_backend.settings import Settings
from server_plugins.sglang.dispatcher import EpTboDispatcher
from server_plugins.sglang.plan import Plan
from server_plugins.sglang.runtime import Runtime
from tests.core.pool import World
from tests.server_plugins.moe import BLOCK, Batch, Shape, Weights, weights

FAMILY = {"normal": "prefill", "direct": "prefill", "low_latency": "decode", "hybrid": "decode"}
DEEPEP = {"prefill": DeepEPMode.NORMAL, "decode": DeepEPMode.LOW_LATENCY}
_published = False


class Layer:
    """Dispatcher and runner of a rank's experts."""

    def __init__(self, world: World, shape: Shape, fp8: bool, mode: str, gpus_per_node: int, lanes: int = 1) -> None:
        _publish()
        family = FAMILY[mode]
        get_flags().moe.deepep_mode = DEEPEP[family]
        set_is_extend_in_batch(Family(family) is Family.PREFILL)
        plan = {"role": family, "families": (family,), "capacity": {mode: shape.limit}, "tokens": {family: shape.limit}}
        world_of = {"lanes": lanes, "ranks": world.size, "gpus_per_node": gpus_per_node}
        self.runtime = Runtime(
            Plan.model_validate({**plan, **world_of, "decode_graphs": family == "decode", "fabric": "nvshmem"}),
            Settings.model_validate({"mode": mode, "timeout_s": 60.0}),
            world.group,
        )
        config = _config(shape, shape.experts // world.size)
        self.dispatcher = EpTboDispatcher(config, self.runtime)
        if not fp8:  # as SGLang tells it after loading bf16 experts for DeepGEMM
            self.dispatcher.set_quant_config({"dispatcher_output_dtype": "bf16"})
        self.weights = _quant_info(weights(world, shape, fp8).of_rank(world.rank, world.size))
        self.runner = _runner(config, MoeA2ABackend.DEEPEP)

    def __enter__(self) -> Layer:
        self.runtime.allocate()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.runtime.destroy()

    def experts(self, dispatched: Any) -> Any:
        return self.runner.run(dispatched, self.weights)

    def run(self, batch: Batch) -> torch.Tensor:
        """[T, H]: one whole layer, without overlap."""
        got = self.dispatcher.dispatch(hidden_states=batch.x, topk_output=routing(batch))
        return self.dispatcher.combine(combine_input=self.experts(got))

    def run_two(self, batches: list[Batch]) -> list[torch.Tensor]:
        """In the order of SGLang's operations for two sub-batches."""
        d, each = self.dispatcher, list(enumerate(batches))
        for lane, b in each:
            d.dispatch_a(hidden_states=b.x, topk_output=routing(b), tbo_subbatch_index=lane)
        for lane, _ in each:
            d.combine_a(combine_input=self.experts(d.dispatch_b(tbo_subbatch_index=lane)), tbo_subbatch_index=lane)
        return [d.combine_b(tbo_subbatch_index=lane) for lane, _ in each]


class Alone:
    """All experts in one process, in SGLang's format without expert parallelism."""

    def __init__(self, world: World, shape: Shape, fp8: bool) -> None:
        _publish()
        self.weights = _quant_info(weights(world, shape, fp8).of_rank(0, 1))
        self.runner = _runner(_config(shape, shape.experts), MoeA2ABackend.NONE)

    def run(self, batch: Batch) -> torch.Tensor:
        if not len(batch.x):  # an engine's one process never runs nothing
            return torch.empty_like(batch.x)
        whole = batch.without_holes()
        dispatched = StandardDispatchOutput(whole.x, None, StandardTopKOutput(whole.weights, whole.ids, whole.weights))
        return self.runner.run(dispatched, self.weights).hidden_states


def routing(batch: Batch) -> StandardTopKOutput:
    return StandardTopKOutput(batch.weights, batch.ids, None)


def capturing(now: bool) -> None:
    """SGLang frees no tensors under its runners while it captures decode graphs."""
    get_flags().capture.disable_dispose_tensor = now


def _config(shape: Shape, local: int) -> MoeRunnerConfig:
    return MoeRunnerConfig(
        num_experts=shape.experts,
        num_local_experts=local,
        hidden_size=shape.hidden,
        intermediate_size_per_partition=shape.inner,
        top_k=shape.top_k,
        params_dtype=torch.bfloat16,
        inplace=False,
    )


def _runner(config: MoeRunnerConfig, backend: MoeA2ABackend) -> MoeRunner:
    get_flags().moe.a2a_backend = backend  # read once, here
    get_flags().moe.runner_backend = MoeRunnerBackend.DEEP_GEMM
    return MoeRunner(MoeRunnerBackend.DEEP_GEMM, config)


def _quant_info(w: Weights) -> deep_gemm_runner.DeepGemmMoeQuantInfo:
    fp8 = w.w13_scale is not None
    scales = {"w13_scale": w.w13_scale, "w2_scale": w.w2_scale, "block_shape": [BLOCK, BLOCK]} if fp8 else {}
    return deep_gemm_runner.DeepGemmMoeQuantInfo(w13_weight=w.w13, w2_weight=w.w2, use_fp8=fp8, **scales)


def _publish() -> None:
    """What a scheduler knows when its layers are built."""
    global _published
    if _published:
        return
    publish(ServerArgs(model_path="dummy"), role="test")
    deep_gemm_runner.get_tp_group = lambda: SimpleNamespace(world_size=1)  # asked for symmetric memory, which is off
    _published = True
