"""One a worker: the buffers of its EP group, the mode they run, and what watches over them."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase
from vllm.distributed.parallel_state import in_the_same_node_as
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from ep_backend.agent import Agent, Identity
from ep_backend.buffer import EpBuffer
from ep_backend.control.flip import Flip
from ep_backend.layout import ceil_div
from ep_backend.modes import Layout, Mode
from ep_backend.policy import Wish, decide
from ep_backend.watchdog import Watchdog
from server_plugins.vllm.choice import Choice, choose, fabric
from server_plugins.vllm.graphs import Graphs

log = init_logger("vllm.ep_backend")

# Without graphs the next call raises, and the engine reports that; with them nothing else would end the worker.
GRACE_S = {"host": 10.0, "nvshmem": 0.0}


@dataclass(frozen=True)
class Limits:
    """Bounds of one layer's calls: max_tokens by mode, top-k, the most tokens that a rank dispatches, and the ranks that share
    a batch (1 without sequence parallelism)."""

    capacity: Mapping[Mode, int]
    top_k: int
    tokens: int
    share: int


class EpManager(All2AllManagerBase):
    """What vLLM keeps in the EP group's communicator."""

    def __init__(self, cpu_group: Any) -> None:
        super().__init__(cpu_group)
        _show_core_log()
        config = get_current_vllm_config()
        self.choice: Choice = choose(config)
        self._most_tokens = config.scheduler_config.max_num_batched_tokens
        self._compilation = config.compilation_config
        self.flip = Flip(self.choice.wish, buffers=lambda: self.buffers, check=self._check_flip)
        captured = current_platform.is_cuda() and self._compilation.cudagraph_mode != CUDAGraphMode.NONE
        self.graphs = Graphs(captured, self.flip, self._check_wish, config.parallel_config.worker_extension_cls)
        self.sms: int | None = self.choice.settings.sms
        per_node = self.choice.settings.gpus_per_node or sum(in_the_same_node_as(cpu_group, source_rank=0))
        if self.world_size % per_node:
            raise ValueError(
                f"{per_node} of the {self.world_size} EP ranks share a node; set gpus_per_node to a divisor, "
                "or give every node the same number of ranks"
            )
        self.gpus_per_node = per_node
        self.buffers: list[EpBuffer] = []
        self._fallbacks: Counter[str] = Counter()
        self._by_shape: dict[tuple[int, int, int, str], EpBuffer] = {}
        self._watchdog = Watchdog(self.failure, grace_s=GRACE_S[fabric()])
        self._watchdog.start()
        self._agent = self._start_agent()

    @property
    def nodes(self) -> int:
        return self.world_size // self.gpus_per_node

    @property
    def batched(self) -> bool:
        """True for rows by expert."""
        return self.choice.layout is Layout.MASKED

    @property
    def lane(self) -> int:
        """The lane of the micro-batch that the calling thread runs."""
        return dbo_current_ubatch_id()

    def buffer(self, hidden: int, num_experts: int, top_k: int, payload: str, capacity: Mapping[Mode, int]) -> EpBuffer:
        """The one buffer of that shape; made at the first call, which is collective and belongs to model loading."""
        shape = (hidden, num_experts, top_k, payload)
        if shape not in self._by_shape:
            arguments = self.choice.buffer_arguments(hidden, num_experts, top_k, capacity, (payload,))
            made = EpBuffer(self.cpu_group, **{**arguments, "gpus_per_node": self.gpus_per_node})
            self._by_shape[shape] = made
            self.buffers.append(made)
            log.info(made.describe())
        return self._by_shape[shape]

    def limits(self, moe: Any) -> Limits:
        """What a layer's calls keep within, from its FusedMoEConfig."""
        batch, top_k, share = moe.max_num_tokens, moe.experts_per_token, moe.sp_size
        return Limits(self.choice.capacity(batch, top_k, self.nodes), top_k, ceil_div(batch, share), share)

    def tokens_now(self, limits: Limits) -> int:
        """Most tokens that any rank dispatches in this step, as vLLM has agreed over all ranks; the limit where it has not."""
        metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
        return ceil_div(int(metadata.num_tokens_across_dp_cpu.max()), limits.share) if metadata is not None else limits.tokens

    def mode_now(self, limits: Limits) -> Mode:
        """The mode of this step, decided from values that are the same on all ranks."""
        tokens = self.tokens_now(limits)
        capture = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        situation = self.choice.situation(self.flip.mode, tokens, limits.capacity, limits.top_k, self.nodes, capture)
        decision = decide(situation)
        if decision.fallback:
            self._fallbacks[decision.fallback] += 1
        return decision.mode

    def failure(self) -> str | None:
        return next((reason for buffer in self.buffers if (reason := buffer.failure())), None)

    def set_num_sms(self, num_sms: int) -> None:
        """The limit in a step of two micro-batches; behind it vLLM gives all there are, and the settings' own holds again."""
        own = self.choice.settings.sms
        if num_sms >= _multiprocessors():
            self.sms = own
        else:
            self.sms = num_sms if own is None else min(num_sms, own)

    def destroy(self) -> None:
        self._watchdog.stop()
        if self._agent is not None:
            self._agent.stop()
        for buffer in self.buffers:
            buffer.destroy()

    def _check_flip(self, wish: Wish) -> None:
        """ValueError if this instance cannot change to the wish between two dispatches."""
        if self.graphs.state()["captured"]:
            raise ValueError("its CUDA graphs replay the mode they captured: they must be captured anew while it is drained")
        self._check_wish(wish)

    def _check_wish(self, wish: Wish) -> None:
        """ValueError if this instance needs a restart to run the wish."""
        for config in (buffer.config for buffer in self.buffers):
            decide(self.choice.situation(wish, self._most_tokens, config.max_tokens, config.top_k, self.nodes))

    def _start_agent(self) -> Agent | None:
        import vllm

        settings = self.choice.settings
        if settings.agent_port is None:
            return None
        return Agent(
            Identity(
                settings.deployment,
                self.choice.role.value,
                self.rank,
                self.world_size,
                self.gpus_per_node,
                f"vllm {vllm.__version__}",
            ),
            host=settings.agent_host,
            port=settings.agent_port + self.rank,
            key=settings.agent_key.get_secret_value() if settings.agent_key else None,
            flip=self.flip,
            buffers=lambda: self.buffers,
            facts=self._facts,
        )

    def _facts(self) -> dict[str, Any]:
        estimates = {mode.value: seconds for mode, seconds in self.choice.settings.estimates.items()}
        return {
            **{"sms": self.sms, "fallbacks": dict(self._fallbacks), "estimates": estimates},
            "graphs": self.graphs.state(),
        }


def _multiprocessors() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def _show_core_log() -> None:
    """ep_backend's own lines go where vLLM's go."""
    core, engine = logging.getLogger("ep_backend"), logging.getLogger("vllm")
    core.handlers = engine.handlers
    core.setLevel(engine.level)
    core.propagate = engine.propagate
