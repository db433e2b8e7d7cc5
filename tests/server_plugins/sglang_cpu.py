"""What SGLang lacks on a CPU for the DeepEP formats, as one more plug-in of its processes. Only for tests.

:func:`plugin` writes a distribution that SGLang finds on PYTHONPATH. EP_TEST_COMBINE_SCALE spoils every combine.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMBINE_SCALE = "EP_TEST_COMBINE_SCALE"
FACTORIES = ("tensor", "empty", "zeros", "full", "empty_like", "zeros_like", "ones", "arange")


def plugin(folder: Path) -> str:
    """Write the distribution into the folder; returns the PYTHONPATH that makes SGLang load it."""
    info = folder / "ep_test_sglang_cpu-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ep-test-sglang-cpu\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nep_test_cpu = {__name__}:register\n")
    return os.pathsep.join([str(folder), str(ROOT)])


def register() -> None:
    """Entry point."""
    import torch

    # Without a GPU SGLang imports its rotary kernel from here, and then computes in torch.
    kernels = ModuleType("vllm._custom_ops")
    kernels.rotary_embedding = None
    sys.modules.update({"vllm": ModuleType("vllm"), "vllm._custom_ops": kernels})
    for name in FACTORIES:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    attention = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    for target, fn in {
        f"{attention}.get_cuda_graph_seq_len_fill_value": lambda self: 1,
        "sglang.srt.layers.moe.ep_moe.layer.DeepEPMoE.run_moe_core": experts,
        "sglang.srt.layers.deep_gemm_wrapper.configure_deep_gemm_num_sms": lambda num_sms: contextlib.nullcontext(),
    }.items():
        HookRegistry.register(target, fn, HookType.REPLACE)
    scale = os.environ.get(COMBINE_SCALE)
    if scale:
        target = "server_plugins.sglang.dispatcher.EpDispatcher.combine_b"
        HookRegistry.register(target, lambda out, *_: out * float(scale), HookType.AFTER)


def experts(layer: Any, dispatched: Any) -> Any:
    """What DeepGEMM's runner does with either format, in torch."""
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLCombineInput, DeepEPNormalCombineInput

    rows, ids, weights = dispatched.hidden_states, dispatched.topk_ids, dispatched.topk_weights
    if dispatched.format.is_deepep_ll():
        out = rows.new_full(rows.shape, float("nan"))
        for expert, count in enumerate(dispatched.masked_m.tolist()):
            out[expert, :count] = _expert(layer, rows[expert, :count], expert)
        return DeepEPLLCombineInput(out, ids, weights)
    out = rows.new_zeros(rows.shape)
    for expert, at_most in enumerate(dispatched.num_recv_tokens_per_expert):
        n, k = (ids == expert).nonzero(as_tuple=True)
        assert len(n) <= at_most
        if len(n):
            out.index_add_(0, n, weights[n, k, None].to(out.dtype) * _expert(layer, rows[n], expert))
    return DeepEPNormalCombineInput(out, ids, weights)


def _expert(layer: Any, x: Any, expert: int) -> Any:
    from torch.nn.functional import silu

    gate, up = (x @ layer.w13_weight[expert].t()).chunk(2, -1)
    return (silu(gate) * up) @ layer.w2_weight[expert].t()


def _without_pinning(original: Callable[..., Any]) -> Callable[..., Any]:
    def factory(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return factory
