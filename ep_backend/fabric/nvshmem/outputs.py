"""Tensors of one dispatch: what it hands out, and what its combine must know of every record."""

from __future__ import annotations

import torch

from ep_backend import layout
from ep_backend.fabric.base import Call, Received
from ep_backend.layout import Payload, Shape
from ep_backend.modes import Layout, Mode

ALIGN = 32  # words, of whatever lies beside the rows
# What does, in the order of launch.CALL.
PLACES = ("scales", "ids", "weights", "counts", "plan", "target", "position", "pick_weight", "relay", "kept")
COUNTS, PLAN = PLACES.index("counts"), PLACES.index("plan")
_DTYPES = {Payload.BF16: torch.bfloat16, Payload.FP8: torch.float8_e4m3fn, Payload.FP8_UE8M0: torch.float8_e4m3fn}


class Outputs:
    """Of one kind of dispatch. Each allocation costs the host microseconds, so that there are two: the rows by themselves,
    since engines give them up early, and 32-bit words of all else, first what has one size, then so many words a row."""

    def __init__(self, shape: Shape, call: Call, device: torch.device, *, per_expert: bool, ordered: bool) -> None:
        s, counted = shape, call.mode is Mode.NORMAL  # its counts and plan are there before
        self._device, self._hidden, self._top_k = device, s.hidden, s.top_k
        self._experts = s.local_experts
        self._masked = masked = call.layout is Layout.MASKED
        self._dtype = _DTYPES[call.payload]
        self._scale_words = layout.scale_bytes(call.payload, s.hidden) // 4
        self._scales_are_floats = call.payload is Payload.FP8
        self.most = s.ranks * call.max_tokens  # rows, of an expert if masked
        plan = plan_words(s.ranks) + per_expert * s.local_experts * (s.ranks + 1)
        relayed = {Mode.HYBRID: 3, Mode.NORMAL: 1}.get(call.mode, 0) if s.nodes > 1 else 0
        record = layout.record(call.payload, s.hidden, s.top_k).bytes // 4
        handed, picked = (0, s.top_k * (not per_expert)) if masked else (s.top_k, 0)
        once = {
            "counts": 0 if counted else s.local_experts,
            "plan": 0 if counted else plan,
            "relay": relayed * s.nodes * call.max_tokens,
        }
        each = {
            "scales": self._scale_words * (s.local_experts if masked else 1),
            "ids": handed,
            "weights": handed,
            "target": s.local_experts if per_expert else 1,
            "position": picked,
            "pick_weight": picked,
            "kept": record if counted and ordered else 0,
        }
        at = dict.fromkeys(PLACES, (-1, 0))  # first word, and how many more a row; -1: not there
        self._once = self._each = 0
        for name, words in once.items():
            if words:
                at[name] = self._once, 0
                self._once += layout.align_up(words, ALIGN)
        for name, words in each.items():
            if words:
                at[name] = self._once, self._each
                self._each += words
        self._at = tuple(at.values())

    def make(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows, and what lies beside them."""
        experts = (self._experts,) if self._masked else ()
        rows = torch.empty(*experts, capacity, self._hidden, dtype=self._dtype, device=self._device)
        words = self._once + self._each * _room(capacity)
        return rows, torch.empty(words, dtype=torch.int32, device=self._device)

    def addresses(self, beside: torch.Tensor, capacity: int) -> list[int]:
        base, room = beside.data_ptr(), _room(capacity)
        return [base + 4 * (first + each * room) if first >= 0 else 0 for first, each in self._at]

    def stride(self, capacity: int) -> int:
        """Elements between the columns of scales."""
        return layout.align_up(capacity, 4) if self._masked and self._scale_words else 0

    def received(
        self,
        rows: torch.Tensor,
        beside: torch.Tensor,
        counts: torch.Tensor | None,
        capacity: int,
        n: int | None,
        most: int,
    ) -> Received:
        """As tensors; compact ones have n rows, if that is known, else ``most``."""
        room, top_k, words = _room(capacity), self._top_k, self._scale_words
        (scales_at, scales_each), (ids_at, ids_each), (weights_at, weights_each), (counts_at, _), *_ = self._at
        floats = beside.view(torch.float32) if self._scales_are_floats or not self._masked else beside
        scales, scaling = None, floats if self._scales_are_floats else beside
        if counts is None:
            counts = beside.as_strided((self._experts,), (1,), counts_at)
        if self._masked:
            if words:
                stride = self.stride(capacity)
                shape, strides = (self._experts, capacity, words), (words * stride, 1, stride)
                scales = scaling.as_strided(shape, strides, scales_at + scales_each * room)
            return Received(rows, scales, None, None, counts, None)
        count = most if n is None else n
        if words:
            scales = scaling.as_strided((count, words), (words, 1), scales_at + scales_each * room)
        ids = beside.as_strided((count, top_k), (top_k, 1), ids_at + ids_each * room)
        weights = floats.as_strided((count, top_k), (top_k, 1), weights_at + weights_each * room)
        return Received(rows if count == capacity else rows[:count], scales, ids, weights, counts, n)


def plan_words(ranks: int) -> int:
    """Of args.h: rows by source and channel, the slots between a source's channels, and the round that counted them."""
    return ranks * (layout.CHANNELS + 2) + 1


def _room(capacity: int) -> int:
    """Rows for which there is room beside them: enough for every place to be aligned, and some where there are none."""
    return -(-capacity // ALIGN) * ALIGN or ALIGN
