"""Small random models: every part of the real architecture, the hub's tensor names, a few megabytes.

The same seed writes the same bytes. Weights are random but for two things, without which rounding would decide what such a
model answers: its routers would tell apart scores that are all but equal, and so would its greedy choice of a token.
- The first numbers of a hidden state are the routers', so many for each as it has experts. A token's embedding writes there
  who its experts are, and by what weight; no layer adds to them.
- Every token has a successor, whose logit gets a bonus. What the experts add decides by how much it wins, and whether.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|pad|>", "<|User|>", "<|Assistant|>"]
BYTES = 256
BOS, EOS, PAD = BYTES, BYTES + 1, BYTES + 2
VOCAB = 288

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}<|User|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|Assistant|>{{ message['content'] }}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)

Tensors = Iterator[tuple[str, np.ndarray[Any, Any]]]
Model = Literal["deepseek-v3", "qwen3-moe", "deepseek-v3-100m"]
Shape = Literal["deepseek-v3-shape", "deepseek-v3-shape-fp8"]

# CPU expert kernels want hidden_size and moe_intermediate_size divisible by 32.
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB,
}

# kv_lora_rank and qk_rope_head_dim are the real model's, for MLA kernels are compiled for those alone.
DEEPSEEK_V3: dict[str, Any] = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "model_type": "deepseek_v3",
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}

QWEN3_MOE: dict[str, Any] = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 64,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
}


# What kernels on GPUs ask for: widths in whole scale groups and tiles, 8 picks of more experts, and the real model's heads.
DEEPSEEK_V3_100M: dict[str, Any] = {
    **DEEPSEEK_V3,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 256,
    "n_routed_experts": 32,
    "num_attention_heads": 16,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
}

# The widths of DeepSeek-V3's layers, one dense and three of experts: 67 GB of experts in bf16.
DEEPSEEK_V3_SHAPE: dict[str, Any] = {
    **DEEPSEEK_V3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "topk_group": 4,
    "vocab_size": 32000,
}

FP8_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}

SHAPES: dict[Shape, dict[str, Any]] = {
    "deepseek-v3-shape": DEEPSEEK_V3_SHAPE,
    "deepseek-v3-shape-fp8": {**DEEPSEEK_V3_SHAPE, "quantization_config": FP8_BLOCKS},
}


CONFIG, WEIGHTS = "config.json", "model.safetensors"
FILES = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS)
DRAFT = ".ep-backend-draft"


class FolderRefused(Exception):
    """The folder holds something that was not written here."""


def write_shape(out: Path, shape: Shape) -> None:
    """Writes config and tokenizer alone into the folder `out`: for engines that invent weights (`--load-format dummy`).

    Raises FolderRefused, before anything changes, if the folder holds anything else than an earlier model of this module.
    """
    with _replacing(out) as draft:
        _write_beside_weights(draft, SHAPES[shape])


def write_checkpoint(out: Path, seed: int = 0, model: Model = "deepseek-v3") -> int:
    """Writes config, tokenizer and weights into the folder `out`; returns the number of parameters. Raises as `write_shape`."""
    config, layer = MODELS[model]
    with _replacing(out) as draft:
        import torch
        from safetensors.torch import save

        _write_beside_weights(draft, config)
        rng = np.random.default_rng(seed)
        tensors = {
            name: torch.from_numpy(values.astype(np.float32)).to(_dtype(name)) for name, values in _weights(config, layer, rng)
        }
        (draft / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    return sum(tensor.numel() for tensor in tensors.values())


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """A folder whose files take the place of those in `out` once all are written."""
    out.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(out)
    draft = out / DRAFT
    shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed
    draft.mkdir()
    try:
        yield draft
        # In this order, whatever ends it: the folder stays known by its config, and half a model has no weights.
        (out / WEIGHTS).unlink(missing_ok=True)
        for name in FILES:
            if (draft / name).exists():
                os.replace(draft / name, out / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _refuse_foreign(out: Path) -> None:
    present = sorted(path for path in out.iterdir() if path.name != DRAFT)
    foreign = [path for path in present if path.name not in FILES or path.is_dir()]
    if not foreign and not _has_our_config(out):
        foreign = present
    if foreign:
        raise FolderRefused(
            f"{out} holds {foreign[0].name}, which this version of `ep-backend checkpoint` did not write; choose a new folder, "
            "or empty this one"
        )


def _has_our_config(folder: Path) -> bool:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return config in SHAPES.values() or any(config == ours for ours, _ in MODELS.values())


def _write_beside_weights(out: Path, config: dict[str, Any]) -> None:
    _write_json(out / CONFIG, config)
    _write_json(out / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    _write_tokenizer(out, config["max_position_embeddings"])


def _dtype(name: str) -> Any:
    import torch

    return torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16


# Of deepseek-v3-100m in bf16: rounding changes log-probabilities by 0.06 at most, 97 in 100 greedy tokens stand out by more
# than four times that, and a lost pick, two exchanged experts or rows at a wrong rank change them by 8 to 18 times as much.
LEVELS = (0.5, 1.5)
"""What an embedding says of a token's own experts, from and to; of the others, the negative. A router takes it ROUTER-fold."""
ROUTER = 2.0
HEAD = 2.0
"""The spread of the logits."""
BONUS = 18.0
"""A successor's, in a hidden state that is but the embedding: layers make it less by what they add."""

Layer = Callable[[dict[str, Any], int, np.random.Generator], Tensors]


