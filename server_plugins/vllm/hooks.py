"""Every point where vLLM meets the backend's name. Nothing changes for other names."""

import copy
import functools
import sys
import typing
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from ep_backend.layout import align_up
from server_plugins.vllm import NAME, compat, shared_cores
from server_plugins.vllm.choice import choose, is_decode, require_room
from server_plugins.vllm.graphs import EXTENSION

_moe_installed = False
HIDDEN_MULTIPLE = 8  # 16-byte vectors of bf16
_kv_role: ContextVar[str | None] = ContextVar("kv_role", default=None)


def install_config() -> None:
    """In every process: make the flag's value known and checked. Imports no MoE code."""
    compat.require_config_hooks()
    _extend_flag()
    _extend_properties()
    _wrap_config()
    _wrap_communicator()


def install_moe(manager: Any) -> None:
    """In a worker whose EP group uses the backend, before its model is built."""
    global _moe_installed
    if _moe_installed:
        return
    from vllm.platforms import current_platform

    compat.require_moe_hooks()
    _moe_installed = True
    _extend_moe_properties(manager)
    _wrap_experts_choice(manager)
    _replace_prepare_finalize()
    _round_up_hidden_size()
    _allow_shared_experts_overlap()
    if current_platform.is_cpu():
        _add_cpu_experts()


def _extend_flag() -> None:
    import vllm.config.parallel as parallel
    from pydantic.dataclasses import rebuild_dataclass

    config = parallel.ParallelConfig
    names = typing.Literal[(*typing.get_args(parallel.All2AllBackend), NAME)]  # type: ignore[valid-type]
    parallel.All2AllBackend = names
    config.__annotations__["all2all_backend"] = names
    config.__dataclass_fields__["all2all_backend"].type = names
    rebuild_dataclass(config, force=True, _types_namespace=vars(parallel))
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is not None:
        arguments.All2AllBackend = names
        arguments._compute_kwargs.cache_clear()
        _wrap_arguments(arguments.EngineArgs)


def _wrap_arguments(engine_args: Any) -> None:
    """The default batch size depends on the family, hence on kv_role, which ParallelConfig does not know."""
    original = engine_args.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        transfer = self.kv_transfer_config
        token = _kv_role.set(transfer.get("kv_role") if isinstance(transfer, dict) else getattr(transfer, "kv_role", None))
        try:
            return original(self, *args, **kwargs)
        finally:
            _kv_role.reset(token)

    engine_args.create_engine_config = create_engine_config


def _extend_properties() -> None:
    from vllm.config.parallel import ParallelConfig

    def sequence_parallel(config: Any) -> bool:
        both = config.tensor_parallel_size > 1 and config.data_parallel_size > 1
        return config.all2all_backend == NAME and config.enable_expert_parallel and both

    def batched(config: Any) -> bool:
        # Asked for the default batch alone, by which buffers and uncounted rows are sized in either layout.
        return config.all2all_backend == NAME and is_decode(_kv_role.get())

    _also(ParallelConfig, "use_sequence_parallel_moe", sequence_parallel)
    _also(ParallelConfig, "use_batched_dp_moe", batched)


def _wrap_config() -> None:
    """Check the whole configuration, and let vLLM's own checks by name see the backend that ours resembles.

    Every engine process runs this at its start, a worker does not.
    """
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    original = VllmConfig.__post_init__

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        parallel = self.parallel_config
        if parallel.all2all_backend != NAME:
            return original(self, *args, **kwargs)
        choice = choose(self)
        parallel.all2all_backend = choice.alias
        try:
            original(self, *args, **kwargs)
        finally:
            parallel.all2all_backend = NAME
        if not parallel.worker_extension_cls:  # another one is the user's; then graphs cannot be captured anew
            parallel.worker_extension_cls = EXTENSION
        require_room(choice, self)
        if current_platform.is_cpu():
            shared_cores.rest_while_polling()

    VllmConfig.__post_init__ = post_init


