"""The plan of a deployment: each role's four modes side by side, the one that auto picks, and the memory of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ep_backend.deployment.batches import capacity, tokens_a_sequence
from ep_backend.deployment.buffers import buffer_config, payload_of
from ep_backend.deployment.engines.traits import FRACTION_FLAGS
from ep_backend.deployment.reach import beyond_kernels
from ep_backend.deployment.resolve import (
    Group,
    ModelUnknown,
    group_of,
    limited_as_grouped,
    shape_of,
    topology,
)
from ep_backend.deployment.schema import Deployment, Role, RoleName, Routing, Topology, modes_of
from ep_backend.layout import Payload
from ep_backend.modes import MODES, Family, Mode
from ep_backend.plan.calibration import OPS, Calibration, Op, calibrations, read_counts, recalibrated
from ep_backend.plan.copies import Copies, exactly, group_limited, measured, uniform
from ep_backend.plan.cost import Cost, Links, Traffic, cost, sm_advice, traffic
from ep_backend.plan.memory import ASSUMED_CONTEXT, RESERVE_BYTES, Memory, memory
from ep_backend.plan.model import GIB, ModelShape
from ep_backend.plan.result import MemoryPlan, ModePlan, Plan, RolePlan
from ep_backend.policy import AUTO, Forward, Situation, decide
from ep_backend.policy import Role as PolicyRole

DEFAULT_CALIBRATION = "link-rate"
# NVLink of the slowest preset, for a topology that gives no rate.
UNKNOWN_NVLINK_GBS = 160.0


def plan(deployment: Deployment) -> Plan:
    """The plan of a deployment without errors; ValueError or ModelUnknown where it does not say enough."""
    machine, shape = topology(deployment.topology), shape_of(deployment.model)
    calibration = _calibration(machine)
    links = Links(machine.nic.gbs if machine.nic else None, machine.nvlink_gbs or UNKNOWN_NVLINK_GBS)
    roles: dict[str, RolePlan] = {}
    for name, role in deployment.roles.items():
        roles[name] = _role_plan(_context(deployment, name, role, machine, shape, calibration, links))
    return Plan(
        name=deployment.name,
        device=machine.device,
        gpu=machine.gpu,
        calibration=calibration.title,
        calibration_source=calibration.source,
        nvlink_gbs=links.nvlink_gbs,
        nic_gbs=links.nic_gbs,
        hidden=shape.hidden,
        experts=shape.experts,
        top_k=shape.top_k,
        moe_layers=shape.moe_layers,
        parameters=shape.parameters,
        roles=roles,
    )


def estimates(deployment: Deployment, name: RoleName) -> dict[str, float]:
    """Seconds a layer of the decode modes, if `auto` has to choose between them; empty where the file says too little."""
    role = dict(deployment.roles.items())[name]
    machines = deployment.topology
    if machines.preset is None or machines.device == "cpu" or role.ep.mode != "auto" or name != "decode":
        return {}
    try:
        modes = plan(deployment).roles[name].modes
    except (ModelUnknown, ValueError):
        return {}
    return {mode.value: modes[mode.value].layer_us / 1e6 for mode in modes_of(name, "auto")}


def copies_of(routing: Routing, shape: ModelShape, group: Group, redundant: int) -> Copies:
    """Copies a token under the file's routing; replicas count as experts of their own."""
    experts = shape.experts + redundant
    if routing.kind == "measured" and routing.nodes_per_token is not None:
        return exactly(experts, shape.top_k, group.ranks, group.nodes, routing.nodes_per_token)
    if routing.kind == "measured" and routing.expert_counts is not None:
        return measured(read_counts(routing.expert_counts), shape.top_k, group.ranks, group.nodes)
    if routing.kind == "group_limited" and limited_as_grouped(shape, group, redundant):
        return group_limited(experts, shape.top_k, group.ranks, group.nodes, shape.groups, shape.top_groups)
    return uniform(experts, shape.top_k, group.ranks, group.nodes)


