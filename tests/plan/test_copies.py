"""Copies a token: closed forms against sampled routings, which share no code with them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_backend.modes import Mode
from ep_backend.plan.copies import Copies, exactly, group_limited, measured, uniform
from ep_backend.plan.cost import traffic
from tests.plan.simulation import Crossing, crossing, pick

SAMPLED = 20_000


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """experts, top_k, ranks, nodes; nodes divide ranks, ranks divide experts."""
    nodes, per_node, per_rank = draw(st.integers(1, 16)), draw(st.integers(1, 8)), draw(st.integers(1, 8))
    experts = nodes * per_node * per_rank
    return experts, draw(st.integers(1, min(16, experts))), nodes * per_node, nodes


def sampled_places(ids: np.ndarray, per_place: int) -> float:
    """Mean number of distinct places, counted with Python sets."""
    return sum(len({expert // per_place for expert in row}) for row in ids.tolist()) / len(ids)


@pytest.mark.parametrize(("ranks", "nodes"), [(8, 1), (16, 2), (64, 8), (128, 16)])
def test_uniform_routing_as_sampled(ranks: int, nodes: int) -> None:
    rng = np.random.default_rng(7)
    ids = np.stack([rng.choice(256, 8, replace=False) for _ in range(SAMPLED)])
    expected = uniform(256, 8, ranks, nodes)
    assert expected.gpus == pytest.approx(sampled_places(ids, 256 // ranks), rel=0.005)
    assert expected.nodes == pytest.approx(sampled_places(ids, 256 // nodes), rel=0.005)


@pytest.mark.parametrize(("ranks", "nodes"), [(32, 4), (64, 8), (128, 16)])
def test_group_limited_routing_as_sampled(ranks: int, nodes: int) -> None:
    """4 of 8 groups, then 8 of their experts: with one node a group, half a group and two groups."""
    rng = np.random.default_rng(7)
    ids = []
    for _ in range(SAMPLED):
        groups = rng.choice(8, 4, replace=False)
        allowed = np.concatenate([np.arange(g * 32, (g + 1) * 32) for g in groups])
        ids.append(rng.choice(allowed, 8, replace=False))
    expected = group_limited(256, 8, ranks, nodes, 8, 4)
    assert expected.gpus == pytest.approx(sampled_places(np.stack(ids), 256 // ranks), rel=0.005)
    assert expected.nodes == pytest.approx(sampled_places(np.stack(ids), 256 // nodes), rel=0.005)


def test_exactly_so_many_nodes_as_sampled() -> None:
    """GPUs of a token whose experts are spread uniformly over 4 of 16 nodes, given that it hits all four."""
    rng = np.random.default_rng(7)
    ids = []
    while len(ids) < 5000:
        nodes = rng.choice(16, 4, replace=False)
        allowed = np.concatenate([np.arange(n * 16, (n + 1) * 16) for n in nodes])
        chosen = rng.choice(allowed, 8, replace=False)
        if len(set(chosen // 16)) == 4:
            ids.append(chosen)
    expected = exactly(256, 8, 128, 16, 4)
    assert expected.nodes == 4
    assert expected.gpus == pytest.approx(sampled_places(np.stack(ids), 2), rel=0.01)


def test_the_published_routing_simulation() -> None:
    """64 GPUs, 8 nodes, 4096 tokens of one GPU on node 0; group scores are the sums of the two best."""
    rng = np.random.default_rng(0)
    scores = rng.random((4096, 256)) + 0.5 * rng.random(256)
    free = crossing(pick(scores, 8), 256, 64, 8)
    limited = crossing(pick(scores, 8, groups=8, top_groups=4), 256, 64, 8)

    assert [round(copies, 2) for copies in free] == [6.77, 6.5, 4.51, 5.28]
    assert [round(copies, 2) for copies in limited] == [6.7, 6.26, 3.36, 3.97]

    def milliseconds(copies: Crossing) -> list[float]:
        return [round(each * 4096 * (7168 + 224) / 50e6, 2) for each in copies[:3]]

    assert milliseconds(free) == pytest.approx([4.10, 3.93, 2.73], abs=0.0051)
    assert milliseconds(limited) == pytest.approx([4.05, 3.79, 2.03], abs=0.0051)


def test_pick_takes_the_best_experts_of_the_best_groups() -> None:
    """Group 1 has the best single expert, but group 0 the best pair."""
    scores = np.array([[5.0, 5.0, 0.0, 1.0, 9.0, 0.5, 0.1, 0.2]])
    assert set(pick(scores, 2)[0].tolist()) == {4, 0} or set(pick(scores, 2)[0].tolist()) == {4, 1}
    assert set(pick(scores, 2, groups=2, top_groups=1)[0].tolist()) == {0, 1}


def test_an_even_histogram_is_uniform_routing() -> None:
    assert_close(measured([[1.0] * 64], 6, 16, 4), uniform(64, 6, 16, 4), rel=0.02)


def test_a_skewed_histogram_sends_fewer_copies_to_a_hotter_port() -> None:
    """Half of all load on the experts of the first rank."""
    skewed = measured([[28.0] * 4 + [1.0] * 60, [28.0] * 4 + [1.0] * 60], 6, 16, 4)
    even = uniform(64, 6, 16, 4)
    assert skewed.gpus < even.gpus
    assert skewed.nodes < even.nodes
    assert skewed.gpu_skew > 2
    assert skewed.gpu_skew >= skewed.node_skew > 1


@given(shapes())
def test_fewer_duplicates_the_larger_the_place(shape: tuple[int, int, int, int]) -> None:
    experts, top_k, ranks, nodes = shape
    c = uniform(experts, top_k, ranks, nodes)
    assert 1 - 1e-9 <= c.nodes <= c.gpus + 1e-9
    assert c.gpus <= min(top_k, ranks) + 1e-9
    assert c.nodes <= nodes + 1e-9


@given(shapes())
def test_hybrid_never_crosses_more_often_than_direct_nor_direct_than_low_latency(shape: tuple[int, int, int, int]) -> None:
    _, _, ranks, nodes = shape
    c = uniform(*shape)
    nic = [traffic(mode, c, ranks, nodes).nic for mode in (Mode.HYBRID, Mode.DIRECT, Mode.LOW_LATENCY)]
    assert nic[0] <= nic[1] + 1e-9
    assert nic[1] <= nic[2] + 1e-9


@given(shapes())
def test_copies_of_direct_are_those_to_other_gpus(shape: tuple[int, int, int, int]) -> None:
    """NIC, NVLink and the token's own share make up all its destinations."""
    _, _, ranks, nodes = shape
    c = uniform(*shape)
    flow = traffic(Mode.DIRECT, c, ranks, nodes)
    assert flow.nic + flow.nvlink == pytest.approx(c.gpus * (ranks - 1) / ranks)


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_group_allowed_is_uniform_routing(groups: int, nodes: int) -> None:
    nodes = math.gcd(groups, nodes) or 1
    experts, ranks = groups * 8, groups
    assert_close(group_limited(experts, 4, ranks, nodes, groups, groups), uniform(experts, 4, ranks, nodes), rel=1e-9)


def assert_close(got: Copies, expected: Copies, rel: float) -> None:
    assert (got.experts, got.gpus, got.nodes) == pytest.approx((expected.experts, expected.gpus, expected.nodes), rel=rel)
