"""Every way in which SGLang 0.5.17 to 0.5.23 differ, and is this SGLang one that the hooks fit?

Three styles of resolving arguments: registered steps (from 0.5.20), one pipeline function (0.5.19), and methods that write
into ServerArgs (to 0.5.18). Interfaces are asked first, the version only once the backend is chosen.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ep_backend.deployment.batches import draft_rows
from ep_backend.deployment.engines import SUPPORTED
from server_plugins.sglang import NAME
from server_plugins.sglang.choice import Arguments
from server_plugins.sglang.plan import Plan

FIRST, BEYOND = SUPPORTED["sglang"]
OVERRIDE = "EP_BACKEND_ALLOW_UNTESTED_SGLANG"

STEPS = ("handle_mega_moe", "handle_a2a_moe", "validate_deepep_v2_dispatch_token_budget")
"""The first step that reads the backend, the one of the backends, and the last."""
PIPELINE = "sglang.srt.arg_groups.pipeline.run_resolution_pipeline"
PIPELINE_A2A = "sglang.srt.arg_groups.moe_hook.handle_a2a_moe"
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"

ROWS = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights")
ANSWER = ("hidden_states", "topk_ids", "topk_weights")
FORMATS = {
    "DeepEPNormalDispatchOutput": (*ROWS, "num_recv_tokens_per_expert"),
    "DeepEPLLDispatchOutput": (*ROWS, "masked_m", "expected_m"),
    "DeepEPNormalCombineInput": ANSWER,
    "DeepEPLLCombineInput": ANSWER,
}
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
ASKED = "_ep_backend_asked"  # where resolving overwrites fields: what the user had asked for

Step = Callable[[Any], None]
Wrapped = Callable[[Any, Step], None]
_hooked: set[str] = set()


class Incompatible(Exception):
    """What this SGLang lacks."""


@dataclass(frozen=True)
class ModelShape:
    hidden: int
    experts: int
    top_k: int
    dtype: str


def version() -> str:
    return importlib.metadata.version("sglang")


def require_version() -> None:
    """RuntimeError outside the tested range, unless the override is set."""
    from packaging.version import Version

    if not Version(FIRST) <= Version(Version(version()).base_version) < Version(BEYOND) and os.environ.get(OVERRIDE) != "1":
        raise RuntimeError(
            f"--moe-a2a-backend {NAME} is made for SGLang {FIRST} to {BEYOND} (exclusive), this is {version()}; "
            f"install one of those, choose another backend, or set {OVERRIDE}=1 to try"
        )


def require_choices() -> None:
    for field in ("moe_a2a_backend", "speculative_moe_a2a_backend"):
        _require(isinstance(choices_of(field), list), f"ServerArgs.{field} has no list of choices")


def require_resolution() -> None:
    """The places where arguments are resolved."""
    if resolution() == "steps":
        from sglang.srt.arg_groups.resolution_hooks import _OVERRIDABLE_HOOKS

        missing = sorted(set(STEPS) - set(_OVERRIDABLE_HOOKS))
        _require(not missing, f"resolution has no steps {', '.join(missing)}")
    elif resolution() == "methods":
        from sglang.srt.server_args import ServerArgs

        for method in ("__post_init__", "_handle_a2a_moe"):
            _require(callable(getattr(ServerArgs, method, None)), f"ServerArgs has no {method}")


def require_formats() -> None:
    """RuntimeError naming what the MoE layers lack; the dispatcher stands on it."""
    import sglang.srt.layers.moe.token_dispatcher.deepep as deepep
    from sglang.srt.batch_overlap.two_batch_overlap import MaybeTboDeepEPDispatcher
    from sglang.srt.layers.moe.fused_moe_triton.layer import create_moe_dispatcher
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher

    try:
        for name, fields in FORMATS.items():
            found = getattr(getattr(deepep, name, None), "_fields", None)
            _require(found == fields, f"{name} has the fields {found}, not {fields}")
        found = BaseDispatcher.__abstractmethods__
        _require(found == {"dispatch", "combine"}, f"a dispatcher must define {sorted(found)}, not combine and dispatch")
        found = list(inspect.signature(create_moe_dispatcher).parameters)[:1]
        _require(found == ["moe_runner_config"], f"create_moe_dispatcher takes {found}, not moe_runner_config first")
        source = inspect.getsource(MaybeTboDeepEPDispatcher)
        _require("_inners" in source and "tbo_subbatch_index" in source, "MaybeTboDeepEPDispatcher has no _inners")
    except Incompatible as reason:
        raise RuntimeError(str(reason)) from None


def require_hooked() -> None:
    """RuntimeError if SGLang failed to apply a hook, which it only logs."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted(_hooked - HookRegistry._patched)
    if missing:
        raise RuntimeError(f"{NAME} is not installed whole: SGLang did not hook {', '.join(missing)}; its log says why")


def hook(target: str, around: Callable[..., Any]) -> None:
    """``around(original, *args, **kwargs)`` instead of the target, once hooks are applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _hooked.add(target)
    HookRegistry.register(target, around, HookType.AROUND)


def apply_hooks() -> None:
    """Apply what was registered since; RuntimeError if one failed."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    require_hooked()


def choices_of(field: str) -> Any:
    """The very list that the parser reads."""
    from sglang.srt.arg_groups.arg_utils import _unwrap_annotated
    from sglang.srt.server_args import ServerArgs

    hint = typing.get_type_hints(ServerArgs, include_extras=True)[field]
    if isinstance(ServerArgs.__annotations__.get(field), str):
        ServerArgs.__annotations__[field] = hint  # else every reader makes a list of its own from the text
    return getattr(_unwrap_annotated(hint)[1], "choices", None)


