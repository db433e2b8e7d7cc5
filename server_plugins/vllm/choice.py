"""What a vLLM configuration and the deployment's settings ask of the backend; refuses what cannot work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ep_backend.config import BufferConfig
from ep_backend.fabric import require_supported
from ep_backend.layout import SCALE_GROUP
from ep_backend.modes import Family, Layout, Mode
from ep_backend.policy import AUTO, Forward, Role, Situation, Wish, decide, family_of, modes_of
from ep_backend.settings import Settings, load_settings
from server_plugins.vllm import NAME, compat

FLAG = f"--all2all-backend {NAME}"


@dataclass(frozen=True)
class Choice:
    """What this instance is: the same on all its ranks and in all its processes."""

    settings: Settings
    role: Role
    wish: Wish
    family: Family
    lanes: int
    layout: Layout

    @property
    def alias(self) -> str:
        """vLLM's own backend with the same abilities, for its decisions by name (graphs, micro-batches)."""
        return "deepep_low_latency" if self.family is Family.DECODE else "deepep_high_throughput"

    @property
    def formats(self) -> str:
        """vLLM's own backend that hands its experts the same formats, for what experts say of a backend by name."""
        return "deepep_low_latency" if self.layout is Layout.MASKED else "deepep_high_throughput"

    def capacity(self, max_num_tokens: int, top_k: int, nodes: int) -> dict[Mode, int]:
        """max_tokens of the modes that this instance can run; ValueError if the engine's batches do not fit."""
        given = {m: n for m, n in self.settings.max_tokens.items() if m in modes_of(self.family)}
        if self.wish != AUTO:
            given.setdefault(Mode(self.wish), max_num_tokens)
        if not given:
            every = dict.fromkeys(modes_of(self.family), max_num_tokens)
            mode = decide(self.situation(self.wish, max_num_tokens, every, top_k, nodes)).mode
            given = {mode: max_num_tokens}
        room = given[Mode(self.wish)] if self.wish != AUTO else max(given.values())
        if room < max_num_tokens:
            names = ", ".join(f"{m.value}={n}" for m, n in given.items())
            raise ValueError(
                f"max_tokens ({names}) is less than the {max_num_tokens} tokens that vLLM may put in one batch; "
                f"raise max_tokens to {max_num_tokens}, or lower --max-num-batched-tokens to {room}"
            )
        if self.family is Family.DECODE and len(set(given.values())) > 1:
            names = ", ".join(f"{m.value}={n}" for m, n in given.items())
            raise ValueError(f"max_tokens ({names}) differ; vLLM sizes its decode experts once, give one number")
        return given

    def situation(
        self, wish: Wish, tokens: int, capacity: Mapping[Mode, int], top_k: int, nodes: int, capture: bool = False
    ) -> Situation:
        """vLLM's batches mix prompts and decoding, and its format is fixed at start: so the family alone counts."""
        role = Role.DECODE if self.family is Family.DECODE else Role.PREFILL
        estimates = self.settings.estimates
        return Situation(role, Forward.MIXED, tokens, capacity, top_k, nodes, capture, wish, estimates)

    def buffer_arguments(
        self, hidden: int, num_experts: int, top_k: int, capacity: Mapping[Mode, int], payloads: tuple[str, ...]
    ) -> dict[str, Any]:
        """Arguments of this instance's EpBuffer, and of its BufferConfig."""
        return {
            "hidden": hidden,
            "num_experts": num_experts,
            "top_k": top_k,
            "max_tokens": {mode.value: n for mode, n in capacity.items()},
            "lanes": self.lanes,
            "payloads": payloads,
            "gpus_per_node": self.settings.gpus_per_node,
            "rail": self.settings.rail,
            "timeout_s": self.settings.timeout_s,
            "fabric": fabric(),
        }


def fabric() -> str:
    from vllm.platforms import current_platform

    return "host" if current_platform.is_cpu() else "nvshmem"


def choose(config: Any) -> Choice:
    """Read the settings against a VllmConfig; ValueError or RuntimeError for what can be refused before loading."""
    compat.require_version()
    parallel, settings = config.parallel_config, load_settings()
    _require_parallelism(parallel)
    if (stages := parallel.pipeline_parallel_size) > 1 and settings.agent_port is not None:
        raise ValueError(
            f"--pipeline-parallel-size {stages} makes an EP group of each stage, and a deployment's agents "
            f"(agent_port={settings.agent_port}) are those of one group; use 1, or remove agent_port from the settings"
        )
    if config.lora_config is not None:
        raise ValueError(f"{FLAG} does not serve LoRA adapters; remove --enable-lora, or choose another backend")
    if config.model_config is not None:
        _require_dtype(config.model_config.dtype)
    transfer = config.kv_transfer_config
    role = _role(settings, transfer.kv_role if transfer is not None else None)
    family = family_of(role, settings.mode)
    return Choice(settings, role, settings.mode, family, _lanes(settings, parallel), _layout(settings, family, config))


