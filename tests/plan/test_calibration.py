"""Fits, and a user's own bench output that recalibrates a preset."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_backend.modes import Mode
from ep_backend.plan.calibration import calibrations, fit, read_counts, recalibrated


@given(st.floats(0, 500), st.floats(1, 900), st.sets(st.integers(1, 10**9), min_size=2, max_size=8))
def test_a_fit_finds_the_line_that_made_the_points(fixed: float, gbs: float, sizes: set[int]) -> None:
    if max(sizes) < 1.5 * min(sizes) or max(sizes) / gbs / 1e3 < 0.01 * (fixed + 1):
        return  # no slope to be found
    found = fit([(size, fixed + size / gbs / 1e3) for size in sizes])
    assert found.worst_error < 1e-3
    assert found.fixed_us + 1e8 / found.gbs / 1e3 == pytest.approx(fixed + 1e8 / gbs / 1e3, rel=0.02)


def test_a_fit_never_starts_below_zero() -> None:
    found = fit([(1e6, 10.0), (2e6, 30.0), (3e6, 50.0)])
    assert found.fixed_us == 0
    assert found.worst_error > 0.1


def test_points_without_a_slope_are_refused() -> None:
    with pytest.raises(ValueError, match="fewer than two different sizes"):
        fit([(1e6, 10.0), (1e6, 11.0)])
    with pytest.raises(ValueError, match="do not grow with the bytes"):
        fit([(1e6, 30.0), (2e6, 20.0), (3e6, 10.0)])


def bench(tmp_path: Path, *rows: dict[str, object]) -> Path:
    file = tmp_path / "bench.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def row(tokens: int, **keys: object) -> dict[str, object]:
    """8 us + bytes / 345 GB/s for dispatch, 9 us + bytes / 300 GB/s for combine."""
    sent = {"dispatch": tokens * 20_000.0, "combine": tokens * 39_000.0}
    times = {"dispatch": 8 + sent["dispatch"] / 345e3, "combine": 9 + sent["combine"] / 300e3}
    ops = {op: {"p50_us": times[op], "remote_bytes": sent[op], "p99_us": 1e9} for op in sent}
    return {"mode": "low_latency", "ranks": 4, "tokens": tokens, "device": "H200", **ops, **keys}


def test_a_bench_replaces_the_lines_it_measured(tmp_path: Path) -> None:
    base = calibrations()["link-rate"]
    failed = {"mode": "direct", "ranks": 4, "error": "rank 1: it did not go on"}
    found = recalibrated(base, bench(tmp_path, failed, *(row(tokens) for tokens in (1, 8, 64, 128))))
    dispatch, combine = (found.line(Mode.LOW_LATENCY, op, 1) for op in ("dispatch", "combine"))
    assert (dispatch.fixed_us, dispatch.nvlink_gbs) == (pytest.approx(8, abs=0.01), pytest.approx(345, rel=1e-3))
    assert (combine.fixed_us, combine.nvlink_gbs) == (pytest.approx(9, abs=0.01), pytest.approx(300, rel=1e-3))
    assert dispatch.basis == "measured"
    assert dispatch.error < 0.01
    assert found.line(Mode.DIRECT, "dispatch", 1) == base.line(Mode.DIRECT, "dispatch", 1)
    assert found.line(Mode.LOW_LATENCY, "dispatch", 2) == base.line(Mode.LOW_LATENCY, "dispatch", 2)


def test_over_several_nodes_the_bytes_to_other_nodes_count(tmp_path: Path) -> None:
    rows = []
    for tokens in (8, 128):
        r = row(tokens, gpus_per_node=2)
        for op in ("dispatch", "combine"):
            r[op] = {"p50_us": 20 + tokens * 1e4 / 46e3, "remote_bytes": tokens * 9e9, "scale_out_bytes": tokens * 1e4}
        rows.append(r)
    line = recalibrated(calibrations()["link-rate"], bench(tmp_path, *rows)).line(Mode.LOW_LATENCY, "dispatch", 2)
    assert (line.nic_gbs, line.nvlink_gbs) == (pytest.approx(46, rel=1e-3), None)
    with pytest.raises(ValueError, match=r"bench\.jsonl:1: dispatch over 2 nodes has no scale_out_bytes"):
        recalibrated(calibrations()["link-rate"], bench(tmp_path, row(8, gpus_per_node=2)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no rows"),
        ('{"mode": "fast"}', "bench.jsonl:1: no row of a bench: mode: "),
        ("not json", "bench.jsonl:1: no row of a bench"),
        (json.dumps(row(8)), "low_latency dispatch on 1 node.*fewer than two different sizes"),
    ],
)
def test_a_bench_that_cannot_be_used_says_where(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "bench.jsonl").write_text(text)
    with pytest.raises(ValueError, match=reason):
        recalibrated(calibrations()["link-rate"], tmp_path / "bench.jsonl")


@pytest.mark.parametrize("text", ["{}", "[]", '{"expert_counts": [[1, 2], [1]]}', '{"expert_counts": [[0, 0]]}', "{"])
def test_a_histogram_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "load.json").write_text(text)
    with pytest.raises(ValueError, match="expert_counts"):
        read_counts(tmp_path / "load.json")


def test_a_histogram_is_a_row_a_layer_or_one_row(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    file.write_text('{"expert_counts": [1, 2, 3]}')
    assert read_counts(file) == [[1.0, 2.0, 3.0]]
    file.write_text('{"expert_counts": [[1, 2], [3, 4]]}')
    assert read_counts(file) == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(("us", "size"), [(1e300, 1.0), (1e-200, 1.0), (1.0, 1e300), (1e12, 1e18), (1e-3, 1.0), (1.0, 0.0)])
def test_rows_with_absurd_numbers_are_fitted_or_refused(us: float, size: float, tmp_path: Path) -> None:
    bench = tmp_path / "bench.jsonl"
    times = [{"p50_us": us * part, "remote_bytes": size * part} for part in (1.0, 0.5)]
    rows = [{"mode": "normal", "ranks": 2, "dispatch": time, "combine": time} for time in times]
    bench.write_text("\n".join(map(json.dumps, rows)))
    try:
        lines = recalibrated(calibrations()["link-rate"], bench).lines
    except ValueError as error:
        assert str(bench) in str(error)
    else:
        assert all(math.isfinite(line.fixed_us + line.error) for line in lines)
