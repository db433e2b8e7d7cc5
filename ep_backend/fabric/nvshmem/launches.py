"""Which kernels an operation launches, with how many blocks and warps, and what each warp does."""

from __future__ import annotations

import dataclasses
import math

from ep_backend import layout
from ep_backend.fabric.base import Call
from ep_backend.fabric.nvshmem import rings
from ep_backend.fabric.nvshmem.launch import MOST_WARPS, STAGE_BYTES, Launch, Roles, casts
from ep_backend.modes import Layout, Mode

SMS = 24  # multiprocessors of every kernel that waits for a peer, unless the call says otherwise
SMALL = 512  # tokens up to which latency counts more than multiprocessors: beyond, waiting kernels have SMS blocks


class Launches:
    """Of one buffer's calls.

    Kernels that wait for peers get so few blocks that those of all lanes are resident together, in any order.
    """

    def __init__(self, shape: layout.Shape, lanes: int, multiprocessors: int, deterministic: bool) -> None:
        self._shape, self._deterministic = shape, deterministic
        self._most_blocks = min(multiprocessors, layout.CHANNELS)
        self._most_waiting = min(multiprocessors // lanes, layout.CHANNELS)

    def of(self, op: str, call: Call, *, send: bool, receive: bool) -> tuple[Launch, ...]:
        """The launches of these phases of an operation, "dispatch" or "combine" (normal: "count" too), in order."""
        make = self._dispatch if op == "dispatch" else self._combine
        if self.per_expert(call):
            make = self._expert_dispatch if op == "dispatch" else self._expert_combine
        if call.mode is Mode.HYBRID:
            make = self._hybrid_dispatch if op == "dispatch" else self._hybrid_combine
        if call.mode is Mode.NORMAL:
            make = {"count": self._ring_count, "dispatch": self._ring_dispatch, "combine": self._ring_combine}[op]
        return make(call, send, receive)

    def per_expert(self, call: Call) -> bool:
        return call.mode is Mode.LOW_LATENCY and bool(self._shape.per_expert)

    def ordered(self, call: Call) -> bool:
        """Masked rows in order of source and token, which can be given only when all have arrived."""
        return self._deterministic and call.layout is Layout.MASKED and not self.per_expert(call)

    def channels(self, call: Call) -> int:
        """Blocks of the kernel that sends."""
        if call.mode is Mode.NORMAL:
            return rings.channels(self._shape)
        if call.mode is Mode.HYBRID and call.tokens > SMALL:  # waits for nobody, and a relay's blocks run beside it
            relays = SMS if self._shape.nodes > 1 else 0
            return self._blocks(call, max(1, self._most_blocks - relays), self._most_blocks)
        if call.tokens > SMALL:
            return self._blocks(call, self._most_waiting, SMS)
        return self._blocks(call, self._most_waiting if self._at_once(call) else self._most_blocks, max(1, call.tokens))

    def _at_once(self, call: Call) -> bool:
        """One kernel dispatches: it sends, waits and places."""
        serves = call.mode in (Mode.DIRECT, Mode.LOW_LATENCY) and not self.per_expert(call)
        return serves and not call.split and not self.ordered(call)

    def _sums_as_lines(self, call: Call) -> bool:
        """By the buffer, not by this rank's tokens: all ranks must choose alike."""
        return call.mode is Mode.LOW_LATENCY and self._shape.line_row != 0

    def _blocks(self, call: Call, most: int, default: int) -> int:
        return max(1, min(default if call.sms is None else call.sms, most))

    def _dispatch(self, call: Call, send: bool, receive: bool) -> tuple[Launch, ...]:
        cast, record = casts(call), self._record(call)
        row, step, scales = self._input(call)
        if call.tokens > SMALL and not self.ordered(call):
            # Bulk copies of one multiprocessor reach about 50 GB/s, and the receivers need that: casts read rows themselves.
            parts = 1 if receive else 4  # shares of a sender that are alike
            sent = layout.align_up(scales, 128) if cast else _run(row, step, parts)
            senders = receivers = min(MOST_WARPS - 1, STAGE_BYTES // max(sent, record))
            if send and receive:  # side by side
                senders = max(1, min(19 if cast else 6, (STAGE_BYTES - record) // sent))
                receivers = min(MOST_WARPS - 1 - senders, (STAGE_BYTES - senders * sent) // record)
            roles = Roles(
                senders=senders * send,
                receive_from=(senders + 1) * send,
                receivers=receivers * receive,
                send_stage=sent,
                receive_stage=record,
                receive_at=senders * sent * send,
                send_parts=parts,
                staged=int(not cast),
            )
            return (Launch("dispatch", self.channels(call), MOST_WARPS, roles),)
        if self._at_once(call):
            one = self._send("send", call).roles
            sent = layout.align_up(scales if cast else one.send_stage, 128)  # records behind it keep their alignment
            senders = min(one.senders, (STAGE_BYTES - record) // sent)
            receivers = min(14, max(6, 2 * self._shape.ranks), (STAGE_BYTES - senders * sent) // record)
            ends = senders * sent
            roles = Roles(senders, senders + 1, receivers, sent, record, ends, send_parts=one.send_parts, staged=int(not cast))
            blocks = self._blocks(call, self._most_waiting, max(call.tokens, SMS))  # other ranks may have more tokens
            return (Launch("dispatch", blocks, senders + receivers + 2, roles),)  # a warp publishes, one plans
        result = [self._send("send", call)] if send else []
        if receive:
            result += self._place("place", call, early=send)
        return tuple(result)

    def _send(self, kernel: str, call: Call) -> Launch:
        """Rows go out in parts, a block a channel."""
        row, step, scales = self._input(call)
        blocks = self.channels(call)
        whole = call.mode is Mode.HYBRID and self._shape.staging  # a put takes a whole record
        parts = 1 if whole else max(1, min(8, layout.ceil_div(row, 2048)))
        sent = _run(row, step, parts) + scales
        most = 16 if call.tokens <= SMALL else MOST_WARPS - 1
        senders = max(1, min(parts * layout.ceil_div(call.tokens, blocks), most, STAGE_BYTES // sent))
        return Launch(kernel, blocks, senders + 1, Roles(senders, send_stage=sent, send_parts=parts))

    def _place(self, kernel: str, call: Call, *, early: bool = False, closes: bool = False, warps: int = 4) -> list[Launch]:
        """One block waits for everything, then all multiprocessors place it."""
        record = self._record(call)
        everywhere = self._blocks(call, self._most_blocks, self._most_blocks)
        result = [Launch("await", 1, self._shape.ranks, Roles(), early=early)]
        if self.ordered(call):
            result.append(Launch("order", everywhere, 4, Roles(), early=True))
        warps = min(warps, STAGE_BYTES // record)
        roles = Roles(receivers=warps, receive_stage=record)
        return [*result, Launch(kernel, everywhere, warps, roles, early=not self.ordered(call), closes=closes)]

    def _input(self, call: Call) -> tuple[int, int, int]:
        """Bytes of a row that is read, in steps of so many, and of the scales that a cast leaves behind it."""
        hidden = self._shape.hidden
        if casts(call):  # takes 512 channels at a time
            return 2 * hidden, 1024, layout.align_up(hidden // 32, 16)
        return layout.payload_bytes(call.payload, hidden), 16, 0

    def _record(self, call: Call) -> int:
        return layout.record(call.payload, self._shape.hidden, self._shape.top_k).bytes

    def _combine(self, call: Call, send: bool, receive: bool) -> tuple[Launch, ...]:
        row, ranks, small = 2 * self._shape.hidden, self._shape.ranks, call.tokens <= SMALL
        masked = call.layout is Layout.MASKED
        if self._sums_as_lines(call):
            return self._line_combine(call, send, receive)
        waiting = self._blocks(call, self._most_waiting, SMS)
        # A stage holds one run of every row that is summed.
        gathered, added = (self._shape.top_k if masked else 1), min(ranks, self._shape.top_k)
        parts = layout.ceil_div(row, _room(16384 if masked or not small else 2048, gathered))
        sent = _run(row, 16, parts) * gathered
        shares = layout.ceil_div(row, _room(7168, added))
        summed = _run(row, 16, shares) * added
        if send and receive and not small:
            senders = 11 if masked else _coprime(min(2 * ranks - 1, 9), ranks)
            senders = min(senders, (STAGE_BYTES - summed) // sent)
            receivers = min(MOST_WARPS - 1 - senders, (STAGE_BYTES - senders * sent) // summed)
            roles = Roles(senders, senders + 1, receivers, sent, summed, senders * sent, send_parts=parts, receive_parts=shares)
            return (Launch("combine", waiting, MOST_WARPS, roles, ends=True),)
        result = []
        if send:
            most = min(14, STAGE_BYTES // sent)
            senders = _coprime(min(most, max(parts * ranks, 7)) if small else most, 1 if masked else ranks)
            blocks = self._blocks(call, self._most_blocks, self._most_blocks)
            result.append(Launch("combine", blocks, senders + 1, Roles(senders, send_stage=sent, send_parts=parts)))
        if receive:
            warps = min(MOST_WARPS, STAGE_BYTES // summed)
            groups = max(1, warps // shares) if small else 1
            roles = Roles(receivers=warps, receive_stage=summed, receive_parts=shares, receive_groups=groups)
            result.append(Launch("combine", waiting, warps, roles, early=send, ends=True))
        return tuple(result)

    def _line_combine(self, call: Call, send: bool, receive: bool) -> tuple[Launch, ...]:
        warps, most = 15 if call.tokens <= SMS else 28, self._most_waiting if receive else self._most_blocks
        blocks = self._blocks(call, most, max(2 * call.tokens, SMS))  # other ranks may have more tokens
        roles = Roles(warps * send, receivers=warps * receive)
        return (Launch("sums", blocks, warps + 1, roles, ends=receive),)

    def _hybrid_dispatch(self, call: Call, send: bool, receive: bool) -> tuple[Launch, ...]:
        several, small, record, result = self._shape.nodes > 1, call.tokens <= SMALL, self._record(call), []
        if send:
            result.append(dataclasses.replace(self._send("rail_send", call), forks=several))
            if several:
                # A small batch is sent by blocks on all multiprocessors; the relay's must find room beside them.
                warps = min(28, (STAGE_BYTES // 2 if small else STAGE_BYTES) // record)
                roles = Roles(receivers=warps, receive_stage=record)
                result.append(Launch("forward", self._relays(call), warps, roles, side=True))
        if receive:
            result += self._place("rail_place", call, early=send, closes=several, warps=4 if small else 16)
        return tuple(result)

    def _relays(self, call: Call) -> int:
        """Blocks of a kernel that waits beside this rank's own sending, which must find room."""
        return self._blocks(call, max(1, self._most_waiting // 2), SMS)

    def _hybrid_combine(self, call: Call, send: bool, receive: bool) -> tuple[Launch, ...]:
        s, row, small, several, result = self._shape, 2 * self._shape.hidden, call.tokens <= SMALL, self._shape.nodes > 1, []
        at_once = several and small and send and receive  # one launch sums as a relay, then as an owner
        apart = several and not at_once

        def summing(terms: int, room: int) -> tuple[int, int, int]:
            """Warps of a block that add so many rows, bytes of a warp's stage, and the parts of a row."""
            parts = layout.ceil_div(row, _room(room, terms))
            stage = _run(row, 16, parts) * terms
            return min(16, STAGE_BYTES // stage), stage, parts

        room = 7168 if small and several else 14336  # several warps a row where rows are few
        relays, sent, shares = summing(s.gpu_copies, room)
        if send:
            warps, stage, parts = summing(s.top_k if call.layout is Layout.MASKED else 1, 14336)
            blocks = self._blocks(call, self._most_blocks, max(16 * call.tokens, SMS))  # other ranks may have more tokens
            roles = Roles(warps, send_stage=stage, send_parts=parts)
            result.append(Launch("rail_return", blocks, warps, roles, forks=apart))
            if apart:
                roles = Roles(relays, send_stage=sent, send_parts=shares)
                result.append(Launch("rail_sum", self._relays(call), relays, roles, side=True))
        if receive:
            warps, stage, parts = summing(min(s.ranks, s.top_k), room)
            if apart:  # behind the relay's launch there is nothing to wait for
                blocks = self._blocks(call, self._most_blocks, max(1, call.tokens))
            else:
                blocks = self._blocks(call, self._most_waiting, max(call.tokens, SMS) if small else SMS)
            if at_once:
                warps = min(warps, relays)
            groups = max(1, warps // parts) if small else 1
            roles = Roles(warps * at_once, 0, warps, sent, stage, 0, shares, parts, groups)
            result.append(Launch("rail_sum", blocks, warps, roles, early=send and not apart, joins=apart, ends=True))
        return tuple(result)

    def _ring_count(self, call: Call, send: bool, receive: bool) -> tuple[Launch, ...]:
        return rings.count(self._shape, call, self._blocks(call, self._most_waiting, SMS))

    def _ring_dispatch(self, call: Call, send: bool, receive: bool) -> tuple[Launch, ...]:
        return rings.dispatch(self._shape, call, self._blocks(call, self._most_waiting, SMS), self.ordered(call))

    def _ring_combine(self, call: Call, send: bool, receive: bool) -> tuple[Launch, ...]:
        return (rings.combine(self._shape, call, self._blocks(call, self._most_waiting, SMS)),)

    def _expert_dispatch(self, call: Call, send: bool, receive: bool) -> tuple[Launch, ...]:
        hidden, everywhere = self._shape.hidden, self._blocks(call, self._most_blocks, self._most_blocks)
        sent = layout.align_up(hidden // 32, 128) if casts(call) else layout.payload_bytes(call.payload, hidden)
        record = layout.record(call.payload, hidden, self._shape.top_k).bytes
        result = []
        if send:
            warps = min(8, STAGE_BYTES // sent)
            result.append(Launch("expert_send", everywhere, warps, Roles(senders=warps, send_stage=sent)))
        if receive:
            warps = min(8, STAGE_BYTES // record)
            roles = Roles(receivers=warps, receive_stage=record)
            result.append(Launch("expert_await", 1, MOST_WARPS, Roles(), early=send))
            result.append(Launch("expert_place", everywhere, warps, roles, early=True))
        return tuple(result)

    def _expert_combine(self, call: Call, send: bool, receive: bool) -> tuple[Launch, ...]:
        row, result = 2 * self._shape.hidden, []
        if send:
            warps = min(8, STAGE_BYTES // row)
            blocks = self._blocks(call, self._most_blocks, self._most_blocks)
            result.append(Launch("expert_return", blocks, warps, Roles(senders=warps, send_stage=row)))
        if receive:
            shares = layout.ceil_div(row, _room(16384, self._shape.top_k))
            summed = _run(row, 16, shares) * self._shape.top_k
            warps = min(16, STAGE_BYTES // summed)
            roles = Roles(receivers=warps, receive_stage=summed, receive_parts=shares)
            blocks = self._blocks(call, self._most_waiting, SMS)
            result.append(Launch("expert_sum", blocks, warps, roles, early=send, ends=True))
        return tuple(result)


def _coprime(most: int, ranks: int) -> int:
    """A number of workers of which none gets the same rank's rows each time."""
    return next(n for n in range(most, 0, -1) if math.gcd(n, ranks) == 1)


def _room(stage: int, rows: int) -> int:
    """Bytes of each of so many rows that a stage holds."""
    return max(512, stage // rows // 16 * 16)


def _run(row: int, step: int, parts: int) -> int:
    """Most bytes of a row that is dealt out to so many warps in steps."""
    return layout.align_up(min(row, layout.ceil_div(layout.ceil_div(row, step), parts) * step), 16)
