"""Launches of normal: counts first, then records through rings that all blocks of all ranks keep moving."""

from __future__ import annotations

from ep_backend import layout
from ep_backend.fabric.base import Call
from ep_backend.fabric.nvshmem.launch import ALL, FIRST, REST, STAGE_BYTES, Launch, Roles, casts
from ep_backend.layout import Shape
from ep_backend.modes import Layout

_CHANNEL_SLOTS = 4  # of a ring, below which another channel would only wait more often
MOST_SHARE = (1 << 16) - 1  # slots that a channel uses of a ring, in 16 bits of ring.cuh's End
# Warps of a block, most of each kind, in dispatch and in combine; kernels/TUNING.md says what fewer or more do.
_COUNTING = 8
MOST_WARPS = 28  # of a block that moves rows: ring.cuh's kRingThreads
_CASTING, _COPYING, _RECEIVING = 14, 6, 12
_RETURNING, _GATHERING = 9, 11
# Likewise where there are several nodes, and relays.
_FORWARDING, _RECEIVING_TOO = 4, 8
_RETURNING_TOO, _MERGING, _BOTH = 6, 6, 10
_SENT_BYTES, _SUM_BYTES = 16384, 7168  # of a warp's stage in combine: rows that leave, and rows that are summed


def channels(s: Shape) -> int:
    """Channels of a call, the same on every rank whatever its SM budget: readers and writers share out rings alike."""
    return max(1, min(layout.RING_CHANNELS, s.ring_slots // _CHANNEL_SLOTS))


def count(s: Shape, call: Call, blocks: int) -> tuple[Launch, ...]:
    counting = Launch("ring_count", min(blocks, channels(s)), max(s.ranks, _COUNTING), Roles())
    if not _sends_ahead(call):
        return (counting,)
    (rest,) = dispatch(s, call, blocks, ordered=False)
    senders = min(MOST_WARPS - 1, STAGE_BYTES // rest.roles.send_stage)
    first = Roles(senders, senders + 1, send_stage=rest.roles.send_stage, part=FIRST)
    return counting, Launch("ring_dispatch", rest.blocks, senders + 1, first)


def _sends_ahead(call: Call) -> bool:
    """While the host waits for the number of rows, and makes tensors of that size, rings are filled: that waits for nobody."""
    return call.exact and not call.repeats


def dispatch(s: Shape, call: Call, blocks: int, ordered: bool) -> tuple[Launch, ...]:
    record = layout.align_up(layout.record(call.payload, s.hidden, s.top_k).bytes, 128)
    most = MOST_WARPS - 2 - (s.nodes > 1)  # that tell other ends how far the others are
    forwarding, receiving = (_FORWARDING, _RECEIVING_TOO) if s.nodes > 1 else (0, _RECEIVING)
    if casts(call):  # these read rows themselves, and need room for scales alone
        sent = layout.align_up(layout.scale_bytes(call.payload, s.hidden), 128)
        senders = min(_CASTING, most - forwarding - receiving)
        relays, receivers = _share_out(min(most - senders, (STAGE_BYTES - senders * sent) // record), forwarding, receiving)
    else:
        sent = record
        senders, relays, receivers = _share_out(min(most, STAGE_BYTES // record), _COPYING, forwarding, receiving)
    roles = _roles(senders, relays, receivers, sent, record, senders * sent + relays * record)
    roles = roles._replace(part=REST if _sends_ahead(call) else ALL)
    moving = Launch("ring_dispatch", min(blocks, channels(s)), roles.receive_from + receivers + 1, roles)
    if not ordered:
        return (moving,)
    warps = min(4, STAGE_BYTES // record)
    placing = Launch("ring_place", blocks, warps, Roles(warps, send_stage=record))
    return moving, Launch("ring_order", blocks, 4, Roles()), placing


def combine(s: Shape, call: Call, blocks: int) -> Launch:
    row, masked = 2 * s.hidden, call.layout is Layout.MASKED
    # A stage holds one run of every row that is summed.
    send_parts, sent = _runs(row, _SENT_BYTES, s.top_k if masked else 1)
    receive_parts, summed = _runs(row, _SUM_BYTES, min(s.gpus_per_node + s.nodes - 1, s.top_k))
    if s.nodes > 1:
        sent = max(sent, 16 * min(s.gpus_per_node, s.top_k))  # a relay's stage takes at least a line of each row that it adds
        # Streams of answers: of compact rows, a relay reads its own from y.
        streams = s.ranks - s.nodes * call.stays
        senders = max(1, min(2 * streams, _RETURNING_TOO))
        relays = min(_BOTH - senders, _MERGING)
    else:
        senders, relays = _GATHERING if masked else min(2 * s.ranks - 1, _RETURNING), 0
    senders = min(senders, (STAGE_BYTES - summed) // sent - relays)
    at = (senders + relays) * sent
    receivers = min(MOST_WARPS - 2 - (s.nodes > 1) - senders - relays, (STAGE_BYTES - at) // summed)
    roles = _roles(senders, relays, receivers, sent, summed, at)
    roles = roles._replace(send_parts=send_parts, receive_parts=receive_parts)
    return Launch("ring_combine", min(blocks, channels(s)), roles.receive_from + receivers + 1, roles, ends=True)


def _roles(senders: int, relays: int, receivers: int, sent: int, received: int, at: int) -> Roles:
    """With the warps that tell other ends how far others are: one behind senders, one in front of relays, one behind all."""
    return Roles(senders, senders + 1 + relays + (relays > 0), receivers, sent, received, at)


def _runs(row: int, stage: int, rows: int) -> tuple[int, int]:
    """Parts of a row such that a stage holds one of each of so many, and bytes of such a stage."""
    parts = layout.ceil_div(row, max(512, stage // rows // 16 * 16))
    return parts, 16 * layout.ceil_div(row // 16, parts) * rows


def _share_out(most: int, *wanted: int) -> list[int]:
    """Warps for each role, in proportion where there are fewer than wanted, none only where none is wanted."""
    shares = list(wanted)
    while sum(shares) > most:
        shares[max(range(len(wanted)), key=lambda i: shares[i] > 1 and shares[i] / wanted[i])] -= 1
    return shares
