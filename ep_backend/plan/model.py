"""What a model's config.json says about copies, bytes and memory: hidden size, experts, parameters, KV bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
# Bytes a parameter of quantised weights: fp8 with an fp32 scale per 128 x 128; mxfp4 with a byte a 32-wide block.
QUANTIZED = {"fp8": 1 + 4 / 128**2, "mxfp4": 0.5 + 1 / 32}
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
MOST = 1 << 24
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
    """Reads a config.json; ValueError names the key that is missing or wrong, its value and what it must be."""
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    experts = _number(config, *EXPERTS)
    expert_width = _number(config, "moe_intermediate_size", "intermediate_size")
    dense_layers = _dense_layers(config, layers)
    moe_layers = layers - dense_layers
    expert = 3 * hidden * expert_width
    shared = _number(config, "n_shared_experts", otherwise=0) * expert * moe_layers
    dense = 3 * hidden * _number(config, "intermediate_size", otherwise=0) * dense_layers
    embeddings = _number(config, "vocab_size", otherwise=0) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    attention, kv, latent = _attention(config, hidden)
    quantization = config.get("quantization_config") or {}
    if not isinstance(quantization, Mapping):
        raise ValueError(f"quantization_config is {_shown(quantization)}, must be a mapping")
    method = quantization.get("quant_method")
    element = TYPES.get(str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"), 2)
    quantized = QUANTIZED.get(str(method), element)
    groups = _number(config, "n_group", otherwise=1, most=experts)
    return ModelShape(
        hidden=hidden,
        experts=experts,
        top_k=_number(config, "num_experts_per_tok", "num_experts_per_token", most=experts),
        groups=groups,
        top_groups=_number(config, "topk_group", otherwise=1, most=groups),
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


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    first = _number(config, "first_k_dense_replace", otherwise=0, most=layers - 1)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(each) is int and 0 <= each < layers for each in listed):
        raise ValueError(f"mlp_only_layers is {_shown(listed)}, must be a list of layers from 0 to {layers - 1}")
    dense = len({*range(first), *listed})
    if dense == layers:
        raise ValueError(f"mlp_only_layers is {_shown(listed)}, must leave a layer that has experts")
    return dense


def _attention(config: Mapping[str, Any], hidden: int) -> tuple[int, int, bool]:
    """Parameters and cached numbers a token of one layer, and whether the cache is MLA's latent."""
    heads = _number(config, "num_attention_heads")
    if latent := _number(config, "kv_lora_rank", otherwise=0):
        nope, rope, value = (_number(config, f"{part}_head_dim") for part in ("qk_nope", "qk_rope", "v"))
        query = heads * (nope + rope)
        down = _number(config, "q_lora_rank", otherwise=0)
        queries = hidden * down + down * query if down else hidden * query
        keys = hidden * (latent + rope) + latent * heads * (nope + value)
        return queries + keys + heads * value * hidden, latent + rope, True
    kv_heads = _number(config, "num_key_value_heads", otherwise=heads)
    head = _number(config, "head_dim", otherwise=max(1, hidden // heads))
    return hidden * head * (2 * heads + 2 * kv_heads), 2 * kv_heads * head, False


def _number(config: Mapping[str, Any], *names: str, otherwise: int | None = None, most: int = MOST) -> int:
    """The first of these keys that the config has, as a whole number from 1 (where there is another value, 0 asks for it)."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        if otherwise is None:
            raise ValueError(f"it has no {' or '.join(names)}")
        return otherwise
    value, least = config[name], 1 if otherwise is None else 0
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {_shown(value)}, must be a whole number from {least} to {most}; correct it")
    return value or otherwise or 0


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
