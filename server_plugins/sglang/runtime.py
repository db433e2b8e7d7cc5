"""One a scheduler process: the buffers of its rank, the mode they run, and what watches over them."""

from __future__ import annotations

import atexit
import logging
from typing import TYPE_CHECKING, Any

import torch

from ep_backend.agent import Agent, Identity, rank_status
from ep_backend.buffer import EpBuffer
from ep_backend.control.flip import Flip
from ep_backend.modes import Family, Mode
from ep_backend.policy import AUTO, Wish, decide
from ep_backend.settings import Settings, load_settings
from ep_backend.watchdog import Watchdog
from server_plugins.sglang import compat
from server_plugins.sglang.choice import buffer_arguments
from server_plugins.sglang.plan import Plan, serves

if TYPE_CHECKING:
    from server_plugins.sglang.dispatcher import EpDispatcher

log = logging.getLogger("sglang.ep_backend")

# Without graphs the next call raises, and SGLang reports that; with them nothing else would end the scheduler.
GRACE_S = {"host": 10.0, "nvshmem": 0.0}
_runtime: Runtime | None = None


class Runtime:
    """``group``: the process group that the EP ranks meet in; its store is all that is used."""

    def __init__(self, plan: Plan, settings: Settings, group: Any) -> None:
        self.plan = plan
        self.settings = settings
        self.group = group
        self.rank = torch.distributed.get_rank(group)
        self.refused: str | None = None
        """Why this rank refused the last request that came over SGLang's routes, if it did."""
        self.buffers: list[EpBuffer] = []
        self._by_shape: dict[tuple[Any, ...], EpBuffer] = {}
        self._waiting: list[EpDispatcher] = []
        self.flip = Flip(settings.mode, buffers=lambda: self.buffers, check=self._check_flip)
        self._watchdog = Watchdog(self.failure, grace_s=GRACE_S[plan.fabric])
        self._watchdog.start()
        self._identity = Identity(
            settings.deployment,
            plan.role.value,
            self.rank,
            plan.ranks,
            plan.gpus_per_node,
            f"sglang {compat.version()}",
        )
        self._agent = self._start_agent()

    def enrol(self, dispatcher: EpDispatcher) -> None:
        """A layer's dispatcher, which gets its buffer once the weights are loaded and with them the rows' type is known."""
        self._waiting.append(dispatcher)

    def allocate(self) -> None:
        """Make the buffers of the model just loaded, before SGLang sizes its KV cache. Collective."""
        for dispatcher in self._waiting:
            dispatcher.buffer = self._buffer(dispatcher)
        self._waiting.clear()

    def mode_for(self, family: Family, buffer: EpBuffer) -> Mode:
        """The mode of this batch, decided from values that are equal on all ranks."""
        capture = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        config = buffer.config
        situation = self.plan.situation(
            family,
            self.flip.mode,
            self._agreed_tokens(family),
            config.max_tokens,
            config.top_k,
            self.settings,
            capture,
        )
        return decide(situation).mode

    def failure(self) -> str | None:
        return next((reason for buffer in self.buffers if (reason := buffer.failure())), None)

    def status(self) -> dict[str, Any]:
        """JSON-ready: the agent's status, and what only this engine knows."""
        return {
            **rank_status(self._identity, self.flip, self.buffers),
            "families": [family.value for family in self.plan.families],
            "lanes": self.plan.lanes,
            "refused": self.refused,
        }

    def destroy(self) -> None:
        self._watchdog.stop()
        if self._agent is not None:
            self._agent.stop()
        for buffer in self.buffers:
            buffer.destroy()

    def _buffer(self, dispatcher: EpDispatcher) -> EpBuffer:
        payloads = dispatcher.payloads()
        c = dispatcher.config
        shape = (c.hidden_size, c.num_experts, c.top_k, payloads)
        if shape not in self._by_shape:
            made = EpBuffer(
                self.group,
                **buffer_arguments(self.plan, self.settings, c.hidden_size, c.num_experts, c.top_k, payloads),
            )
            self._by_shape[shape] = made
            self.buffers.append(made)
            log.info("%s", made.describe())
        return self._by_shape[shape]

    def _agreed_tokens(self, family: Family) -> int:
        """Most tokens of any rank in this batch; the limit where SGLang has not exchanged them, or split them in two."""
        from sglang.srt.layers.dp_attention import get_dp_global_num_tokens

        limit = self.plan.tokens[family]
        if self.plan.lanes > 1:
            return limit
        exchanged = get_dp_global_num_tokens()
        return max(exchanged) if exchanged and len(exchanged) == self.plan.ranks else limit

    def _check_flip(self, wish: Wish) -> None:
        """ValueError if this instance needs a restart to run the wish."""
        affected = self.plan.families if wish == AUTO else serves(Mode(wish), self.plan.families)
        if not affected:
            have = " and ".join(family.value for family in self.plan.families)
            raise ValueError(f"mode {Mode(wish).value} does not serve the {have} family it was started with; restart the role")
        if Family.DECODE in affected and self.plan.decode_graphs:
            raise ValueError(
                "its CUDA graphs replay the mode they captured; restart the role, or run it with "
                "--cuda-graph-backend-decode disabled"
            )
        for config in (buffer.config for buffer in self.buffers):
            for family in affected:
                decide(
                    self.plan.situation(family, wish, self.plan.tokens[family], config.max_tokens, config.top_k, self.settings)
                )

    def _start_agent(self) -> Agent | None:
        settings = self.settings
        if settings.agent_port is None:
            return None
        return Agent(
            self._identity,
            host=settings.agent_host,
            port=settings.agent_port + self.rank,
            key=settings.agent_key.get_secret_value() if settings.agent_key else None,
            flip=self.flip,
            buffers=lambda: self.buffers,
        )


def runtime() -> Runtime:
    """This scheduler's; made at the first call, when SGLang's process groups exist."""
    global _runtime
    if _runtime is None:
        from sglang.srt.distributed.parallel_state import get_tp_group

        plan = compat.published_plan()
        assert plan is not None
        _show_core_log()
        _runtime = Runtime(plan, load_settings(), get_tp_group().cpu_group)
        atexit.register(_runtime.destroy)
    return _runtime


def current() -> Runtime | None:
    """This process's runtime, if its model has layers that use the backend."""
    return _runtime


def _show_core_log() -> None:
    """ep_backend's own lines go where SGLang's go."""
    core, root = logging.getLogger("ep_backend"), logging.getLogger()
    core.setLevel(root.level)
