"""Rows that travel as lines: what only they can get wrong."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_backend import layout
from tests.core import oracle
from tests.core.pool import World
from tests.core.rounds import Round

TOKENS = 6
LAYOUTS = ("masked", "compact")


def of_nothing(world: World, emulated: bool) -> None:
    """Lines of a sum that is zero arrive like others, and every line is blank again behind its round."""
    with world.make(max_tokens={"low_latency": TOKENS}, lanes=1) as buffer:
        state: Any = buffer._fabric
        for seed in range(4):
            case = oracle.make_case(seed, [TOKENS - seed] * world.size)
            some = 8 * (seed % 2)  # channels: all zero, or all but those by which the oracle orders rows
            case = replace(case, x=[torch.nn.functional.pad(x[:, :some], (0, case.hidden - some)) for x in case.x])
            Round(world, buffer, case, "low_latency", layout=LAYOUTS[seed // 2]).run()
            if emulated:  # elsewhere the next round would hang, or take what this one left
                at = layout.lane_offset(state.shape, 0) + layout.lane(state.shape).lines
                assert not any(ctypes.string_at(state._heap.base + at, state.shape.line_bytes))


def test_sums_of_nothing(ranks: Any, kernels: str) -> None:
    ranks(2, kernels).run(of_nothing, kernels == "emulated", timeout=120)


def sizes(world: World, tokens: int) -> None:
    with world.make(hidden=1152, max_tokens={"low_latency": 128}, lanes=1) as buffer:
        case = oracle.make_case(tokens, [tokens, tokens // 3], hidden=1152)
        for payload in ("bf16", "fp8", "fp8_cast", "fp8_ue8m0_cast"):
            for each in LAYOUTS:
                Round(world, buffer, case, "low_latency", payload=payload, layout=each).run()


@pytest.mark.parametrize("tokens", [1, 33, 100])
def test_rows_of_several_chunks(ranks: Any, kernels: str, tokens: int) -> None:
    ranks(2, kernels).run(sizes, tokens, timeout=120)
