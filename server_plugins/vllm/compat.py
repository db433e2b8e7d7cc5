"""Is this vLLM one that the hooks fit? Asked of its interfaces first, of its version only once the backend is chosen."""

import inspect
import os
from typing import Any, Literal, get_origin, get_type_hints

from ep_backend.deployment.engines import SUPPORTED
from server_plugins.vllm import NAME

FIRST, BEYOND = SUPPORTED["vllm"]
OVERRIDE = "EP_BACKEND_ALLOW_UNTESTED_VLLM"

PREPARE = [
    "a1",
    "topk_weights",
    "topk_ids",
    "num_experts",
    "expert_map",
    "apply_router_weight_on_input",
    "quant_config",
    "defer_input_quant",
]
FINALIZE = [
    "output",
    "fused_expert_output",
    "topk_weights",
    "topk_ids",
    "apply_router_weight_on_input",
    "weight_and_reduce_impl",
]
ABSTRACT = {
    "activation_format",
    "topk_indices_dtype",
    "max_num_tokens_per_rank",
    "num_dispatchers",
    "output_is_reduced",
    "prepare",
    "finalize",
}


def require_version() -> None:
    """RuntimeError outside the tested range, unless the override is set."""
    import vllm
    from packaging.version import Version

    version = Version(Version(vllm.__version__).base_version)
    if not Version(FIRST) <= version < Version(BEYOND) and os.environ.get(OVERRIDE) != "1":
        raise RuntimeError(
            f"--all2all-backend {NAME} is made for vLLM {FIRST} to {BEYOND} (exclusive), this is {vllm.__version__}; "
            f"install one of those, choose another backend, or set {OVERRIDE}=1 to try"
        )


def require_config_hooks() -> None:
    """RuntimeError naming what this vLLM's configuration lacks."""
    from vllm.config import VllmConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

    hint = get_type_hints(ParallelConfig).get("all2all_backend")
    _require(get_origin(hint) is Literal, "ParallelConfig.all2all_backend is no Literal")
    for name in ("use_sequence_parallel_moe", "use_batched_dp_moe"):
        _require(_is_property(ParallelConfig, name), f"ParallelConfig.{name} is no property")
    _require(callable(getattr(VllmConfig, "__post_init__", None)), "VllmConfig has no __post_init__")
    _require(
        "cpu_group" in inspect.signature(DeviceCommunicatorBase.__init__).parameters,
        "DeviceCommunicatorBase takes no cpu_group",
    )


def require_moe_hooks() -> None:
    """RuntimeError naming what this vLLM's MoE layers lack."""
    import vllm.model_executor.layers.fused_moe.all2all_utils as utils
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    base = mk.FusedMoEPrepareAndFinalizeModular
    for name in ("use_all2all_kernels", "use_batched_activation_format", "needs_round_robin_routing_tables"):
        _require(_is_property(FusedMoEParallelConfig, name), f"FusedMoEParallelConfig.{name} is no property")
    made = list(inspect.signature(utils.maybe_make_prepare_finalize).parameters)[:5]
    expected = ["moe", "quant_config", "routing_tables", "allow_new_interface", "use_monolithic"]
    _require(made == expected, f"maybe_make_prepare_finalize takes {made}, not {expected}")
    _require(
        base.__abstractmethods__ == ABSTRACT,
        f"prepare/finalize must define {sorted(base.__abstractmethods__)}, not {sorted(ABSTRACT)}",
    )
    for method, expected in ((base.prepare, PREPARE), (base.finalize, FINALIZE)):
        found = list(inspect.signature(method).parameters)[1:]
        _require(found == expected, f"{method.__name__} takes {found}, not {expected}")
    _require(hasattr(mk.FusedMoEExperts, "is_supported_config"), "FusedMoEExperts has no is_supported_config")


def _is_property(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), property)


def _require(ok: Any, missing: str) -> None:
    if not ok:
        import vllm

        raise RuntimeError(f"vLLM {vllm.__version__} does not fit {NAME}: {missing}")