@dataclass(frozen=True)
class _Context:
    """One role with all that its plan is computed from."""

    deployment: Deployment
    name: RoleName
    role: Role
    machine: Topology
    shape: ModelShape
    calibration: Calibration
    links: Links
    group: Group
    tokens: int
    copies: Copies
    memory: Memory | None


def _context(
    deployment: Deployment,
    name: RoleName,
    role: Role,
    machine: Topology,
    shape: ModelShape,
    calibration: Calibration,
    links: Links,
) -> _Context:
    group, tokens = group_of(deployment, role), capacity(deployment, name, role)
    if role.nodes == 1 and group.nodes > 1:
        links = Links(None, links.nvlink_gbs)
    copies = copies_of(deployment.model.routing, shape, group, role.ep.redundant_experts)
    held = memory(deployment, name, role, shape, tokens) if machine.hbm is not None else None
    return _Context(deployment, name, role, machine, shape, calibration, links, group, tokens, copies, held)


def _role_plan(c: _Context) -> RolePlan:
    modes = {mode.value: _mode_plan(c, mode) for mode in Mode}
    auto, reason = _auto(c, modes)
    return RolePlan(
        engine=c.role.engine,
        ranks=c.group.ranks,
        nodes=c.group.nodes,
        gpus_per_node=c.group.gpus_per_node,
        local_experts=(c.shape.experts + c.role.ep.redundant_experts) // c.group.ranks,
        tokens=c.tokens,
        payload=payload_of(c.deployment, c.role),
        gpus_per_token=c.copies.gpus,
        nodes_per_token=c.copies.nodes,
        modes=modes,
        mode=auto if c.role.ep.mode == "auto" else c.role.ep.mode,
        auto=auto,
        auto_reason=reason,
        buffer_modes=[
            mode.value for mode in modes_of(c.name, c.role.ep.mode, c.group.nodes > 1, c.role.engine, c.role.ep.rail)
        ],
        buffer=buffer_config(c.deployment, c.name, c.role, c.shape, c.tokens).size_hint(),
        memory=_memory_plan(c, c.memory) if c.memory is not None else None,
        assumptions=list(_assumptions(c)),
    )


def _mode_plan(c: _Context, mode: Mode) -> ModePlan:
    flow = traffic(mode, c.copies, c.group.ranks, c.group.nodes, c.calibration.sends_one_an_expert)
    dispatch, combine = (_cost(c, mode, op, flow) for op in OPS)
    config = buffer_config(c.deployment, c.name, c.role, c.shape, c.tokens, [mode])
    buffer = int(config.size_hint()["total"])
    layers_ms = c.shape.moe_layers / 1e3
    return ModePlan(
        copies=flow.nic if c.group.nodes > 1 else flow.nvlink,
        nic_copies=flow.nic,
        nvlink_copies=flow.nvlink,
        record_bytes=dispatch.record_bytes,
        combine_record_bytes=combine.record_bytes,
        nic_bytes=dispatch.nic_bytes,
        nvlink_bytes=dispatch.nvlink_bytes,
        combine_nic_bytes=combine.nic_bytes,
        combine_nvlink_bytes=combine.nvlink_bytes,
        bandwidth_us=dispatch.bandwidth_us,
        dispatch_us=dispatch.us,
        dispatch_us_low=dispatch.low_us,
        dispatch_us_high=dispatch.high_us,
        combine_us=combine.us,
        combine_us_low=combine.low_us,
        combine_us_high=combine.high_us,
        bottleneck=dispatch.bottleneck,
        basis=dispatch.basis,
        layer_us=dispatch.us + combine.us,
        step_ms=(dispatch.us + combine.us) * layers_ms,
        step_ms_low=(dispatch.low_us + combine.low_us) * layers_ms,
        step_ms_high=(dispatch.high_us + combine.high_us) * layers_ms,
        sms=sm_advice(mode, flow, c.group.nodes, c.calibration, c.links),
        buffer_bytes=buffer,
        fits=None if c.memory is None else c.memory.kv_bytes + c.memory.buffer_bytes - buffer > 0,
    )


