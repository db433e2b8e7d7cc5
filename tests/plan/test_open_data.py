"""The model against measurements that others made: tests/data/aiconfigurator says whose, and under which licence."""

import csv
from pathlib import Path
from statistics import mean, median

import pytest

from ep_backend.layout import Payload
from ep_backend.modes import Mode
from ep_backend.plan.calibration import Op, calibrations, fit
from ep_backend.plan.copies import uniform
from ep_backend.plan.cost import Cost, Links, cost, sm_advice, traffic

DATA = Path(__file__).parents[1] / "data" / "aiconfigurator"
H, E, K = 7168, 256, 8
LINKS = Links(47.0, 300.0)
H100 = calibrations()["deepep-v1-h100"]
Row = dict[str, float]


def rows(name: str, **wanted: int) -> list[Row]:
    with (DATA / f"{name}.csv").open() as file:
        every = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    return [row for row in every if all(row[key] == value for key, value in wanted.items())]


def predicted(mode: Mode, op: Op, row: Row, sms: int | None = None) -> Cost:
    nodes = int(row["nodes"])
    flow = traffic(mode, uniform(E, K, 8 * nodes, nodes), 8 * nodes, nodes, one_an_expert=True)
    return cost(mode, op, int(row["tokens"]), flow, nodes, H100, LINKS, Payload.FP8, H, K, sms)


def errors(mode: Mode, op: Op, data: list[Row], sms: int | None = None) -> list[float]:
    return [abs(predicted(mode, op, row, sms).us - row[f"{op}_us"]) / row[f"{op}_us"] for row in data]


def small(data: list[Row]) -> list[Row]:
    return [row for row in data if 2 <= row["tokens"] <= 256]


def test_the_extract_is_whole() -> None:
    assert [len(rows("low_latency", nodes=n)) for n in (1, 2, 4, 8)] == [17, 13, 13, 13]
    assert len(rows("normal", sms=24)) == 18


def test_low_latency_fitted_on_ep16_and_ep64_predicts_ep32() -> None:
    points = [
        (row["tokens"] * K * 7408 * (1 - 1 / nodes), row["dispatch_us"])
        for nodes in (2, 8)
        for row in small(rows("low_latency", nodes=nodes))
    ]
    found = fit(points)
    unseen = small(rows("low_latency", nodes=4))
    times = [found.fixed_us + row["tokens"] * K * 7408 * 0.75 / found.gbs / 1e3 for row in unseen]
    assert mean(abs(t - row["dispatch_us"]) / row["dispatch_us"] for t, row in zip(times, unseen, strict=True)) <= 0.10
    assert found.gbs == pytest.approx(47, abs=2)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_low_latency_preset_lies_in_its_band(op: Op, nodes: int) -> None:
    data = small(rows("low_latency", nodes=nodes))
    found = errors(Mode.LOW_LATENCY, op, data)
    assert mean(found) <= 0.10
    assert max(found) <= H100.line(Mode.LOW_LATENCY, op, nodes).error


@pytest.mark.parametrize(("nodes", "sms"), [(1, 20), (2, 24), (4, 24)])
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_normal_preset_at_its_tuned_sms(op: Op, nodes: int, sms: int) -> None:
    found = errors(Mode.NORMAL, op, rows("normal", nodes=nodes, sms=sms))
    assert mean(found) <= 0.06
    assert max(found) <= H100.line(Mode.NORMAL, op, nodes).error


@pytest.mark.parametrize("nodes", [2, 4])
def test_normal_at_24_sms_with_the_sm_term(nodes: int) -> None:
    assert mean(errors(Mode.NORMAL, "dispatch", rows("normal", nodes=nodes, sms=24), sms=24)) <= 0.06


@pytest.mark.parametrize(("nodes", "sms"), [(n, s) for n in (2, 4) for s in (4, 8, 16, 20)])
def test_too_few_sms_pace_the_copy(nodes: int, sms: int) -> None:
    data = [row for row in rows("normal", nodes=nodes, sms=sms) if row["tokens"] >= 4096]
    assert median(errors(Mode.NORMAL, "dispatch", data, sms)) <= 0.15
    if sms <= 8:
        assert {predicted(Mode.NORMAL, "dispatch", row, sms).bottleneck for row in data} == {"sms"}


def test_sm_advice_is_where_the_measurements_stop_falling() -> None:
    """At EP32 12 SMs fill the NIC; at EP16 24 still help."""
    advice = {}
    for nodes in (2, 4):
        flow = traffic(Mode.NORMAL, uniform(E, K, 8 * nodes, nodes), 8 * nodes, nodes)
        advice[nodes] = sm_advice(Mode.NORMAL, flow, nodes, H100, LINKS)
    assert advice == {2: 24, 4: 12}
    measured = {(r["nodes"], r["sms"]): r["dispatch_us"] for r in rows("normal", tokens=4096)}
    assert measured[4, 12] <= 1.03 * measured[4, 24]
    assert measured[2, 20] > 1.1 * measured[2, 24]
