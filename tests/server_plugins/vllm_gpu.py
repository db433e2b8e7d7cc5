"""One rank's MoE layer as vLLM 0.26 builds it on a GPU: its own choice of experts and kernel, our prepare and finalize.

vLLM's groups are left out, for NCCL wants a GPU a rank; the hooks of the plug-in are installed as in a worker.
"""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.all2all_utils as utils
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_oracle
from vllm.model_executor.layers.fused_moe.oracle import unquantized as bf16_oracle
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used
from vllm.v1.worker.ubatching import make_ubatch_contexts
from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

from ep_backend.settings import Settings
from server_plugins.vllm import NAME, hooks
from server_plugins.vllm.manager import EpManager
from tests.core.pool import World
from tests.server_plugins.layers import Manager
from tests.server_plugins.moe import BLOCK, Batch, Shape, Weights, weights

ROLES = {"normal": "prefill", "direct": "prefill", "low_latency": "decode", "hybrid": "decode"}
JOIN_S = 120.0
Form = tuple[str, str | None, int]  # mode, layout if it is not the mode's own, GPUs of a node
_worker = SimpleNamespace(choice=None, batched=False)


class GpuManager(Manager):
    """Lanes are those of vLLM's micro-batches."""

    lane = EpManager.lane


class Layer:
    """``ep``: this rank's experts, met through our buffer; else all experts, and no expert parallelism."""

    def __init__(self, world: World, shape: Shape, fp8: bool, *, ep: Form | None = None, lanes: int = 1) -> None:
        self.shape, self.rank, self.manager, self.expert_map = shape, world.rank, None, None
        parallel, mine = FusedMoEParallelConfig.make_no_parallel(), weights(world, shape, fp8).of_rank(0, 1)
        if ep is not None:
            mode, layout, gpus_per_node = ep
            wish = {"role": ROLES[mode], "mode": mode, "layout": layout, "gpus_per_node": gpus_per_node, "timeout_s": 60.0}
            self.manager = _install(GpuManager(world, Settings.model_validate(wish), lanes))
            parallel = _parallel(world)
            mine = weights(world, shape, fp8).of_rank(world.rank, world.size)
            local = shape.experts // world.size
            self.expert_map = torch.full((shape.experts,), -1, dtype=torch.int32, device=world.device)
            first = world.rank * local
            self.expert_map[first : first + local] = torch.arange(local, dtype=torch.int32, device=world.device)
        if not is_workspace_manager_initialized():
            init_workspace_manager(world.device, num_ubatches=2)
        self.kernel, self.w13, self.w2 = _kernel(_config(world, shape, fp8, parallel, len(mine.w13)), mine, fp8)

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        for buffer in self.manager.buffers if self.manager is not None else ():
            buffer.destroy()

    @property
    def experts(self) -> str:
        return type(self.kernel.fused_experts).__name__

    def run(self, batch: Batch) -> torch.Tensor:
        """[T, H]: the whole layer, in vLLM's own steps."""
        if self.manager is None and not len(batch.x):  # an engine's one process never runs nothing
            return torch.empty_like(batch.x)
        b = batch if self.manager is not None else batch.without_holes()
        return self.kernel.apply(
            b.x,
            self.w13,
            self.w2,
            b.weights,
            b.ids,
            activation=MoEActivation.SILU,
            global_num_experts=self.shape.experts,
            expert_map=self.expert_map,
            apply_router_weight_on_input=False,
        )

    def prepare(self, batch: Batch) -> Any:
        """What the experts get."""
        experts = self.kernel.fused_experts
        return self.kernel.prepare_finalize.prepare(
            batch.x,
            batch.weights,
            batch.ids,
            self.shape.experts,
            self.expert_map,
            False,
            experts.quant_config,
            experts.expects_unquantized_inputs,
        )

    def finalize(self, batch: Batch, y: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(batch.x, float("nan"))
        how = self.kernel.fused_experts.finalize_weight_and_reduce_impl()
        self.kernel.prepare_finalize.finalize(out, y, batch.weights, batch.ids, False, how)
        return out


class MicroBatches:
    """Two batches in two threads that alternate as vLLM's UBatchWrapper has them, eager or into a CUDA graph."""

    def __init__(self, layer: Layer, batches: list[Batch], tokens: list[tuple[int, ...]]) -> None:
        """``tokens``: of each rank, by batch."""
        self._layer, self._batches = layer, batches
        self._outputs: dict[int, torch.Tensor] = {}
        self._failures: list[BaseException] = []
        self._ready = threading.Barrier(len(batches) + 1)
        self._compute, self._comm = torch.cuda.Stream(), torch.cuda.Stream()
        forward = [forward_context(each) for each in tokens]
        self._contexts = make_ubatch_contexts(len(batches), self._compute, self._comm, forward, self._ready)

    def run(self, graph: torch.cuda.CUDAGraph | None = None) -> list[torch.Tensor]:
        """The outputs; with a graph they are there after its replay."""
        torch.cuda.synchronize()
        threads = [threading.Thread(target=self._one, args=(n,), daemon=True) for n in range(len(self._batches))]
        with override_forward_context(None):
            for thread in threads:
                thread.start()
            self._ready.wait(JOIN_S)
            with torch.cuda.graph(graph, stream=self._compute) if graph is not None else contextlib.nullcontext():
                self._contexts[0].cpu_wait_event.set()
                for thread in threads:
                    thread.join(JOIN_S)
        if self._failures:
            raise self._failures[0]
        late = [n for n in range(len(threads)) if n not in self._outputs]
        if late:
            raise TimeoutError(f"micro-batches {late} of rank {self._layer.rank} are not done after {JOIN_S:.0f} s")
        torch.cuda.synchronize()
        return [self._outputs[n] for n in range(len(self._batches))]

    def _one(self, number: int) -> None:
        try:
            torch.cuda.set_device(self._layer.w13.device)
            for stream in (self._compute, self._comm):
                with torch.cuda.stream(stream):
                    torch.cuda.current_blas_handle()  # a capture could not make one
            with torch.inference_mode(), self._contexts[number]:
                self._outputs[number] = self._layer.run(self._batches[number])
        except BaseException as failure:
            self._failures.append(failure)


def forward_context(tokens: tuple[int, ...]) -> Any:
    return SimpleNamespace(dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens)), is_padding=None)


