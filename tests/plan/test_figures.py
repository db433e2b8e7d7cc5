"""The published figures that the cost model must give, in the record sizes that they were published with."""

from collections.abc import Callable

import pytest

from ep_backend.layout import Payload, Shape, slot_mode_bytes
from ep_backend.modes import Mode
from ep_backend.plan.calibration import Calibration, calibrations
from ep_backend.plan.copies import Copies, exactly, uniform
from ep_backend.plan.cost import Cost, Links, cost, traffic

H, E, K, T, GPUS = 7168, 256, 8, 128, 8
LINKS = Links(46.0, 160.0)


@pytest.fixture
def h800() -> Calibration:
    return calibrations()["deepep-v1-h800"]


@pytest.fixture
def dispatch(h800: Calibration) -> Callable[[Mode, Copies, int], Cost]:
    def at(mode: Mode, copies: Copies, ranks: int) -> Cost:
        nodes = ranks // GPUS
        flow = traffic(mode, copies, ranks, nodes, h800.sends_one_an_expert)
        return cost(mode, "dispatch", T, flow, nodes, h800, LINKS, Payload.FP8, H, K)

    return at


@pytest.mark.parametrize(
    ("ranks", "megabytes", "microseconds", "published"),
    [(16, 3.79, 117, 118), (32, 5.69, 159, 155), (64, 6.64, 179, 173), (128, 7.11, 190, 192), (256, 7.35, 195, 194)],
)
def test_low_latency_at_each_published_size(
    dispatch: Callable[[Mode, Copies, int], Cost], ranks: int, megabytes: float, microseconds: int, published: int
) -> None:
    got = dispatch(Mode.LOW_LATENCY, uniform(E, K, ranks, ranks // GPUS), ranks)
    assert got.record_bytes == 7408
    assert round(got.nic_bytes / 1e6, 2) == megabytes
    assert round(got.us) == microseconds
    assert got.bottleneck == "nic"
    assert got.low_us <= published <= got.high_us


@pytest.mark.parametrize(("ranks", "published"), [(16, 195), (32, 273), (64, 314), (128, 369), (256, 360)])
def test_low_latency_combine_lies_in_its_band(h800: Calibration, ranks: int, published: int) -> None:
    nodes = ranks // GPUS
    flow = traffic(Mode.LOW_LATENCY, uniform(E, K, ranks, nodes), ranks, nodes, True)
    got = cost(Mode.LOW_LATENCY, "combine", T, flow, nodes, h800, LINKS, Payload.FP8, H, K)
    assert got.record_bytes == 14336
    assert got.low_us <= published <= got.high_us


def test_ep128_on_16_nodes_in_records_of_7552(h800: Calibration) -> None:
    """The table has one record size for all rows; only low_latency's own record differs from it."""
    everywhere, four = uniform(E, K, 128, 16), exactly(E, K, 128, 16, 4)
    rows = {
        "low_latency": traffic(Mode.LOW_LATENCY, everywhere, 128, 16).nic,
        "hybrid": traffic(Mode.HYBRID, everywhere, 128, 16).nic,
        "hybrid, 4 nodes": traffic(Mode.HYBRID, four, 128, 16).nic,
    }
    assert {name: round(copies, 2) for name, copies in rows.items()} == {
        "low_latency": 7.5,
        "hybrid": 6.12,
        "hybrid, 4 nodes": 3.75,
    }
    assert h800.record_bytes(Mode.HYBRID, "dispatch", Payload.FP8, H, K) == 7552
    assert round(T * rows["hybrid"] * 7552 / 1e6, 2) == 5.91
    assert round(T * rows["hybrid"] * 7552 / 46e3) == 129
    assert round(T * rows["hybrid, 4 nodes"] * 7552 / 1e6, 2) == pytest.approx(3.62, abs=0.011)
    assert round(T * rows["hybrid, 4 nodes"] * 7552 / 46e3) == 79
    low_latency = cost(
        Mode.LOW_LATENCY, "dispatch", T, traffic(Mode.LOW_LATENCY, everywhere, 128, 16), 16, h800, LINKS, Payload.FP8, H, K
    )
    assert (round(low_latency.nic_bytes / 1e6, 2), round(low_latency.bandwidth_us)) == (7.11, 155)
    assert round(everywhere.gpus, 2) == 7.89


def test_the_product_writes_records_of_7520() -> None:
    ours = calibrations()["link-rate"]
    assert {mode: ours.record_bytes(mode, "dispatch", Payload.FP8, H, K) for mode in Mode} == dict.fromkeys(Mode, 7520)


def test_slots_by_expert_are_mostly_empty() -> None:
    """At EP64 in records of 7408 B 232 MiB are reserved; what arrives, on average what a rank sends, is 7.2 MiB."""
    shape = Shape(64, 8, E, K, H, 0, 0, T, 0, per_expert=1, staging=0, ring_slots=0, record_bytes=7408, combine_bytes=14336)
    assert round(slot_mode_bytes(shape, T, per_expert=True).dispatch / 2**20) == 232
    assert round(T * uniform(E, K, 64, 8).experts * 7408 / 2**20, 1) == 7.2
