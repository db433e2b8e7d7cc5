"""How many blocks wait for peers, and where: a kernel that sends must find room beside those of all lanes."""

from __future__ import annotations

import itertools

import pytest
import torch

from ep_backend import layout
from ep_backend.fabric.base import Call, Routing
from ep_backend.fabric.nvshmem.launch import STAGE_BYTES, Launch
from ep_backend.fabric.nvshmem.launches import Launches
from ep_backend.layout import Payload, Shape
from ep_backend.modes import Layout, Mode

MULTIPROCESSORS, MOST, HIDDEN, TOP_K = 132, 4096, 7168, 8
FP8 = layout.record(Payload.FP8, HIDDEN, TOP_K).bytes


def hybrid(ranks: int, gpus: int, lanes: int, tokens: int, sms: int | None, form: Layout, split: bool) -> list[Launch]:
    shape = Shape(ranks, gpus, 256, TOP_K, HIDDEN, 0, 0, 0, MOST, 0, 0, 0, FP8, 2 * HIDDEN)
    x, ids = torch.empty(tokens, 0), torch.empty(tokens, TOP_K, dtype=torch.int64)
    call = Call(
        Mode.HYBRID, form, Payload.FP8, 0, 1, MOST, tokens, x, None, Routing(ids, torch.empty(tokens, TOP_K)), sms, False
    )
    made = Launches(shape, lanes, MULTIPROCESSORS, deterministic=False)
    phases = ((True, False), (False, True)) if split else ((True, True),)
    return [one for op in ("dispatch", "combine") for s, r in phases for one in made.of(op, call, send=s, receive=r)]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("ranks,gpus", [(2, 1), (4, 2), (32, 8), (8, 8)])
def test_senders_of_hybrid_find_room(ranks: int, gpus: int, lanes: int) -> None:
    for tokens, sms, form, split in itertools.product((0, 1, 128, 513, MOST), (None, 1, 24, 132), Layout, (False, True)):
        launches = hybrid(ranks, gpus, lanes, tokens, sms, form, split)
        beside = [one for one in launches if one.side]
        assert bool(beside) == (ranks > gpus)
        for one in launches:
            assert one.roles.shared_bytes <= STAGE_BYTES and 0 < one.blocks <= (MULTIPROCESSORS if sms is None else sms)
            if one.side:
                assert 2 * lanes * one.blocks <= MULTIPROCESSORS
            if one.kernel == "rail_sum" and not one.joins:  # waits
                assert lanes * one.blocks <= MULTIPROCESSORS
        # Whatever runs beside begins with a sender, and something ends behind it before the operation does.
        for number, one in enumerate(launches):
            if one.side:
                assert launches[number - 1].forks
                assert any(later.joins or later.closes for later in launches[number:])
