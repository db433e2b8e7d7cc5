"""Lines of one or several starts as a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ep_backend.bench.suites import Case
from ep_backend.bench.targets import OPS, target

Line = dict[str, Any]
# What ran a case. Only lines that agree in it are judged by each other, and where rows differ in it, it has a column.
RUN = ("ranks", "device", "fabric", "sms", "rounds", "commit", "driver", "nvshmem", "torch")
SAME = frozenset([*(field.name for field in fields(Case)), "input_hash", *RUN])
CEILINGS = ("ceiling_gb_s", "ingress_gb_s", "hbm_copy_gb_s", "empty_graph_us")
COLUMNS = ("case", "ranks", "starts", "op", "target", "p50", "range", "p99", "verdict", "GB/s", "ceiling", "remote bytes")


def merge(lines: Iterable[Line]) -> list[list[Line]]:
    """The lines of each case that ran alike, a line a start, in the order in which they came; failures are left out."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        if "error" not in line:
            groups.setdefault(tuple(line.get(key) for key in SAME), []).append(line)
    return list(groups.values())


def medians(group: list[Line]) -> Line:
    """A group's first line with the median of each start's figures."""

    def median(key: str, op: str | None = None) -> float:
        return float(statistics.median(line[op][key] if op else line[key] for line in group))

    merged: Line = {key: median(key) for key in CEILINGS if all(key in line for line in group)}
    for op in OPS:
        figures = {key: median(key, op) for key in ("p50_us", "p90_us", "p99_us", "max_us", "remote_gb_s", "logical_gb_s")}
        exact = all(line[op]["bytes_as_predicted"] for line in group)
        merged[op] = {**group[0][op], **figures, "bytes_as_predicted": exact}
    return {**group[0], **merged}


def _varied(groups: list[list[Line]]) -> list[str]:
    """By what the rows' runs differ, but for the number of ranks, which has a column anyway."""
    found = [group[0] for group in groups if "error" not in group[0]]
    return [key for key in RUN if key != "ranks" and len({line.get(key) for line in found}) > 1]


def columns(groups: list[list[Line]]) -> tuple[str, ...]:
    return *COLUMNS, *_varied(groups)


def cells(groups: list[list[Line]]) -> list[tuple[str, ...]]:
    """A row for each operation of each group; times in microseconds, GB/s of bytes that left the busiest rank."""
    rows: list[tuple[str, ...]] = []
    merged = [(group, medians(group)) for group in groups if "error" not in group[0]]
    varied = _varied(groups)
    for group, line in merged:
        alike = {m["name"]: m for _, m in merged if all(m.get(key) == line.get(key) for key in RUN)}
        for op in OPS:
            limit, found = target(line, op, alike), line[op]
            p50 = [one[op]["p50_us"] for one in group]
            rows.append(
                (
                    *(line["name"], _ranks(line), str(len(group)), op),
                    "" if limit is None else _short(limit),
                    _short(found["p50_us"]),
                    f"{_short(min(p50))} to {_short(max(p50))}" if len(group) > 1 else "",
                    _short(found["p99_us"]),
                    "" if limit is None else _verdict(found["p50_us"], limit),
                    _short(found["remote_gb_s"]),
                    _short(line["ceiling_gb_s"]) if "ceiling_gb_s" in line else "",
                    f"{found['remote_bytes']} {'as' if found['bytes_as_predicted'] else 'NOT as'} predicted",
                    *("" if line.get(key) is None else str(line[key]) for key in varied),
                )
            )
    return rows


def _ranks(line: Line) -> str:
    """Also as nodes x GPUs, if they act as several."""
    nodes = line["nodes"]
    return f"{line['ranks']} ({nodes} x {line['gpus_per_node']})" if nodes > 1 else str(line["ranks"])


def _short(value: float) -> str:
    return f"{value:.4g}" if value < 9999.5 else f"{value:.0f}"


def _verdict(p50: float, limit: float) -> str:
    return "met" if p50 <= limit else f"missed, {p50 / limit:.2f} x"


def table(groups: list[list[Line]]) -> Table:
    result = Table(*columns(groups), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in cells(groups):
        result.add_row(*row)
    for group in groups:
        if "error" in group[0]:
            result.add_row(group[0]["name"], str(group[0]["ranks"]), str(len(group)), "failed")
    return result


def markdown(groups: list[list[Line]]) -> str:
    """The same in Markdown for merged lines, with where and how it was measured."""
    rows = [columns(groups), *cells(groups)]
    blocks = [_blocks(group[0][op]) for group in groups for op in OPS]
    if any(blocks):
        rows = [(*row, one) for row, one in zip(rows, ["blocks of each launch", *blocks], strict=True)]
    text = ["| " + " | ".join(row) + " |" for row in rows]
    text.insert(1, "|" + " --- |" * len(rows[0]))
    facts = ("device", "driver", "cuda", "nvshmem", "torch", "fabric", "commit", "command", "time")
    every = [line for group in groups for line in group]
    notes = []
    for key in (*facts, *CEILINGS):
        if values := sorted({str(line[key]) for line in every if line.get(key) is not None}):
            shown = values if len(values) <= 4 else [values[0], "…", values[-1]]
            notes.append(f"- {key}: {', '.join(shown)}")
    head = "p50, range and p99 in microseconds of the slowest rank: the median over starts, and the least and largest p50."
    return "\n".join([head, "", *text, "", *notes, ""])


def _blocks(found: Line) -> str:
    return ", ".join(f"{kernel} {'+'.join(map(str, each))}" for kernel, each in found.get("blocks", {}).items())


def draw(lines: list[Line], path: Path) -> None:
    """Medians by case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [line for line in lines if "error" not in line]
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(lines) + 1.5))
    places = range(len(lines))
    for shift, op in ((-0.2, "dispatch"), (0.2, "combine")):
        axes.barh([p + shift for p in places], [line[op]["p50_us"] for line in lines], 0.4, label=op)
    axes.set_yticks(list(places), [line["name"] for line in lines])
    axes.set_xlabel("median of the slowest rank, microseconds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
