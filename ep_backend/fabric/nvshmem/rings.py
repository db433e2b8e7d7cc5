"""Launches of normal: counts first, then records through rings that all blocks of all ranks keep moving."""

from __future__ import annotations

from ep_backend import layout
from ep_backend.fabric.base import Call
from ep_backend.fabric.nvshmem.launch import MOST_WARPS, STAGE_BYTES, Launch, Roles
from ep_backend.layout import Shape
from ep_backend.modes import Layout, Mode

_CHANNEL_SLOTS = 4  # of a ring, below which another channel would only wait more often
MOST_SHARE = (1 << 16) - 1  # slots that a channel uses of a ring, in 16 bits of ring.cuh's End
_SUM_BYTES = 16384  # of a warp's stage in combine; holds 512 bytes of 32 rows


def channels(s: Shape) -> int:
    """Channels of a call, the same on every rank whatever its SM budget: readers and writers share out rings alike."""
    return max(1, min(layout.RING_CHANNELS, s.ring_slots // _CHANNEL_SLOTS))


def repeats(call: Call) -> bool:
    """Its counts are known, so that none of the ranks exchanges them."""
    return call.mode is Mode.NORMAL and call.repeats is not None and call.repeats.mode is Mode.NORMAL


def count(s: Shape, blocks: int) -> Launch:
    return Launch("ring_count", min(blocks, channels(s)), s.ranks, Roles())


def dispatch(s: Shape, call: Call, blocks: int, ordered: bool) -> tuple[Launch, ...]:
    stage = layout.align_up(layout.record(call.payload, s.hidden, s.top_k).bytes, 128)
    most = min(MOST_WARPS, STAGE_BYTES // stage)
    senders, relays, receivers = _share_out(most, s.gpus_per_node + s.nodes - 1, s.nodes - 1, s.ranks)
    roles = Roles(senders, senders + relays, receivers, send_stage=stage)
    moving = Launch("ring_dispatch", min(blocks, channels(s)), senders + relays + receivers, _shared(roles, stage))
    if not ordered:
        return (moving,)
    warps = min(4, STAGE_BYTES // stage)
    placing = Launch("ring_place", blocks, warps, Roles(warps, send_stage=stage))
    return moving, Launch("ring_order", blocks, 4, Roles()), placing


def combine(s: Shape, call: Call, blocks: int) -> Launch:
    row = 2 * s.hidden
    gathered = s.top_k if call.layout is Layout.MASKED else 1
    added = min(s.gpus_per_node + s.nodes - 1, s.top_k)
    stage = max(_SUM_BYTES, row if gathered == 1 else 0)
    parts = [layout.ceil_div(row, stage // rows // 16 * 16) for rows in (gathered, added)]
    most = min(MOST_WARPS - 1, STAGE_BYTES // stage)
    senders, relays, receivers = _share_out(most, s.ranks, s.nodes - 1, 8)
    roles = Roles(senders, senders + relays, receivers, stage, send_parts=parts[0], receive_parts=parts[1])
    warps = senders + relays + receivers + 1  # the last gives slots back
    return Launch("ring_combine", min(blocks, channels(s)), warps, _shared(roles, stage), ends=True)


def _share_out(most: int, *wanted: int) -> list[int]:
    """Warps for each role, in proportion where there are fewer than wanted, none only where none is wanted."""
    total = sum(wanted)
    shares = [min(n, max(1, n * most // total)) for n in wanted]
    while sum(shares) > most:
        shares[shares.index(max(shares))] -= 1
    return shares


def _shared(roles: Roles, stage: int) -> Roles:
    """Every working warp has a stage of the same size, by its number."""
    return roles._replace(receive_stage=stage, receive_at=stage * roles.receive_from)
