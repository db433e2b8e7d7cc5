"""What a model's config.json says about copies, bytes and memory: hidden size, experts, parameters, KV bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
# Bytes a parameter of quantised weights: fp8 with an fp32 scale per 128 x 128; mxfp4 with a byte a 32-wide block.
QUANTIZED = {"fp8": 1 + 4 / 128**2, "mxfp4": 0.5 + 1 / 32}
TYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of a mixture-of-experts transformer. Parameters are counts of the whole model."""

    hidden: int
    experts: int
    top_k: int
    groups: int
    top_groups: int
    layers: int
    moe_layers: int
    expert_parameters: int
    """Of one routed expert of one layer."""
    attention_parameters: int
    other_parameters: int
    """Embeddings, dense layers, shared experts and routers: every rank has them."""
    attention_bytes_per_parameter: float
    expert_bytes_per_parameter: float
    bytes_per_element: int
    """Of the model's unquantised type."""
    kv_elements: int
    """Cached numbers a token, all layers."""
    kv_is_latent: bool
    """MLA: one latent for all heads, so tensor parallelism does not divide it."""

    @property
    def parameters(self) -> int:
        routed = self.expert_parameters * self.experts * self.moe_layers
        return routed + self.attention_parameters + self.other_parameters

    @property
    def fp8_experts(self) -> bool:
        return self.expert_bytes_per_parameter == QUANTIZED["fp8"]

    def weight_bytes(self, ranks: int, tensor_parallel: int, redundant: int) -> float:
        """Weights of one rank: its experts; attention and the rest, which data parallelism repeats and TP divides."""
        local = (self.experts + redundant) // ranks * self.moe_layers * self.expert_parameters
        rest = (self.attention_parameters + self.other_parameters) * self.attention_bytes_per_parameter
        return local * self.expert_bytes_per_parameter + rest / tensor_parallel

    def kv_bytes(self, tensor_parallel: int, element: int) -> float:
        """KV cache bytes a token on one rank, at `element` bytes a number."""
        return self.kv_elements * element / (1 if self.kv_is_latent else tensor_parallel)


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Reads a config.json; ValueError names the key that is missing."""
    hidden, layers = _get(config, "hidden_size"), _get(config, "num_hidden_layers")
    experts = _get(config, "n_routed_experts", "num_experts", "num_local_experts")
    expert_width = _get(config, "moe_intermediate_size", "intermediate_size")
    moe_layers = _moe_layers(config, layers)
    expert = 3 * hidden * expert_width
    shared = int(config.get("n_shared_experts") or 0) * expert * moe_layers
    dense = 3 * hidden * int(config.get("intermediate_size") or 0) * (layers - moe_layers)
    embeddings = int(config.get("vocab_size") or 0) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    attention, kv, latent = _attention(config, hidden)
    method = (config.get("quantization_config") or {}).get("quant_method")
    element = TYPES.get(str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"), 2)
    quantized = QUANTIZED.get(str(method), element)
    return ModelShape(
        hidden=hidden,
        experts=experts,
        top_k=_get(config, "num_experts_per_tok", "num_experts_per_token"),
        groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        layers=layers,
        moe_layers=moe_layers,
        expert_parameters=expert,
        attention_parameters=attention * layers,
        other_parameters=shared + dense + embeddings + hidden * experts * moe_layers,
        # mxfp4 checkpoints quantise the experts alone.
        attention_bytes_per_parameter=element if method == "mxfp4" else quantized,
        expert_bytes_per_parameter=quantized,
        bytes_per_element=element,
        kv_elements=kv * layers,
        kv_is_latent=latent,
    )


def _moe_layers(config: Mapping[str, Any], layers: int) -> int:
    dense = int(config.get("first_k_dense_replace") or 0)
    return layers - dense - len([i for i in config.get("mlp_only_layers") or [] if i >= dense])


def _attention(config: Mapping[str, Any], hidden: int) -> tuple[int, int, bool]:
    """Parameters and cached numbers a token of one layer, and whether the cache is MLA's latent."""
    heads = _get(config, "num_attention_heads")
    if latent := int(config.get("kv_lora_rank") or 0):
        nope, rope, value = (_get(config, f"{part}_head_dim") for part in ("qk_nope", "qk_rope", "v"))
        query = heads * (nope + rope)
        down = int(config.get("q_lora_rank") or 0)
        queries = hidden * down + down * query if down else hidden * query
        keys = hidden * (latent + rope) + latent * heads * (nope + value)
        return queries + keys + heads * value * hidden, latent + rope, True
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or hidden // heads)
    return hidden * head * (2 * heads + 2 * kv_heads), 2 * kv_heads * head, False


def _get(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name):
            return int(config[name])
    raise ValueError(f"it has no {' or '.join(names)}")