def resolution() -> str:
    """How this SGLang resolves: by "steps", "pipeline" or "methods"."""
    if importlib.util.find_spec("sglang.srt.arg_groups.resolution_hooks"):
        return "steps"
    return "pipeline" if importlib.util.find_spec("sglang.srt.arg_groups.pipeline") else "methods"


def refuse_with(refuse: Wrapped) -> None:
    """Say no from whatever place of resolving there is."""
    if resolution() != "steps":
        hook(_whole(), lambda original, server_args: refuse(server_args, original))
        return
    from sglang.srt.arg_groups.resolution_hooks import _OVERRIDABLE_HOOKS, register_resolution_hook

    for name in set(STEPS) & set(_OVERRIDABLE_HOOKS):
        register_resolution_hook(name)(refuse)


def wrap_resolution(first: Wrapped, a2a: Wrapped, last: Wrapped) -> None:
    """Wrap the first step of resolving, the one of the backends, and the last one."""
    if resolution() == "steps":
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        for name, wrapped in zip(STEPS, (first, a2a, last), strict=True):
            register_resolution_hook(name)(wrapped)
        return
    hook(_whole(), lambda original, server_args: first(server_args, lambda s: last(s, original)))
    target = f"{SERVER_ARGS}._handle_a2a_moe" if resolution() == "methods" else PIPELINE_A2A
    hook(target, lambda original, server_args: a2a(server_args, original))


def raw(server_args: Any, field: str) -> Any:
    """What the user gave."""
    return getattr(server_args, ASKED, {}).get(field, getattr(server_args, field))


def declare(server_args: Any, source: str, **fields: Any) -> None:
    """Resolve fields to these values."""
    if not fields:
        return
    if resolution() != "methods":
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(server_args, source, **fields)
        return
    asked = getattr(server_args, ASKED, {})
    object.__setattr__(server_args, ASKED, {f: getattr(server_args, f) for f in fields} | asked)
    for field, value in fields.items():
        object.__setattr__(server_args, field, value)


def arguments(server_args: Any) -> Arguments:
    """The arguments as resolved so far."""
    view = server_args
    if resolution() != "methods":
        from sglang.srt.arg_groups.overrides import resolving_view

        view = resolving_view(server_args)
    plain = {
        name: getattr(view, name)
        for name in Arguments.__dataclass_fields__
        if name not in ("attn_dp_size", "graph_max_bs", "draft_tokens")
    }
    older = view.dp_size if view.enable_dp_attention else 1
    return Arguments(
        **plain,
        attn_dp_size=getattr(view, "attn_dp_size", older) or 1,
        graph_max_bs=_graph_max_bs(view),
        draft_tokens=_draft_tokens(view),
    )


def model_shape(server_args: Any) -> ModelShape:
    """ValueError if the model has no experts."""
    if resolution() == "methods":
        config = server_args.get_model_config()
        redundant = server_args.ep_num_redundant_experts
    else:
        from sglang.srt.arg_groups.model_override_base import model_config_of
        from sglang.srt.arg_groups.overrides import resolving_view

        config = model_config_of(server_args)
        redundant = resolving_view(server_args).ep_num_redundant_experts
    text = config.hf_text_config
    top_k, experts = _first_of(text, TOP_K), _first_of(text, EXPERTS)
    if not top_k or not experts:
        raise ValueError(
            f"--moe-a2a-backend {NAME} needs a mixture-of-experts model, {config.model_path} names no experts; drop the flag"
        )
    return ModelShape(text.hidden_size, experts + (redundant or 0), top_k, str(config.dtype).removeprefix("torch."))


def published_plan() -> Plan | None:
    """The plan in this process's published arguments."""
    from sglang.srt.runtime_context import get_exec

    return Plan.parse(get_exec().moe.deepep_config)


def publish_alias(name: str, alias: str, fields: tuple[str, ...], *server_args: Any) -> None:
    """From here on this process takes the backend for its alias; older versions read ServerArgs itself too."""
    from sglang.srt.runtime_context import get_context, get_exec, get_spec

    now = {"moe_a2a_backend": get_exec().moe.moe_a2a_backend}
    now["speculative_moe_a2a_backend"] = get_spec().speculative_moe_a2a_backend
    get_context().override(name, **{field: alias for field in fields if now[field] == name})
    for record in server_args:
        for field in fields:
            if getattr(record, field) == name:
                object.__setattr__(record, field, alias)


def _whole() -> str:
    """The function that resolves everything."""
    return f"{SERVER_ARGS}.__post_init__" if resolution() == "methods" else PIPELINE


def _graph_max_bs(view: Any) -> int:
    config = view.cuda_graph_config
    if config is None or view.disaggregation_mode == "prefill" or view.device == "cpu":
        return 0
    return 0 if str(config.decode.backend).endswith("disabled") else config.decode.max_bs or 0


def _draft_tokens(view: Any) -> int:
    """Of the target's verification, and of the draft's own steps, which take the target's backend unless told otherwise."""
    if not view.speculative_algorithm:
        return 1
    bounds = [view.speculative_num_draft_tokens, getattr(view, "max_speculative_num_draft_tokens", None)]
    if view.speculative_moe_a2a_backend != "none":
        several = getattr(view, "enable_multi_layer_eagle", False)
        bounds.append(draft_rows(view.speculative_eagle_topk, view.speculative_num_steps, several))
    return max((bound for bound in bounds if bound), default=1)


def _first_of(config: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _require(ok: Any, missing: str) -> None:
    if not ok:
        raise Incompatible(f"SGLang {version()} does not fit {NAME}: {missing}")
