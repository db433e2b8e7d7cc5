"""Flips and status of a running SGLang over its own admin routes.

``POST /set_internal_state`` with ``{"server_args": {...}}``; SGLang hands the request to the scheduler of every rank, and
answers with one boolean an attention-DP group. Values are numbers, for SGLang allows no others here:

- ``{"ep_backend_token": T, "ep_backend_mode": M}``: propose mode M under token T (1 to 255, another than the last one).
  M is an index of :data:`MODES`. True: these ranks carry the proposal from now on, and change at the dispatch that carried
  it on every rank, all of them at the same one; until then nothing changes. False: a rank of the group refuses, and as it
  carries no token, no rank will change; withdraw the token, then ask again.
- ``{"ep_backend_abandon": T}``: withdraw it. No effect on a change that was already agreed on.

``GET /server_info`` answers with ``internal_states``, one an attention-DP group, in no order; each has under
``ep_backend`` what :meth:`Runtime.status` returns: mode wished for and mode executed, counters, the state of a flip, and why
the last request was refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from ep_backend.modes import Mode
from ep_backend.policy import AUTO
from server_plugins.sglang.runtime import Runtime

MODES = (*(mode.value for mode in Mode), AUTO)
TOKEN, MODE, ABANDON = "ep_backend_token", "ep_backend_mode", "ep_backend_abandon"
KEYS = frozenset({TOKEN, MODE, ABANDON})


def apply(runtime: Runtime, request: Mapping[str, float]) -> None:
    """What a request asks of this rank; FlipRefused or ValueError if it cannot be. Unknown keys are not looked at."""
    if ABANDON in request:
        runtime.flip.abandon(_token(request[ABANDON], ABANDON))
    if (TOKEN in request) != (MODE in request):
        raise ValueError(f"{TOKEN} and {MODE} go together; send both")
    if TOKEN in request:
        index = request[MODE]
        if index != int(index) or not 0 <= index < len(MODES):
            choices = ", ".join(f"{i} {name}" for i, name in enumerate(MODES))
            raise ValueError(f"{MODE}={index}; it is one of {choices}")
        runtime.flip.prepare(_token(request[TOKEN], TOKEN), MODES[int(index)])


def _token(value: float, key: str) -> int:
    if value != int(value) or not 1 <= value <= 255:
        raise ValueError(f"{key}={value}; a token is a whole number from 1 to 255")
    return int(value)
