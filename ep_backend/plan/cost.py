"""Time of a dispatch or combine: t = fixed + bytes at the busiest port / effective bandwidth.

Bytes at a port = tokens x copies over that port x record. Ports work at the same time, so the slowest decides; the second
hop of hybrid and normal overlaps the first and adds only to the fixed part. GB/s are 1e9 bytes a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from ep_backend.layout import Payload
from ep_backend.modes import Mode
from ep_backend.plan.calibration import Calibration, Op
from ep_backend.plan.copies import Copies


@dataclass(frozen=True, slots=True)
class Traffic:
    """Records a token puts on its rank's ports, and the busiest receiver's share over the mean."""

    nic: float
    nvlink: float
    handled: float
    """Records the SMs of a rank move for one token: what it sends over NVLink, to itself, and as a relay."""
    nic_skew: float
    nvlink_skew: float


@dataclass(frozen=True, slots=True)
class Links:
    """Effective GB/s of one GPU's ports, where the calibration's line has none."""

    nic_gbs: float | None
    nvlink_gbs: float


@dataclass(frozen=True, slots=True)
class Cost:
    """One operation of one layer."""

    record_bytes: int
    nic_bytes: float
    nvlink_bytes: float
    bandwidth_us: float
    us: float
    low_us: float
    high_us: float
    bottleneck: str
    basis: str


def traffic(mode: Mode, copies: Copies, ranks: int, nodes: int, one_an_expert: bool = False) -> Traffic:
    """Copies by port. `one_an_expert`: low_latency sends NVLink peers a record an expert, as it does over a NIC.

    low_latency and direct go straight to the receiver; hybrid and normal go once to the rail peer of each node, which
    forwards once to each GPU (one in ranks/nodes of them itself).
    """
    per_node = ranks // nodes
    across, beside = (nodes - 1) / nodes, (per_node - 1) / ranks
    if mode in (Mode.HYBRID, Mode.NORMAL):
        forwarded = copies.gpus * (per_node - 1) / per_node
        return Traffic(copies.nodes * across, forwarded, copies.gpus, copies.node_skew, copies.gpu_skew)
    if mode is Mode.DIRECT:
        return Traffic(copies.gpus * across, copies.gpus * beside, copies.gpus, copies.gpu_skew, copies.gpu_skew)
    near = copies.experts if one_an_expert else copies.gpus
    return Traffic(copies.experts * across, near * beside, near, copies.gpu_skew, copies.gpu_skew)


def cost(
    mode: Mode,
    op: Op,
    tokens: int,
    flow: Traffic,
    nodes: int,
    calibration: Calibration,
    links: Links,
    payload: Payload,
    hidden: int,
    top_k: int,
    sms: int | None = None,
) -> Cost:
    """Microseconds of one operation. `sms` None: as many SMs as the port needs."""
    line = calibration.line(mode, op, nodes)
    record = calibration.record_bytes(mode, op, payload, hidden, top_k)
    nic, nvlink = (tokens * copies * record for copies in (flow.nic, flow.nvlink))
    times = {"nvlink": nvlink * flow.nvlink_skew / _bytes_a_us(line.nvlink_gbs or links.nvlink_gbs)}
    if nodes > 1:
        rate = line.nic_gbs or links.nic_gbs
        if rate is None:
            raise ValueError(f"{nodes} nodes but no NIC bandwidth; give topology.nic.gbs")
        times["nic"] = nic * flow.nic_skew / _bytes_a_us(rate)
    if sms and mode is not Mode.LOW_LATENCY:
        times["sms"] = tokens * flow.handled * record / _bytes_a_us(sms * calibration.sm_gbs[op])
    bottleneck = max(times, key=lambda port: times[port])
    us = line.fixed_us + times[bottleneck]
    return Cost(
        record,
        nic,
        nvlink,
        times[bottleneck],
        us,
        us * (1 - line.error),
        us * (1 + line.error),
        bottleneck,
        line.basis,
    )


def sm_advice(mode: Mode, flow: Traffic, nodes: int, calibration: Calibration, links: Links) -> int | None:
    """The fewest SMs, even, that keep dispatch's busiest port busy; None where copies take none (low_latency over a NIC)."""
    if mode is Mode.LOW_LATENCY and nodes > 1:
        return None
    line = calibration.line(mode, "dispatch", nodes)
    port = flow.nvlink / (line.nvlink_gbs or links.nvlink_gbs)
    if nodes > 1:
        port = max(port, flow.nic / (line.nic_gbs or links.nic_gbs or 1.0))
    if not port:
        return 2
    needed = flow.handled / (port * calibration.sm_gbs["dispatch"])
    return 2 * max(1, -int(-needed // 2))


def _bytes_a_us(gbs: float) -> float:
    return gbs * 1e3
