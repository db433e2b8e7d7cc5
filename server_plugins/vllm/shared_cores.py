"""Manners for ranks that share the cores of one CPU. On a GPU host each rank has cores of its own, and nothing changes.

Both vLLM and NIXL poll without a rest. With more pollers than cores they take most of the time from the ranks that
compute; and on Linux 6.18 a thread that calls sched_yield in a loop can keep another one waiting for minutes.
"""

import sys
import time
from typing import Any

REST_S = 50e-6
NIXL_WAIT_US = 10_000


def rest_in_worker() -> None:
    """In a worker, whose configuration is the current one."""
    from vllm.config import get_current_vllm_config

    rest_while_polling()
    transfer = get_current_vllm_config().kv_transfer_config
    if transfer is not None and transfer.kv_connector == "NixlConnector":
        let_nixl_wait()


def rest_while_polling() -> None:
    """The queues between an engine and its workers sleep between two looks instead of yielding. Idempotent."""
    import vllm.distributed.device_communicators.shm_broadcast as queues

    queues.sched_yield = _rest


def let_nixl_wait() -> None:
    """NIXL's progress threads wait for an event, at most NIXL_WAIT_US; its Python API fixes that wait to 0."""
    from nixl._api import nixl_agent

    bindings = sys.modules[nixl_agent.__module__].nixlBind
    original: Any = bindings.nixlAgentConfig

    class Config(original):
        @property
        def pthrDelay(self) -> int:
            return original.pthrDelay.fget(self)

        @pthrDelay.setter
        def pthrDelay(self, us: int) -> None:
            original.pthrDelay.fset(self, us or NIXL_WAIT_US)

    bindings.nixlAgentConfig = Config


def _rest() -> None:
    time.sleep(REST_S)