def is_decode(kv_role: str | None) -> bool:
    """Will an instance with that kv_role run the decode family?"""
    settings = load_settings()
    return family_of(_role(settings, kv_role), settings.mode) is Family.DECODE


def require_room(choice: Choice, config: Any) -> None:
    """Apply the buffer's own rules to the model's shape, before weights are loaded. Needs a finished VllmConfig."""
    model = config.model_config
    experts = model.get_num_experts() if model is not None else 0
    if not experts:
        return
    parallel = config.parallel_config
    ranks = parallel.data_parallel_size * parallel.prefill_context_parallel_size * parallel.tensor_parallel_size
    ask = getattr(model, "get_num_experts_per_tok", None)  # not in 0.26
    top_k = ask() if ask else model.hf_text_config.num_experts_per_tok
    nodes = ranks // (choice.settings.gpus_per_node or ranks)
    made = BufferConfig.make(
        ranks,
        **choice.buffer_arguments(
            model.get_hidden_size(),
            experts + (parallel.eplb_config.num_redundant_experts if parallel.enable_eplb else 0),
            top_k,
            choice.capacity(config.scheduler_config.max_num_batched_tokens, top_k, max(nodes, 1)),
            ("fp32",) if model.dtype == torch.float32 else ("bf16",),
        ),
    )
    require_supported(made)


def _require_parallelism(parallel: Any) -> None:
    if not parallel.enable_expert_parallel:
        raise ValueError(f"{FLAG} needs expert parallelism; add --enable-expert-parallel")
    if parallel.data_parallel_size == 1:
        raise ValueError(
            f"{FLAG} needs --data-parallel-size above 1: with it at 1 vLLM runs no all-to-all "
            f"(--tensor-parallel-size {parallel.tensor_parallel_size} alone replicates the tokens)"
        )
    if getattr(parallel, "enable_elastic_ep", False):
        raise ValueError(f"{FLAG} does not resize a running EP group; remove --enable-elastic-ep")
    if parallel.use_ubatching and parallel.num_ubatches > 2:
        raise ValueError(f"--ubatch-size {parallel.num_ubatches} exceeds the 2 micro-batches {NAME} can overlap; use 2")


def _require_dtype(dtype: torch.dtype) -> None:
    allowed = {torch.bfloat16: "bfloat16"}
    if fabric() == "host":
        allowed[torch.float32] = "float32"
    if dtype not in allowed:
        raise ValueError(f"--dtype {str(dtype).removeprefix('torch.')} cannot be dispatched; use {_or(allowed)}")


def _or(names: Mapping[torch.dtype, str]) -> str:
    return " or ".join(names.values())


def _role(settings: Settings, kv_role: str | None) -> Role:
    """kv_role and the settings must not contradict each other; kv_both goes with any role."""
    from_engine = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}.get(kv_role or "")
    if settings.role is None:
        return from_engine or Role.UNIFIED
    if from_engine not in (None, settings.role):
        raise ValueError(
            f"role {settings.role.value} contradicts kv_role {kv_role}; set role to {from_engine.value}, or change "
            "--kv-transfer-config"
        )
    return settings.role


def _layout(settings: Settings, family: Family, config: Any) -> Layout:
    """From the configuration alone, so that all ranks have the same."""
    if family is Family.PREFILL:
        if settings.layout is Layout.MASKED:
            raise ValueError("layout masked is for the decode family's modes; remove it, or set mode to low_latency or hybrid")
        return Layout.COMPACT
    if settings.layout is not None:
        return settings.layout
    return Layout.MASKED if fabric() == "host" or _has_masked_products(config) else Layout.COMPACT


def _has_masked_products(config: Any) -> bool:
    """Will vLLM's experts for rows by expert be DeepGEMM's? Its others for bf16 and FP8 load two bytes at a time."""
    from vllm import envs
    from vllm.utils.deep_gemm import is_deep_gemm_supported

    model = config.model_config
    if model is None or model.quantization != "fp8":
        return False
    checkpoint = model.model_arch_config.quantization_config or {}
    return (
        checkpoint.get("weight_block_size") == [SCALE_GROUP, SCALE_GROUP]
        and config.kernel_config.moe_backend in ("auto", "deep_gemm")
        and envs.VLLM_MOE_USE_DEEP_GEMM
        and is_deep_gemm_supported()
    )


def _lanes(settings: Settings, parallel: Any) -> int:
    if settings.lanes == 1 and parallel.use_ubatching:
        raise ValueError("lanes=1 leaves no room for --enable-dbo's second micro-batch; set lanes to 2")
    return settings.lanes or (2 if parallel.use_ubatching else 1)