def _install(manager: GpuManager) -> GpuManager:
    """The plug-in's hooks, once a process, and this manager behind them."""
    _worker.choice, _worker.batched = manager.choice, manager.batched
    hooks.install_moe(_worker)
    utils.get_ep_all2all_manager = lambda *_, **__: manager
    return manager


def _parallel(world: World) -> FusedMoEParallelConfig:
    sizes = {"tp_size": 1, "pcp_size": 1, "dp_size": world.size, "ep_size": world.size, "sp_size": 1}
    ranks = {"tp_rank": 0, "pcp_rank": 0, "dp_rank": world.rank, "ep_rank": world.rank}
    return FusedMoEParallelConfig(**sizes, **ranks, use_ep=True, all2all_backend=NAME, enable_eplb=False)


def _config(world: World, shape: Shape, fp8: bool, parallel: FusedMoEParallelConfig, local: int) -> FusedMoEConfig:
    return FusedMoEConfig(
        num_experts=shape.experts,
        experts_per_token=shape.top_k,
        hidden_dim=shape.hidden,
        intermediate_size=shape.inner,
        num_local_experts=local,
        num_logical_experts=shape.experts,
        activation=MoEActivation.SILU,
        device=world.device,
        routing_method=RoutingMethodType.DeepSeekV3,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        moe_backend="deep_gemm" if fp8 else "triton",
        max_num_tokens=shape.limit,
    )


def _kernel(moe: FusedMoEConfig, w: Weights, fp8: bool) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The kernel and the weights as its experts want them, by the steps of vLLM's own layers."""
    if not fp8:
        backend, experts = bf16_oracle.select_unquantized_moe_backend(moe)
        w13, w2 = bf16_oracle.convert_to_unquantized_kernel_format(backend, moe, w.w13, w.w2)
        return bf16_oracle.make_unquantized_moe_kernel(FUSED_MOE_UNQUANTIZED_CONFIG, moe, backend, experts), w13, w2
    is_deep_gemm_e8m0_used()  # loads DeepGEMM and settles its scale format
    block = [BLOCK, BLOCK]
    backend, experts = fp8_oracle.select_fp8_moe_backend(moe, kFp8Static128BlockSym, kFp8Dynamic128Sym)
    as_layer: Any = SimpleNamespace(weight_block_size=block)
    w13, w2, w13_scale, w2_scale = fp8_oracle.convert_to_fp8_moe_kernel_format(
        backend, as_layer, w.w13, w.w2, w.w13_scale, w.w2_scale, None, None
    )
    quantised = fp8_oracle.make_fp8_moe_quant_config(backend, w13_scale, w2_scale, None, None, block_shape=block)
    return fp8_oracle.make_fp8_moe_kernel(quantised, moe, experts, backend), w13, w2
