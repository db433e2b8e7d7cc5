"""Experts for masked rows on a CPU, where vLLM has none."""

from typing import Any

import torch
from torch.nn.functional import silu
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import NaiveBatchedExperts
from vllm.platforms import current_platform


class CPUBatchedExperts(NaiveBatchedExperts):
    """Two matrix products an expert, over the rows it received."""

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        *,
        expert_tokens_meta: Any,
        **unused: Any,
    ) -> None:
        for expert, rows in enumerate(expert_tokens_meta.expert_num_tokens.tolist()):
            if rows:
                gate, up = (hidden_states[expert, :rows] @ w1[expert].t()).chunk(2, dim=-1)
                output[expert, :rows] = (silu(gate) * up) @ w2[expert].t()
