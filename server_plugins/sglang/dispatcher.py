"""SGLang's dispatcher over an EpBuffer, in the two formats that its expert runners know from DeepEP.

deepep_normal: one row a received token, in [N, H]; the runner weights and sums a row's local experts, combine sums over
ranks. deepep_ll: rows by local expert, in [e, R x max_tokens, H]; combine weights and sums. Layouts of rows, scales and
counts are those that DeepEP's tensors have; figures in the docstrings of :class:`ep_backend.dispatched.Dispatched`.
"""

from __future__ import annotations

from enum import Enum, auto
from types import SimpleNamespace
from typing import Any, Literal

import torch
from sglang.srt.batch_overlap.two_batch_overlap import MaybeTboDeepEPDispatcher
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.dp_attention import get_is_extend_in_batch
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.deepep import (
    DeepEPLLDispatchOutput,
    DeepEPNormalDispatchOutput,
    DeepEPPDispatchHooks,
    _deepep_precompile_tp_barrier,
)
from sglang.srt.layers.moe.utils import (
    DeepEPMode,
    DispatcherOutputDtype,
    get_deepep_mode,
    get_deepep_output_dtype,
)

from ep_backend.buffer import EpBuffer
from ep_backend.dispatched import Dispatched, Handle
from ep_backend.layout import align_up
from ep_backend.modes import Family
from server_plugins.sglang.choice import payload_of
from server_plugins.sglang.plan import LAYOUT
from server_plugins.sglang.runtime import Runtime

FAMILY = {DeepEPMode.NORMAL: Family.PREFILL, DeepEPMode.LOW_LATENCY: Family.DECODE}
DEEPEP = {family: mode for mode, family in FAMILY.items()}
GEMM_ALIGNMENT = 128  # rows an expert, as DeepGEMM's contiguous grouped GEMM wants its segments

ScaleFormat = Literal["fp32", "ue8m0"]


class Stage(Enum):
    """Where a sub-batch is between its dispatch and its combine."""

    IDLE = auto()
    DISPATCHING = auto()
    DISPATCHED = auto()
    COMBINING = auto()


