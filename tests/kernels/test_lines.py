"""Records and rows that travel as lines: what only they can get wrong."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from ep_backend import layout
from tests.core import oracle
from tests.core.pool import World
from tests.core.rounds import Round

TAGS = 1 << 31  # epochs after which tags repeat
TURN = 1 << 16  # epochs that clear the same slot
TOKENS = 6


def around_the_tags(world: World, emulated: bool) -> None:
    """Lines of an epoch whose tag is the same must have been cleared, whatever was sent since."""
    with world.make(max_tokens={"low_latency": TOKENS}, lanes=1) as buffer:
        state: Any = buffer._fabric

        def one(seed: int, tokens: int) -> None:
            Round(world, buffer, oracle.make_case(seed, [tokens] * world.size), "low_latency", layout="masked").run()

        first, turns = 5, TOKENS * world.size
        state._lanes[0, 0] = first
        one(0, TOKENS)
        for turn in range(turns):
            state._lanes[0, 0] = first + TAGS - (turns - turn) * TURN
            one(1 + turn, 0)
        state._lanes[0, 0] = first + TAGS
        if emulated:  # elsewhere new lines may come before anybody looks at old ones
            at = layout.lane_offset(state.shape, 0) + layout.lane(state.shape).lines
            assert not any(ctypes.string_at(state._heap.base + at, state.shape.line_bytes))
        one(1 + turns, TOKENS)


def test_tags_that_repeat(ranks: Any, kernels: str) -> None:
    ranks(2, kernels).run(around_the_tags, kernels == "emulated", timeout=120)


def sizes(world: World, tokens: int) -> None:
    with world.make(hidden=1152, max_tokens={"low_latency": 128}, lanes=1) as buffer:
        case = oracle.make_case(tokens, [tokens, tokens // 3], hidden=1152)
        for payload in ("bf16", "fp8", "fp8_cast", "fp8_ue8m0_cast"):
            Round(world, buffer, case, "low_latency", payload=payload).run()


@pytest.mark.parametrize("tokens", [1, 33, 100])
def test_rows_of_several_chunks(ranks: Any, kernels: str, tokens: int) -> None:
    ranks(2, kernels).run(sizes, tokens, timeout=120)
