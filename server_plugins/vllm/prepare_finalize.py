"""vLLM's prepare (dispatch) and finalize (combine) over one EpBuffer, for its two activation formats."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input, normalize_batched_scales_shape
from vllm.platforms import current_platform
from vllm.v1.worker.ubatching import (
    dbo_enabled,
    dbo_maybe_run_recv_hook,
    dbo_switch_to_comm,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)

from ep_backend.buffer import EpBuffer
from ep_backend.dispatched import Dispatched, Handle
from ep_backend.layout import SCALE_GROUP
from ep_backend.modes import Family, Layout, Mode
from server_plugins.vllm.manager import EpManager

log = init_logger("vllm.ep_backend")

Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Step: TypeAlias = mk.ReceiverType | tuple[Callable[[], None], mk.ReceiverType]


class EpPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """What both formats share. All MoE layers of one shape use one buffer; a dispatch is answered before the next one
    of its micro-batch."""

    layout: Layout

    def __init__(self, manager: EpManager, moe: Any, quant_config: Any, tables: Tables | None) -> None:
        super().__init__()
        self.manager = manager
        self.moe = moe
        self.limits = manager.limits(moe)
        if quant_config is not None and isinstance(quant_config.quant_dtype, str):
            raise ValueError(
                f"activations quantised to {quant_config.quant_dtype} are not supported; use fp8 or unquantised experts, "
                "or another --all2all-backend"
            )
        self.fp8 = manager.choice.settings.fp8 and quant_config is not None and _is_fp8_block128(quant_config)
        self.payload = "fp32" if moe.in_dtype == torch.float32 else "bf16"
        self.buffer: EpBuffer | None = None
        self._in_flight: dict[int, tuple[Mode, Handle]] = {}
        self._uncounted = self.layout is Layout.COMPACT and manager.choice.family is Family.DECODE  # which waits for no count
        self._sized: set[int] = set()  # lanes that have run
        self._to_physical = tables[0] if tables is not None else None
        self._to_global = tables[1] if tables is not None else None

    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """The experts are known now, and with them what rows are on the wire: make the buffer, before memory profiling."""
        self.payload = self._payload(fused_experts)
        moe, manager = self.moe, self.manager
        self.buffer = manager.buffer(moe.hidden_dim, moe.num_experts, moe.experts_per_token, self.payload, self.limits.capacity)
        mode = manager.mode_now(self.limits)
        log.info_once(
            "ep_backend: EP size %d (%d nodes x %d), mode %s (wish %s), %s rows, dispatch dtype %s, experts %s, %s fabric",
            manager.world_size,
            manager.nodes,
            manager.gpus_per_node,
            mode.value,
            manager.flip.state()["mode"],
            self.layout.value,
            self.payload,
            type(fused_experts).__name__,
            self.buffer.config.fabric,
        )

    def num_dispatchers(self) -> int:
        return self.manager.world_size

    def output_is_reduced(self) -> bool:
        return True

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def supports_async(self) -> bool:
        return True

    def prepare(self, *args: Any, **kwargs: Any) -> mk.PrepareResultType:
        return _finish(self.prepare_async(*args, **kwargs))

    def finalize(self, *args: Any) -> None:
        _finish(self.finalize_async(*args))

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Step:
        if apply_router_weight_on_input:
            if topk_ids.size(1) != 1:
                raise ValueError(f"router weights on the input need top-1 routing, this is top-{topk_ids.size(1)}")
            a1 = a1 * topk_weights.to(a1.dtype)
        assert self.buffer is not None
        mode = self.manager.mode_now(self.limits)
        lane = self.manager.lane
        x, cast = self._outgoing(a1, quant_config)
        if not mode.spec.hook:
            dbo_yield_and_switch_from_compute_to_comm()
            _used_here(x, topk_ids, topk_weights)
        sent = self.buffer.dispatch(
            x,
            _mapped(topk_ids, self._to_physical),
            self._weights(topk_weights, apply_router_weight_on_input),
            mode=mode,
            layout=self.layout,
            lane=lane,
            fp8=cast,
            return_hook=mode.spec.hook and dbo_enabled(),  # else nothing runs before the hook, and one launch does it all
            host_counts=not self._uncounted,
            most_tokens=self._most_tokens(lane) if self._uncounted else None,
            sms=self.manager.sms,
        )
        if not mode.spec.hook:
            dbo_switch_to_compute_sync()
        self._in_flight[lane] = mode, sent.handle

        def receive() -> mk.PrepareResultType:
            _used_here(sent.rows, sent.scales, sent.counts, sent.topk_ids, sent.topk_weights)
            return self._incoming(sent, quant_config, defer_input_quant)

        return receive if sent.hook is None else (sent.hook, receive)

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> Step:
        assert self.buffer is not None
        mode, handle = self._in_flight.pop(self.manager.lane)
        y = self._answer(fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl)
        if mode.spec.hook:
            dbo_maybe_run_recv_hook()
            _, hook = self.buffer.combine(y, handle, out=output, return_hook=True)
            return hook, _nothing
        dbo_yield_and_switch_from_compute_to_comm()
        _used_here(y, output)
        self.buffer.combine(y, handle, out=output)
        dbo_switch_to_compute()

        def receive() -> None:
            dbo_switch_to_comm()
            dbo_yield_and_switch_from_comm_to_compute()

        return receive

    def _most_tokens(self, lane: int) -> int:
        """That any rank sends in this step; under graphs vLLM pads it to one size on all of them. A lane's first step has room
        for all there can be: vLLM's workspaces have the size of the largest step, and grow no more once graphs are captured."""
        if lane in self._sized:
            return self.manager.tokens_now(self.limits)
        self._sized.add(lane)
        return self.limits.tokens

    def _payload(self, experts: mk.FusedMoEExperts) -> str:
        """What rows are on the wire for these experts."""
        raise NotImplementedError

    def _outgoing(
        self, a1: torch.Tensor, quant_config: Any
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], Literal["fp32", "ue8m0"] | None]:
        """What dispatch sends, and the cast it does on the way."""
        raise NotImplementedError

    def _weights(self, weights: torch.Tensor, already_applied: bool) -> torch.Tensor:
        raise NotImplementedError

    def _incoming(self, sent: Dispatched, quant_config: Any, defer_input_quant: bool) -> mk.PrepareResultType:
        """What the experts get."""
        raise NotImplementedError

    def _answer(
        self, y: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, applied: bool, impl: mk.TopKWeightAndReduce
    ) -> torch.Tensor:
        """What combine sends back."""
        raise NotImplementedError


