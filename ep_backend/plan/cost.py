"""Time of a dispatch or combine: t = fixed + bytes at the busiest port / effective bandwidth.

Bytes at a port = tokens x copies over that port x record. Ports work at the same time, so the slowest decides; the second
hop of hybrid and normal overlaps the first and adds only to the fixed part. GB/s are 1e9 bytes a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from ep_backend.layout import Payload
from ep_backend.modes import Mode
from ep_backend.plan.calibration import Calibration, Line, Op
from ep_backend.plan.copies import Copies

BYTES_A_US = 1e3  # of one GB/s


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
    """None: nodes are virtual, and what they send each other goes over NVLink."""
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
    if mode.spec.two_hops:
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
    loads = _loads(flow, line, links)
    if sms and mode is not Mode.LOW_LATENCY:
        loads["sms"] = flow.handled / (sms * calibration.sm_gbs[op])
    bottleneck = max(loads, key=lambda port: loads[port])
    bandwidth_us = tokens * record * loads[bottleneck] / BYTES_A_US
    us = line.fixed_us + bandwidth_us
    return Cost(
        record,
        tokens * flow.nic * record,
        tokens * flow.nvlink * record,
        bandwidth_us,
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
    busiest = max(_loads(flow, calibration.line(mode, "dispatch", nodes), links).values())
    if not busiest:  # one rank sends nothing
        return 2
    needed = flow.handled / (busiest * calibration.sm_gbs["dispatch"])
    return 2 * max(1, -int(-needed // 2))


def _loads(flow: Traffic, line: Line, links: Links) -> dict[str, float]:
    """Records a token at the busiest rank's ports, over their rates in GB/s."""
    nvlink_gbs = line.nvlink_gbs or links.nvlink_gbs
    nic, nvlink = flow.nic * flow.nic_skew, flow.nvlink * flow.nvlink_skew
    if links.nic_gbs is None:
        return {"nvlink": (nic + nvlink) / nvlink_gbs}
    return {"nvlink": nvlink / nvlink_gbs, "nic": nic / (line.nic_gbs or links.nic_gbs)}