def _wrap_communicator() -> None:
    """The base class of every platform: set our manager and switch the subclass's own chain of names off."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.platforms import current_platform

    original = DeviceCommunicatorBase.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_all2all and self.all2all_backend == NAME:
            from server_plugins.vllm.manager import EpManager

            self.all2all_manager = EpManager(self.cpu_group)
            self.use_all2all = False
            install_moe(self.all2all_manager)
            if current_platform.is_cpu():
                shared_cores.rest_in_worker()

    DeviceCommunicatorBase.__init__ = init


def _extend_moe_properties(manager: Any) -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    _also(FusedMoEParallelConfig, "use_batched_activation_format", lambda c: _ours(c) and manager.batched)
    _also(FusedMoEParallelConfig, "needs_round_robin_routing_tables", _ours)


def _wrap_experts_choice(manager: Any) -> None:
    """Experts judge a backend by name; ours hands them the formats of one of vLLM's own."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk

    original = mk.FusedMoEExperts.is_supported_config

    @functools.wraps(original)
    def is_supported_config(cls: Any, moe_config: Any, *args: Any, **kwargs: Any) -> Any:
        if _ours(moe_config.moe_parallel_config):
            moe_config = copy.copy(moe_config)
            moe_config.moe_parallel_config = copy.copy(moe_config.moe_parallel_config)
            moe_config.moe_parallel_config.all2all_backend = manager.choice.formats
        return original(cls, moe_config, *args, **kwargs)

    mk.FusedMoEExperts.is_supported_config = staticmethod(is_supported_config)


def _replace_prepare_finalize() -> None:
    import vllm.model_executor.layers.fused_moe.all2all_utils as utils

    original = utils.maybe_make_prepare_finalize

    @functools.wraps(original)
    def maybe_make_prepare_finalize(
        moe: Any,
        quant_config: Any,
        routing_tables: Any = None,
        allow_new_interface: bool = False,
        use_monolithic: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not _ours(moe.moe_parallel_config):
            return original(moe, quant_config, routing_tables, allow_new_interface, use_monolithic, *args, **kwargs)
        if use_monolithic:
            raise RuntimeError(
                f"--all2all-backend {NAME} hands rows to the experts itself, but --moe-backend {moe.moe_backend} "
                "chose experts that route on their own; choose --moe-backend triton or deep_gemm"
            )
        from server_plugins.vllm.prepare_finalize import EpBatched, EpStandard

        manager = utils.get_ep_all2all_manager()
        return (EpBatched if manager.batched else EpStandard)(manager, moe, quant_config, routing_tables)

    for module in list(sys.modules.values()):
        # vars(): asking a lazy module for an attribute would import what it stands for.
        if isinstance(module, ModuleType) and vars(module).get("maybe_make_prepare_finalize") is original:
            module.maybe_make_prepare_finalize = maybe_make_prepare_finalize


def _round_up_hidden_size() -> None:
    import vllm.model_executor.layers.fused_moe.all2all_utils as utils

    original = utils.maybe_roundup_layer_hidden_size

    @functools.wraps(original)
    def maybe_roundup_layer_hidden_size(hidden_size: int, act_dtype: Any, moe_parallel_config: Any) -> int:
        if _ours(moe_parallel_config):
            return align_up(hidden_size, HIDDEN_MULTIPLE)
        return original(hidden_size, act_dtype, moe_parallel_config)

    utils.maybe_roundup_layer_hidden_size = maybe_roundup_layer_hidden_size


def _allow_shared_experts_overlap() -> None:
    """With EPLB on, vLLM overlaps shared experts only for backends it knows to share no state with them; so does ours."""
    try:
        from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts as cls
    except ImportError:  # an older vLLM, which runs them apart
        return
    original = cls._disable_shared_experts_overlap.fget

    def disabled(self: Any) -> bool:
        if _ours(self._moe_config.moe_parallel_config):
            return getattr(self._layer, "shard_sequence_parallel", False)
        return original(self)

    cls._disable_shared_experts_overlap = property(disabled)


def _add_cpu_experts() -> None:
    import vllm.model_executor.layers.fused_moe.oracle.unquantized as oracle

    from server_plugins.vllm.cpu_experts import CPUBatchedExperts

    original = oracle.backend_to_kernel_cls

    @functools.wraps(original)
    def backend_to_kernel_cls(backend: Any) -> Any:
        found = original(backend)
        return [*found, CPUBatchedExperts] if backend == oracle.UnquantizedMoeBackend.CPU else found

    oracle.backend_to_kernel_cls = backend_to_kernel_cls


def _ours(parallel: Any) -> bool:
    return parallel.use_all2all_kernels and parallel.all2all_backend == NAME


def _also(cls: Any, name: str, extra: Callable[[Any], bool]) -> None:
    """Make a property true where ``extra`` is."""
    original = cls.__dict__[name].fget
    setattr(cls, name, property(functools.wraps(original)(lambda self: original(self) or extra(self))))