def _weights(config: dict[str, Any], layer: Layer, rng: np.random.Generator) -> Tensors:
    hidden, tokens = config["hidden_size"], config["vocab_size"]
    embeddings = rng.standard_normal((tokens, hidden))
    for index in range(_dense(config), config["num_hidden_layers"]):
        embeddings[:, _router(config, index)] = _picks(config, rng)
    yield "model.embed_tokens.weight", embeddings
    for index in range(config["num_hidden_layers"]):
        for name, values in layer(config, index, rng):
            yield f"model.layers.{index}.{name}", values
    yield "model.norm.weight", np.ones(hidden)
    head = _matrix(rng, tokens, hidden, HEAD)
    head[rng.permutation(tokens)] += embeddings * BONUS / hidden
    yield "lm_head.weight", head


def _dense(config: dict[str, Any]) -> int:
    first: int = config.get("first_k_dense_replace", 0)
    return first


def _experts(config: dict[str, Any]) -> int:
    experts: int = config.get("n_routed_experts") or config["num_experts"]
    return experts


def _router(config: dict[str, Any], layer: int) -> slice:
    """The numbers of a hidden state that this layer's router reads."""
    experts, number = _experts(config), layer - _dense(config)
    return slice(number * experts, (number + 1) * experts)


def _picks(config: dict[str, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """For every token and expert a level, high for as many experts as a token has, equally many in each group that it takes."""
    tokens, experts = config["vocab_size"], _experts(config)
    groups, taken = config.get("n_group", 1), config.get("topk_group", 1)
    mine = rng.permuted(np.tile(np.arange(groups) < taken, (tokens, 1)), axis=1)
    inside = np.arange(experts // groups) < config["num_experts_per_tok"] // taken
    chosen = rng.permuted(np.tile(inside, (tokens, groups, 1)), axis=2) & mine[:, :, None]
    levels: np.ndarray[Any, Any] = rng.uniform(*LEVELS, (tokens, experts)) * np.where(chosen.reshape(tokens, experts), 1, -1)
    return levels


def _gate(config: dict[str, Any], layer: int) -> np.ndarray[Any, Any]:
    gate = np.zeros((_experts(config), config["hidden_size"]))
    gate[:, _router(config, layer)] = ROUTER * np.eye(len(gate))
    return gate


def _added(rng: np.random.Generator, config: dict[str, Any], inner: int) -> np.ndarray[Any, Any]:
    """A projection to the hidden state, which leaves what is the routers' alone."""
    values = _matrix(rng, config["hidden_size"], inner)
    values[: _router(config, config["num_hidden_layers"] - 1).stop] = 0
    return values


def _deepseek_v3(config: dict[str, Any], index: int, rng: np.random.Generator) -> Tensors:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    yield "input_layernorm.weight", np.ones(hidden)
    yield "self_attn.q_a_proj.weight", _matrix(rng, q_rank, hidden)
    yield "self_attn.q_a_layernorm.weight", np.ones(q_rank)
    yield "self_attn.q_b_proj.weight", _matrix(rng, heads * (nope + rope), q_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", _matrix(rng, kv_rank + rope, hidden)
    yield "self_attn.kv_a_layernorm.weight", np.ones(kv_rank)
    yield "self_attn.kv_b_proj.weight", _matrix(rng, heads * (nope + value), kv_rank)
    yield "self_attn.o_proj.weight", _added(rng, config, heads * value)
    yield "post_attention_layernorm.weight", np.ones(hidden)
    if index < _dense(config):
        yield from _mlp(rng, config, "mlp", config["intermediate_size"])
        return
    yield "mlp.gate.weight", _gate(config, index)
    yield "mlp.gate.e_score_correction_bias", rng.standard_normal(experts) * 0.01
    for expert in range(experts):
        yield from _mlp(rng, config, f"mlp.experts.{expert}", inner)
    yield from _mlp(rng, config, "mlp.shared_experts", inner * config["n_shared_experts"])


def _qwen3_moe(config: dict[str, Any], index: int, rng: np.random.Generator) -> Tensors:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "input_layernorm.weight", np.ones(hidden)
    yield "self_attn.q_proj.weight", _matrix(rng, queries, hidden)
    yield "self_attn.k_proj.weight", _matrix(rng, keys, hidden)
    yield "self_attn.v_proj.weight", _matrix(rng, keys, hidden)
    yield "self_attn.o_proj.weight", _added(rng, config, queries)
    yield "self_attn.q_norm.weight", np.ones(head)
    yield "self_attn.k_norm.weight", np.ones(head)
    yield "post_attention_layernorm.weight", np.ones(hidden)
    yield "mlp.gate.weight", _gate(config, index)
    for expert in range(config["num_experts"]):
        yield from _mlp(rng, config, f"mlp.experts.{expert}", config["moe_intermediate_size"])


def _mlp(rng: np.random.Generator, config: dict[str, Any], prefix: str, inner: int) -> Tensors:
    hidden = config["hidden_size"]
    yield f"{prefix}.gate_proj.weight", _matrix(rng, inner, hidden)
    yield f"{prefix}.up_proj.weight", _matrix(rng, inner, hidden)
    yield f"{prefix}.down_proj.weight", _added(rng, config, inner)


def _matrix(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = rng.standard_normal((rows, columns)) * (gain / np.sqrt(columns))
    return values


MODELS: dict[Model, tuple[dict[str, Any], Layer]] = {
    "deepseek-v3": (DEEPSEEK_V3, _deepseek_v3),
    "qwen3-moe": (QWEN3_MOE, _qwen3_moe),
    "deepseek-v3-100m": (DEEPSEEK_V3_100M, _deepseek_v3),
}


def _write_tokenizer(out: Path, longest: int) -> None:
    """One token a byte, so that any text round-trips and no merges need training."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{index}|>" for index in range(VOCAB - BYTES - len(SPECIAL_TOKENS))]
    tokenizer.add_special_tokens(SPECIAL_TOKENS + reserved)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[1],
            "pad_token": SPECIAL_TOKENS[2],
            "model_max_length": longest,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
