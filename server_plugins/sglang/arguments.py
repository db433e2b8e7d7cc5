"""The flag in SGLang's arguments and in their resolution, in every process. Nothing changes for other backends.

The name stands in for `deepep` while SGLang resolves its arguments, because some hundred of its decisions go by that name,
and is put back at the end. So a scheduler in which this plug-in did not load meets an unknown backend and says so, whether
or not DeepEP itself is installed; one in which it did load is told by :mod:`server_plugins.sglang.hooks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from server_plugins.sglang import NAME, choice, compat

log = logging.getLogger("sglang.ep_backend")

ALIAS = "deepep"
SOURCE = NAME  # of what is declared
FIELDS = ("moe_a2a_backend", "speculative_moe_a2a_backend")
_incompatible: str | None = None

Step = Callable[[Any], None]


def install() -> None:
    """Make the value known at once, so that a user of an SGLang that does not fit reads why, not `invalid choice`."""
    global _incompatible
    try:
        compat.require_choices()
        for field in FIELDS:
            choices = compat.choices_of(field)
            if NAME not in choices:
                choices.append(NAME)
        compat.require_resolution()
        compat.wrap_resolution(_first, _a2a, _last)
        compat.hook("sglang.srt.layers.moe.utils.initialize_moe_config", _initialize_moe_config)
    except compat.Incompatible as reason:
        _incompatible = str(reason)
        log.warning("%s", reason)
        compat.refuse_with(_refuse)


def requested(server_args: Any) -> bool:
    """Did the user ask for this backend, for the model or for its draft?"""
    return any(compat.raw(server_args, field) == NAME for field in FIELDS)


def _refuse(server_args: Any, previous: Step) -> None:
    if requested(server_args):
        raise RuntimeError(_incompatible)
    previous(server_args)


def _first(server_args: Any, previous: Step) -> None:
    """Before anything reads the backend: what of the flags can be told now, and the alias."""
    if requested(server_args):
        compat.require_version()
        compat.require_formats()
        a = compat.arguments(server_args)
        choice.require_names(a)
        compat.declare(server_args, SOURCE, **{f: ALIAS for f in FIELDS if getattr(a, f) == NAME})
    previous(server_args)


def _a2a(server_args: Any, previous: Step) -> None:
    """The family decides deepep_mode, and SGLang's own step takes CUDA graphs away from `normal`: so declare it before."""
    if requested(server_args):
        compat.require_hooked()
        chosen = choice.choose(compat.arguments(server_args))
        compat.declare(server_args, SOURCE, deepep_mode=chosen.deepep_mode)
        if not chosen.settings.fp8:
            compat.declare(server_args, SOURCE, deepep_dispatcher_output_dtype="bf16")
    previous(server_args)


def _last(server_args: Any, previous: Step) -> None:
    """Chunk and batch sizes are final now: plan the buffers, and hand the plan to the schedulers."""
    previous(server_args)
    if not requested(server_args):
        return
    a = compat.arguments(server_args)
    model = compat.model_shape(server_args)
    chosen = choice.choose(a)
    plan = choice.plan_for(chosen, a, model.top_k)
    choice.require_room(plan, model.hidden, model.experts, model.top_k, model.dtype, chosen.settings)
    names = {field: NAME for field in FIELDS if compat.raw(server_args, field) == NAME}
    limit = choice.max_running_requests(plan, a)
    if limit is not None:
        log.info("--max-running-requests is %d, the most whose decode tokens fit the buffers", limit)
        names["max_running_requests"] = limit
    compat.declare(server_args, SOURCE, **names, deepep_config=str(plan))
    log.info(
        "%s: EP size %d (%d nodes x %d), role %s, families %s, mode %s, max_tokens %s, %d lanes",
        NAME,
        plan.ranks,
        plan.nodes,
        plan.gpus_per_node,
        plan.role.value,
        " and ".join(f.value for f in plan.families),
        getattr(chosen.settings.mode, "value", chosen.settings.mode),
        ", ".join(f"{m.value}={n}" for m, n in plan.capacity.items()),
        plan.lanes,
    )


def _initialize_moe_config(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In a scheduler, before its model is built: install what reaches into the MoE layers."""
    if compat.published_plan() is not None:
        from server_plugins.sglang import hooks

        hooks.install()
        compat.publish_alias(NAME, ALIAS, FIELDS, *args)
    return original(*args, **kwargs)