class EpDispatcher(BaseDispatcher):
    """One layer and one sub-batch. All layers of one shape share a buffer; the sub-batch is its lane.

    The a-steps only launch, the b-steps wait: modes with a receive hook send in a and receive in b; normal, whose rings need
    both sides at work, does all of it in b. Where nothing runs in between, a does all of it: fewer and shorter kernels.
    """

    expert_mask_gpu = None  # ROCm's runner asks; ids of other ranks are -1 here

    def __init__(self, config: Any, lane: int, runtime: Runtime) -> None:
        super().__init__()
        self.config = config
        self.lane = lane
        self.runtime = runtime
        self.runner_backend = getattr(config, "runner_backend", None)
        self.buffer: EpBuffer | None = None
        self._hooks = DeepEPPDispatchHooks()
        self._stage = Stage.IDLE
        self._clear()

    def payloads(self) -> tuple[str, ...]:
        """What rows of any of the instance's families are on the wire."""
        return tuple(sorted({self._payload(family) for family in self.runtime.plan.families}))

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        self._begin_dispatch(hidden_states, topk_output, apart=bool(self._hooks.hook_dict))
        self._hooks(self)
        return self.dispatch_b()

    def combine(self, combine_input: Any) -> torch.Tensor:
        self._begin_combine(combine_input, apart=False)
        return self.combine_b()

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any) -> None:
        self._begin_dispatch(hidden_states, topk_output, apart=True)

    def _begin_dispatch(self, hidden_states: torch.Tensor, topk_output: Any, apart: bool) -> None:
        self._enter(Stage.IDLE, Stage.DISPATCHING)
        if self.buffer is None:
            raise RuntimeError("this layer has no buffer: its model was not loaded by SGLang's ModelRunner.load_model")
        self._family = FAMILY[get_deepep_mode().resolve(get_is_extend_in_batch())]
        self._mode = self.runtime.mode_for(self._family, self.buffer)
        if self._family is Family.PREFILL and hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "rows of the prefill family cannot be captured in a CUDA graph, for the host reads their counts; use "
                "--cuda-graph-backend-prefill disabled or breakable"
            )
        self._x, self._ids, self._weights = hidden_states, topk_output.topk_ids, topk_output.topk_weights
        _deepep_precompile_tp_barrier()
        if self._mode.spec.hook:
            self._sent = self._send(apart)

    def dispatch_b(self) -> DeepEPNormalDispatchOutput | DeepEPLLDispatchOutput:
        self._enter(Stage.DISPATCHING, Stage.DISPATCHED)
        if self._sent is None:
            self._sent = self._send(apart=False)
        sent, self._sent = self._sent, None  # runners empty rows that they have read, which nobody else may keep
        if sent.hook is not None:
            sent.hook()
        self._handle = sent.handle
        return self._normal(sent) if self._family is Family.PREFILL else self._low_latency(sent)

    def combine_a(self, combine_input: Any) -> None:
        self._begin_combine(combine_input, apart=True)

    def _begin_combine(self, combine_input: Any, apart: bool) -> None:
        self._enter(Stage.DISPATCHED, Stage.COMBINING)
        y, _, weights = combine_input
        if self._family is Family.DECODE and weights.data_ptr() != self._weights.data_ptr():
            raise RuntimeError("the expert runner changed the router weights, but they were already sent with the tokens")
        _deepep_precompile_tp_barrier()
        self._y = y
        if apart and self._mode.spec.hook:
            assert self.buffer is not None
            self._out, self._receive = self.buffer.combine(y, self._handle, return_hook=True)

    def combine_b(self) -> torch.Tensor:
        self._enter(Stage.COMBINING, Stage.IDLE)
        if self._receive is not None:
            self._receive()
        else:
            assert self.buffer is not None
            self._out = self.buffer.combine(self._y, self._handle)
        out = self._out
        self._clear()
        return out

    def register_deepep_dispatch_hook(self, hook: Any) -> Any:
        return self._hooks.register_hook(hook)

    def set_overlap_args(self, combine_overlap_args: Any, meta_overlap_args: Any) -> None:
        raise NotImplementedError(
            "single-batch overlap starts combine while the experts still write; remove --enable-single-batch-overlap"
        )

    def _enter(self, before: Stage, after: Stage) -> None:
        if self._stage is not before:
            raise RuntimeError(
                f"sub-batch {self.lane} is {self._stage.name.lower()}, and only one that is {before.name.lower()} can go "
                f"on to {after.name.lower()}"
            )
        self._stage = after

    def _clear(self) -> None:
        self._x = self._ids = self._weights = self._y = self._out = None
        self._sent: Dispatched | None = None
        self._handle: Handle | None = None
        self._receive: Any = None

    def _send(self, apart: bool) -> Dispatched:
        assert self.buffer is not None
        return self.buffer.dispatch(
            self._x,
            self._ids,
            self._weights.float(),
            mode=self._mode,
            layout=LAYOUT[self._family],
            lane=self.lane,
            fp8=_SCALES.get(self._payload(self._family)),
            return_hook=apart,
            sms=self.runtime.settings.sms,
        )

    def _normal(self, sent: Dispatched) -> DeepEPNormalDispatchOutput:
        """Ids are int64, local, and -1 for experts of other ranks; counts are a list, whole GEMM segments."""
        counts = sent.counts.tolist()
        recorder = get_global_expert_distribution_recorder()
        if recorder.recording:
            recorder.on_deepep_dispatch_normal(counts, **self._sent_by_destination())
        step = GEMM_ALIGNMENT if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM else 1
        return DeepEPNormalDispatchOutput(
            sent.rows,
            sent.scales,
            sent.topk_ids.to(torch.int64),
            sent.topk_weights,
            [align_up(count, step) for count in counts],
        )

    def _low_latency(self, sent: Dispatched) -> DeepEPLLDispatchOutput:
        """Ids and weights are the sender's own; expected_m is a hint, the mean rows of an expert, rounded up."""
        get_global_expert_distribution_recorder().on_deepep_dispatch_low_latency(sent.counts)
        experts = self.config.num_experts
        return DeepEPLLDispatchOutput(
            sent.rows,
            sent.scales,
            self._ids.to(torch.int64),
            self._weights,
            sent.counts,
            (self._ids.numel() * self.runtime.plan.ranks + experts) // experts,
        )

    def _payload(self, family: Family) -> str:
        """FP8 where SGLang would have DeepEP send it to DeepGEMM, else the model's own dtype."""
        asked = SimpleNamespace(
            quant_config=self.quant_config, dispatch_mode=DEEPEP[family], runner_backend=self.runner_backend
        )
        dtype = get_deepep_output_dtype(asked)
        if dtype is DispatcherOutputDtype.FP8 and deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM:
            return "fp8_ue8m0" if deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 else "fp8"
        if dtype not in (DispatcherOutputDtype.FP8, DispatcherOutputDtype.BF16):
            raise ValueError(
                f"rows of {dtype.value} cannot be dispatched; use --deepep-dispatcher-output-dtype bf16 or fp8, or another "
                "--moe-a2a-backend"
            )
        return payload_of(str(self.config.params_dtype).removeprefix("torch."), self.runtime.plan)

    def _sent_by_destination(self) -> dict[str, Any]:
        """How many of this rank's tokens go to each rank, node and expert: what DeepEP's layout kernel counts."""
        plan, experts = self.runtime.plan, self.config.num_experts
        hit = torch.zeros(len(self._ids), experts + 1, dtype=torch.bool, device=self._ids.device)
        hit.scatter_(1, torch.where(self._ids < 0, experts, self._ids).to(torch.int64), True)
        hit = hit[:, :experts]
        by_rank = hit.unflatten(1, (plan.ranks, experts // plan.ranks)).any(-1)
        by_node = by_rank.unflatten(1, (plan.nodes, plan.gpus_per_node)).any(-1)
        return {
            "num_tokens_per_rank": by_rank.sum(0, dtype=torch.int32),
            "num_tokens_per_rdma_rank": by_node.sum(0, dtype=torch.int32) if plan.nodes > 1 else None,
            "num_tokens_per_expert": hit.sum(0, dtype=torch.int32),
        }


class EpTboDispatcher(MaybeTboDeepEPDispatcher):
    """What SGLang's layers hold: one dispatcher a sub-batch. They ask for this very base class."""

    def __init__(self, config: Any, runtime: Runtime) -> None:
        BaseDispatcher.__init__(self)
        self._inners = [EpDispatcher(config, lane, runtime) for lane in range(runtime.plan.lanes)]
        for inner in self._inners:
            runtime.enrol(inner)


_SCALES: dict[str, ScaleFormat] = {"fp8": "fp32", "fp8_ue8m0": "ue8m0"}
