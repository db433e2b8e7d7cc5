"""What holds for any routing at all, found or refuted by hypothesis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core import oracle
from tests.core.pool import World
from tests.core.rounds import Round

RANKS, EXPERTS, TOP_K, HIDDEN, LIMIT = 4, 8, 3, 128, 5
MODES = ("normal", "direct", "low_latency", "hybrid")

pick = st.integers(-1, EXPERTS - 1)
token = st.lists(pick, min_size=TOP_K, max_size=TOP_K)
routing = st.lists(st.lists(token, max_size=LIMIT), min_size=RANKS, max_size=RANKS)
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def case_of(ids: list[list[list[int]]]) -> oracle.Case:
    case = oracle.make_case(1, [len(i) for i in ids], experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN)
    case.ids = [torch.tensor(i, dtype=torch.int64).reshape(-1, TOP_K) for i in ids]
    return case


def tiny(world: World) -> Any:
    return world.buffer(
        gpus_per_node=2,
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens=dict.fromkeys(MODES, LIMIT),
        ring_slots=2,
    )


def one_round(world: World, ids: Any, mode: str, layout: str, payload: str, lane: int) -> list[int]:
    r = Round(world, tiny(world), case_of(ids), mode, layout=layout, payload=payload, lane=lane)
    r.run()
    counts: list[int] = r.got.counts.tolist()
    return counts


@few
@given(
    ids=routing,
    mode=st.sampled_from(MODES),
    layout=st.sampled_from(["compact", "masked"]),
    payload=st.sampled_from(oracle.PAYLOADS),
    lane=st.integers(0, 1),
)
def test_any_routing(ranks: Any, ids: list[list[list[int]]], mode: str, layout: str, payload: str, lane: int) -> None:
    by_rank = ranks(RANKS).run(one_round, ids, mode, layout, payload, lane)
    counts = [count for rank in by_rank for count in rank]
    picks = [row for rank in ids for row in rank]
    for e in range(EXPERTS):  # compact counts picks, masked rows
        want = sum(row.count(e) if layout == "compact" else e in row for row in picks)
        assert counts[e] == want


def both_layouts(world: World, ids: Any, mode: str) -> float:
    outs = [
        Round(world, tiny(world), case_of(ids), mode, layout=layout, payload="fp32").run().out
        for layout in ("compact", "masked")
    ]
    assert outs[0] is not None and outs[1] is not None
    return float((outs[0] - outs[1]).abs().max()) if outs[0].numel() else 0.0


@few
@given(ids=routing, mode=st.sampled_from(MODES))
def test_compact_and_masked_fold_to_the_same(ranks: Any, ids: list[list[list[int]]], mode: str) -> None:
    assert max(ranks(RANKS).run(both_layouts, ids, mode)) < 2e-5


def weight_mass(world: World, mode: str, layout: str) -> None:
    """Experts that return the token itself give it back times the sum of its weights, repeated picks included."""
    buffer = tiny(world)
    ids = torch.tensor([[3, 3, 5], [0, 1, 7], [2, 2, 2], [-1, 6, -1], [-1, -1, -1]])
    weights = torch.tensor([[0.5, 0.25, 0.125]]).repeat(5, 1)
    x = torch.arange(5.0)[:, None].repeat(1, HIDDEN) + 1 + world.rank
    got = buffer.dispatch(x, ids, weights, mode=mode, layout=layout)
    y = got.rows
    if layout == "compact":
        y = y * got.topk_weights.sum(1, keepdim=True)
    total = torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
    torch.testing.assert_close(buffer.combine(y, got.handle), x * total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["compact", "masked"])
@pytest.mark.parametrize("mode", MODES)
def test_no_weight_is_lost(ranks: Any, mode: str, layout: str) -> None:
    ranks(RANKS).run(weight_mass, mode, layout)
