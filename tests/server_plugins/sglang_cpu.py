"""What SGLang lacks on a CPU for the DeepEP formats, as one more plug-in of its processes. `./ep` installs it for tests.

EP_TEST_DISPATCHES names a file that gets a line "lane mode" a dispatch; EP_TEST_SPOILED one that, while it exists, spoils
what every combine returns.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

DISPATCHES, SPOILED = "EP_TEST_DISPATCHES", "EP_TEST_SPOILED"
FACTORIES = ("tensor", "empty", "zeros", "full", "empty_like", "zeros_like", "ones", "arange")


def register() -> None:
    """Entry point of the group sglang.srt.plugins."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Without a GPU SGLang imports its rotary kernel from here, and then computes in torch.
    kernels = ModuleType("vllm._custom_ops")
    kernels.rotary_embedding = None
    sys.modules.update({"vllm": ModuleType("vllm"), "vllm._custom_ops": kernels})
    for name in FACTORIES:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    # Two-batch overlap divides a GPU's multiprocessors.
    torch.cuda.get_device_properties = lambda *_, **__: SimpleNamespace(multi_processor_count=132)
    attention = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    for target, fn in {
        f"{attention}.get_cuda_graph_seq_len_fill_value": lambda self: 1,
        "sglang.srt.layers.moe.ep_moe.layer.DeepEPMoE.run_moe_core": experts,
        "sglang.srt.layers.deep_gemm_wrapper.configure_deep_gemm_num_sms": lambda num_sms: contextlib.nullcontext(),
    }.items():
        HookRegistry.register(target, fn, HookType.REPLACE)
    dispatcher = "server_plugins.sglang.dispatcher.EpDispatcher"
    if os.environ.get(DISPATCHES):
        HookRegistry.register(f"{dispatcher}.dispatch_b", _note, HookType.AFTER)
    if os.environ.get(SPOILED):
        HookRegistry.register(f"{dispatcher}.combine_b", _spoil, HookType.AFTER)


def experts(layer: Any, dispatch_output: Any) -> Any:
    """What DeepGEMM's runner does with either format, in torch."""
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLCombineInput, DeepEPNormalCombineInput

    rows, ids, weights = dispatch_output.hidden_states, dispatch_output.topk_ids, dispatch_output.topk_weights
    if dispatch_output.format.is_deepep_ll():
        out = rows.new_full(rows.shape, float("nan"))
        for expert, count in enumerate(dispatch_output.masked_m.tolist()):
            out[expert, :count] = _expert(layer, rows[expert, :count], expert)
        return DeepEPLLCombineInput(out, ids, weights)
    out = rows.new_zeros(rows.shape)
    for expert, at_most in enumerate(dispatch_output.num_recv_tokens_per_expert):
        n, k = (ids == expert).nonzero(as_tuple=True)
        assert len(n) <= at_most
        if len(n):
            out.index_add_(0, n, weights[n, k, None].to(out.dtype) * _expert(layer, rows[n], expert))
    return DeepEPNormalCombineInput(out, ids, weights)


def _expert(layer: Any, x: Any, expert: int) -> Any:
    from torch.nn.functional import silu

    gate, up = (x @ layer.w13_weight[expert].t()).chunk(2, -1)
    return (silu(gate) * up) @ layer.w2_weight[expert].t()


def _note(dispatched: Any, dispatcher: Any) -> None:
    with open(os.environ[DISPATCHES], "a") as file:
        file.write(f"{dispatcher.lane} {dispatcher._mode.value}\n")


def _spoil(out: Any, dispatcher: Any) -> Any:
    return out * 0.5 if Path(os.environ[SPOILED]).exists() else None


def _without_pinning(original: Callable[..., Any]) -> Callable[..., Any]:
    def factory(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return factory
