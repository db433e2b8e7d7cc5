"""What reaches into SGLang's schedulers, installed in those whose backend is this one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ep_backend.control.flip import FlipRefused
from server_plugins.sglang import NAME, compat, state
from server_plugins.sglang.runtime import current, runtime

log = logging.getLogger("sglang.ep_backend")

NUM_SMS = 20  # that two-batch overlap leaves to communication in prefill, as for DeepEP
DEEPEP = "sglang.srt.layers.moe.token_dispatcher.deepep"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_installed = False


def install() -> None:
    """Idempotent; RuntimeError if SGLang does not fit, or a hook could not be applied."""
    global _installed
    if _installed:
        return
    _installed = True
    compat.require_formats()
    compat.hook("sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher", _create)
    compat.hook("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _load_model)
    compat.hook(f"{DEEPEP}.DeepEPConfig.get_instance", _deepep_config)
    # A graph's capture and replay tell DeepEP's buffer to change modes and clean itself. There is none, and ours needs neither.
    compat.hook(f"{DEEPEP}.DeepEPBuffer.set_dispatch_mode", _nothing)
    compat.hook(f"{DEEPEP}.DeepEPBuffer.clean_buffer", _nothing)
    compat.hook(f"{SCHEDULER}.get_internal_state", _get_internal_state)
    compat.hook(f"{SCHEDULER}.set_internal_state", _set_internal_state)
    compat.apply_hooks()


def _create(original: Callable[..., Any], moe_runner_config: Any, *args: Any, **kwargs: Any) -> Any:
    """A draft model may use another backend than the target."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    if not get_moe_a2a_backend().is_deepep():
        return original(moe_runner_config, *args, **kwargs)
    from server_plugins.sglang.dispatcher import EpTboDispatcher

    return EpTboDispatcher(moe_runner_config, runtime())


def _load_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    if (here := current()) is not None:
        here.allocate()
    return result


def _deepep_config(original: Callable[..., Any], cls: Any) -> Any:
    here = current()
    sms = here.settings.sms if here is not None else None
    return SimpleNamespace(num_sms=sms or NUM_SMS, normal_dispatch_config=None, normal_combine_config=None)


def _nothing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    pass


def _get_internal_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    answer = original(scheduler, request)
    if (here := current()) is not None:
        answer.internal_state.update({"moe_a2a_backend": NAME, NAME: here.status()})
    return answer


def _set_internal_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """SGLang's own keys go on to it; a request with both kinds is refused whole if one of them is."""
    ours = {key: value for key, value in request.server_args.items() if key in state.KEYS}
    here = current()
    if not ours or here is None:
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    theirs = {key: value for key, value in request.server_args.items() if key not in state.KEYS}
    try:
        if theirs:
            raise ValueError(f"{', '.join(theirs)} cannot travel with {', '.join(ours)}; send two requests")
        state.apply(here, ours)
        here.refused = None
    except (FlipRefused, ValueError) as refusal:
        here.refused = str(refusal)
        log.warning("/set_internal_state: %s", refusal)
        return SetInternalStateReqOutput(updated=False)
    return SetInternalStateReqOutput(updated=True)