class EpStandard(EpPrepareAndFinalize):
    """One row a received token; the experts weight and sum it here, combine sums over ranks."""

    layout = Layout.COMPACT

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def _payload(self, experts: mk.FusedMoEExperts) -> str:
        return "fp8" if self.fp8 and not experts.expects_unquantized_inputs else self.payload

    def _outgoing(self, a1: torch.Tensor, quant_config: Any) -> tuple[Any, None]:
        if self.payload != "fp8":
            return a1, None
        if not len(a1):  # vLLM's kernel cannot be launched for no rows
            return (a1.to(quant_config.quant_dtype), a1.new_empty((0, a1.size(1) // SCALE_GROUP), dtype=torch.float32)), None
        return moe_kernel_quantize_input(
            a1,
            quant_config.a1_scale,
            quant_config.quant_dtype,
            quant_config.per_act_token_quant,
            quant_config.block_shape,
        ), None

    def _weights(self, weights: torch.Tensor, already_applied: bool) -> torch.Tensor:
        return weights

    def _incoming(self, sent: Dispatched, quant_config: Any, defer_input_quant: bool) -> mk.PrepareResultType:
        rows, scales = _quantised(sent, quant_config, defer_input_quant)
        counts = mk.ExpertTokensMetadata(expert_num_tokens=sent.counts, expert_num_tokens_cpu=None)
        assert sent.topk_ids is not None
        return rows, scales, counts, self._ids(sent.topk_ids), sent.topk_weights

    def _ids(self, local: torch.Tensor) -> torch.Tensor:
        """Ids as the experts want them, for slots of other ranks too."""
        if current_platform.is_cpu():
            # They index this rank's weights and know no expert_map; such a slot has weight 0.
            return local.clamp(min=0)
        # They read expert_map at every id, and find -1 at an expert of another rank, as the one before this rank's first.
        first = self.manager.rank * self.moe.num_local_experts
        return _mapped((local + first).remainder(self.moe.num_experts), self._to_global)

    def _answer(
        self, y: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, applied: bool, impl: mk.TopKWeightAndReduce
    ) -> torch.Tensor:
        if not y.numel():
            return y
        if isinstance(impl, TopKWeightAndReduceDelegate):
            impl = TopKWeightAndReduceContiguous()
        return impl.apply(None, y, weights, ids, applied)


class EpBatched(EpPrepareAndFinalize):
    """Rows sorted into [local experts, ranks x max_tokens]; combine weights and sums."""

    layout = Layout.MASKED

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        return max(self.limits.capacity.values())

    def _payload(self, experts: mk.FusedMoEExperts) -> str:
        if not self.fp8:
            return self.payload
        return "fp8_ue8m0" if experts.supports_packed_ue8m0_act_scales() else "fp8"

    def _outgoing(self, a1: torch.Tensor, quant_config: Any) -> tuple[Any, Literal["fp32", "ue8m0"] | None]:
        casts: Mapping[str, Literal["fp32", "ue8m0"]] = {"fp8": "fp32", "fp8_ue8m0": "ue8m0"}
        return a1, casts.get(self.payload)

    def _weights(self, weights: torch.Tensor, already_applied: bool) -> torch.Tensor:
        return torch.ones_like(weights) if already_applied else weights

    def _incoming(self, sent: Dispatched, quant_config: Any, defer_input_quant: bool) -> mk.PrepareResultType:
        rows, scales = _quantised(sent, quant_config, defer_input_quant)
        scales = normalize_batched_scales_shape(scales, rows.shape[0])
        counts = mk.ExpertTokensMetadata(expert_num_tokens=sent.counts, expert_num_tokens_cpu=None)
        return rows, scales, counts, None, None

    def _answer(
        self, y: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, applied: bool, impl: mk.TopKWeightAndReduce
    ) -> torch.Tensor:
        if not isinstance(impl, TopKWeightAndReduceDelegate):
            raise TypeError(f"{type(impl).__name__} weights rows itself, but combine does that in this format")
        return y


def _quantised(sent: Dispatched, quant_config: Any, defer: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Received rows and scales, quantised here if they were not on the wire and the experts do not do it themselves."""
    rows, scales = sent.rows, sent.scales
    if scales is not None or defer or quant_config.quant_dtype is None or not rows.numel():
        return rows, scales
    if quant_config.is_per_tensor and quant_config.a1_scale is None:
        _clear_unreceived(sent)  # the one scale is the largest value's, whatever lay in this memory before
    flat, scales = moe_kernel_quantize_input(
        rows.flatten(0, -2),
        quant_config.a1_scale,
        quant_config.quant_dtype,
        quant_config.per_act_token_quant,
        quant_config.block_shape,
    )
    return flat.view(rows.shape), scales


def _clear_unreceived(sent: Dispatched) -> None:
    if sent.topk_ids is None:
        received = torch.arange(sent.rows.shape[1], device=sent.rows.device) < sent.counts[:, None]
    else:
        received = (sent.topk_ids >= 0).any(1)
    sent.rows.masked_fill_(~received.unsqueeze(-1), 0)


def _is_fp8_block128(quant_config: Any) -> bool:
    block = quant_config.block_shape
    fp8 = current_platform.fp8_dtype()
    return quant_config.quant_dtype == fp8 and block is not None and list(block) == [SCALE_GROUP, SCALE_GROUP]


def _mapped(ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """Ids through a placement table; -1 stays."""
    if table is None:
        return ids
    return torch.where(ids < 0, ids, table[ids.clamp(min=0)].to(ids.dtype))


def _finish(step: Step) -> Any:
    hook, receive = step if isinstance(step, tuple) else (None, step)
    if hook is not None:
        hook()
    return receive()


def _nothing() -> None:
    pass


def _used_here(*tensors: torch.Tensor | tuple[torch.Tensor, ...] | None) -> None:
    """Under micro-batching a tensor of one stream is used on the other: the allocator must not reuse it too early."""
    if not dbo_enabled():
        return
    for tensor in tensors:
        if isinstance(tensor, tuple):
            _used_here(*tensor)
        elif tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())
