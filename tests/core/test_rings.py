"""normal mode's rings are bounded: their size has nothing to do with the number of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core import oracle
from tests.core.pool import World
from tests.core.rounds import Round


def many_tokens(world: World, gpus: int, slots: int, tokens: int) -> tuple[int, dict[str, int]]:
    """All ranks send ``tokens`` through rings of ``slots`` records."""
    with world.make(
        gpus_per_node=gpus,
        ring_slots=slots,
        max_tokens={"normal": tokens},
        hidden=64,
        payloads=("bf16",),
        lanes=1,
    ) as buffer:
        for seed, kind in enumerate(("uniform", "hot_rank")):
            case = oracle.make_case(seed, [tokens] * world.size, kind=kind, hidden=64)
            Round(world, buffer, case, "normal").run()
        return buffer.allocated_bytes, buffer.stats()["modes"]["normal"]["records"]


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("size,gpus", [(2, 2), (4, 2)], ids=["1node", "2nodes"])
def test_four_slots_carry_512_tokens(ranks: Any, size: int, gpus: int, slots: int) -> None:
    few = ranks(size).run(many_tokens, gpus, slots, slots)
    many = ranks(size).run(many_tokens, gpus, slots, 512)
    for (little, _), (big, records) in zip(few, many, strict=True):
        assert little == big, "the heap grew with the tokens"
        assert records["local"] + records["scale_up"] + records["scale_out"] > 100 * slots


def uneven(world: World) -> None:
    """One rank has all tokens, another one all experts, in rings of two records, with nobody else at work."""
    with world.make(gpus_per_node=2, ring_slots=2, max_tokens={"normal": 300}, hidden=64) as buffer:
        for owner in range(world.size):
            tokens = [0] * world.size
            tokens[(owner + 3) % world.size] = 300
            case = oracle.make_case(owner, tokens, hidden=64)
            for ids in case.ids:
                ids[:] = owner * case.local + ids % case.local
            Round(world, buffer, case, "normal").run()


def test_one_source_and_one_destination(ranks: Any) -> None:
    ranks(4).run(uneven)
