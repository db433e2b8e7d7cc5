"""What a plan says: these classes are also the keys of `ep-backend plan --json`; docs/plan.md explains how to read them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModePlan:
    """One mode in one role. Times are microseconds of one operation in one layer; `_low` and `_high` are the band."""

    copies: float
    """Records a token sends over the bottleneck network: to other nodes, or within one domain to other GPUs."""
    nic_copies: float
    nvlink_copies: float
    record_bytes: int
    combine_record_bytes: int
    nic_bytes: float
    """Bytes that one GPU's NIC port sends in a dispatch."""
    nvlink_bytes: float
    combine_nic_bytes: float
    combine_nvlink_bytes: float
    bandwidth_us: float
    """The part of dispatch_us that the bytes take."""
    dispatch_us: float
    dispatch_us_low: float
    dispatch_us_high: float
    combine_us: float
    combine_us_low: float
    combine_us_high: float
    bottleneck: str
    """nic, nvlink or sms: what paces dispatch."""
    basis: str
    """Of the dispatch time: measured, published or assumed."""
    layer_us: float
    """Dispatch and combine."""
    step_ms: float
    """All MoE layers, nothing overlapped."""
    step_ms_low: float
    step_ms_high: float
    sms: int | None
    """The fewest SMs that keep dispatch's port busy; none while low_latency is in flight over a NIC."""
    buffer_bytes: int
    """Of a rank, were the buffer made for this mode alone."""
    fits: bool | None
    """Does that leave KV memory? Null if the GPU's memory is not known."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one rank, and what fits into them."""

    hbm: int
    fraction: float
    weights: float
    reserve: int
    kv: float
    kv_a_token: float
    kv_tokens: int
    sequences: int
    """Of full context for which the buffer as configured leaves KV memory."""
    dispatched: int
    """The most of them that one decode step may dispatch: max_tokens over the tokens a sequence sends."""
    largest_batch: int
    """The most sequences of full context if one step is to dispatch them all: a buffer for more takes KV memory."""
    largest_max_tokens: int


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One role."""

    engine: str
    ranks: int
    nodes: int
    """Scale-up domains."""
    gpus_per_node: int
    local_experts: int
    tokens: int
    """Rows a rank dispatches at most: ep.max_tokens, or the engine's batch limit."""
    payload: str
    gpus_per_token: float
    nodes_per_token: float
    modes: dict[str, ModePlan]
    mode: str
    """The mode that runs: the file's, or the one that auto picks."""
    auto: str
    auto_reason: str
    buffer_modes: list[str]
    """What the buffer is made for, so that these can be flipped to."""
    buffer: dict[str, Any]
    """As EpBuffer.size_hint() itemises the buffer that the role makes."""
    memory: MemoryPlan | None
    assumptions: list[str]


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole deployment."""

    name: str
    device: str
    gpu: str | None
    calibration: str
    calibration_source: str
    nvlink_gbs: float
    nic_gbs: float | None
    hidden: int
    experts: int
    top_k: int
    moe_layers: int
    parameters: int
    roles: dict[str, RolePlan]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