def _cost(c: _Context, mode: Mode, op: Op, flow: Traffic) -> Cost:
    payload = Payload[payload_of(c.deployment, c.role).upper()]
    hidden, top_k = c.shape.hidden, c.shape.top_k
    return cost(mode, op, c.tokens, flow, c.group.nodes, c.calibration, c.links, payload, hidden, top_k, c.role.ep.sms)


def _auto(c: _Context, modes: dict[str, ModePlan]) -> tuple[str, str]:
    """The mode that the policy's table gives for a full batch, from modes that fit into memory."""
    wished = None if c.role.ep.mode == "auto" else MODES[Mode(c.role.ep.mode)].family
    family = Family(c.name) if c.name != "unified" else wished or Family.PREFILL
    mode = c.role.ep.mode if c.name == "unified" else "auto"
    candidates = modes_of(c.name, mode, c.group.nodes > 1, c.role.engine, c.role.ep.rail)
    situation = Situation(
        PolicyRole(family.value),
        Forward.MIXED,
        c.tokens,
        {mode: c.tokens for mode in candidates if modes[mode.value].fits is not False},
        c.shape.top_k,
        c.group.nodes,
        wish=AUTO,
        estimates={mode: modes[mode.value].layer_us / 1e6 for mode in candidates},
    )
    try:
        decision = decide(situation)
    except ValueError as error:
        return "none", str(error)
    return decision.mode.value, decision.reason


def _memory_plan(c: _Context, held: Memory) -> MemoryPlan:
    return MemoryPlan(
        held.hbm_bytes,
        held.fraction,
        held.weight_bytes,
        held.reserve_bytes,
        held.kv_bytes,
        held.kv_bytes_a_token,
        held.kv_tokens,
        held.sequences,
        c.tokens // tokens_a_sequence(c.role),
        held.largest_batch,
        held.largest_capacity,
    )


def _calibration(machine: Topology) -> Calibration:
    base = calibrations()[machine.calibration or DEFAULT_CALIBRATION]
    return base if machine.bench is None else recalibrated(base, machine.bench)


def _assumptions(c: _Context) -> Iterator[str]:
    routing, shape, held = c.deployment.model.routing, c.shape, c.memory
    if beyond := beyond_kernels(c.deployment, c.role):
        yield f"a plan alone, for engines would refuse to start: the role {beyond}"
    if routing.kind == "uniform":
        limit = f"; the model's limit of {shape.top_groups} in {shape.groups} groups is not used" if shape.groups > 1 else ""
        yield f"routing: every set of {shape.top_k} experts equally likely{limit}"
    elif routing.kind == "group_limited" and not limited_as_grouped(shape, c.group, c.role.ep.redundant_experts):
        yield "routing: uniform, because ranks and groups of experts do not line up"
    else:
        yield f"routing: {routing.kind.replace('_', ' ')}"
    yield f"times: {c.calibration.title}; every rank dispatches a full batch at once on an otherwise idle network"
    assumed = sorted({line.mode.value for line in c.calibration.lines if line.basis == "assumed"})
    if assumed:
        yield f"no data for {', '.join(assumed)}: constants derived from the links, with a wider band"
    if c.deployment.topology.device == "cpu":
        yield "device cpu: these are the times of GPUs with such links, not of this host"
    if c.links.nic_gbs is None and c.group.nodes > 1:
        yield "virtual nodes: what crosses them goes over NVLink"
    if c.machine.nvlink_gbs is None:
        yield f"NVLink: {UNKNOWN_NVLINK_GBS:.0f} GB/s, because topology gives none"
    yield "a step: dispatch and combine of every MoE layer, one after the other, no overlap with compute"
    if held is None:
        yield "memory: not planned, because topology gives no preset and no hbm"
        return
    if not any(c.role.arg(flag) is not None for flag in FRACTION_FLAGS):
        yield f"memory: the engine may use {held.fraction:.2f} of the GPU"
    yield f"memory: {RESERVE_BYTES / GIB:.0f} GiB for context, graphs and activations"
    if held.context is None:
        yield f"memory: sequences of {ASSUMED_CONTEXT} tokens"
