"""Calibrations: what a byte and a start cost, read from `calibrations.toml` or fitted to a user's own bench output."""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ep_backend import layout
from ep_backend.files import read_text
from ep_backend.layout import Payload
from ep_backend.modes import Mode

Op = Literal["dispatch", "combine"]
OPS: tuple[Op, ...] = ("dispatch", "combine")
MOST = 1e18
MEASURED_BYTES = 64 << 20


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Line(_Strict):
    """t = fixed_us + bytes / rate for one mode and operation, from `nodes` scale-up domains on; GB/s are 1e9 bytes."""

    mode: Mode
    op: Op
    nodes: int = Field(ge=1)
    fixed_us: float = Field(ge=0)
    nic_gbs: float | None = Field(default=None, gt=0)
    nvlink_gbs: float | None = Field(default=None, gt=0)
    error: float = Field(ge=0, description="relative half-width of the band")
    basis: Literal["measured", "published", "assumed"]


class Calibration(_Strict):
    """Lines of one implementation on one kind of cluster, with their source."""

    title: str
    source: str
    records: Literal["ep-backend", "deepep"]
    sm_gbs: dict[Op, float]
    lines: list[Line]

    def line(self, mode: Mode, op: Op, nodes: int) -> Line:
        """The line for that many scale-up domains: the last that begins at or below it."""
        fitting = [line for line in self.lines if (line.mode, line.op) == (mode, op) and line.nodes <= nodes]
        return max(fitting, key=lambda line: line.nodes)

    @property
    def sends_one_an_expert(self) -> bool:
        """DeepEP V1's low_latency sends a record an expert to NVLink peers too; ours sends one a GPU to mapped peers."""
        return self.records == "deepep"

    def record_bytes(self, mode: Mode, op: Op, payload: Payload, hidden: int, top_k: int) -> int:
        """Bytes of one record on a link.

        DeepEP's: V1 low_latency 16 + H + 4 H/128 (fp8) or 16 + 2 H; V2 as staged in shared memory, its wire record and a
        32-byte slot (7552 B at H=7168, K=8); combine 2 H, V2 with 8 K of metadata.
        """
        if self.records == "ep-backend":
            if op == "combine":
                return layout.combine_record_bytes(payload, hidden)
            return layout.record(payload, hidden, top_k).bytes
        row = layout.payload_bytes(payload, hidden) + layout.scale_bytes(payload, hidden)
        if mode is Mode.LOW_LATENCY:
            return 16 + row if op == "dispatch" else 2 * hidden
        return row + layout.align_up(8 * top_k + 4 * (1 + top_k), 32) + 32 if op == "dispatch" else 2 * hidden + 8 * top_k


@cache
def calibrations() -> dict[str, Calibration]:
    """The calibrations that ship with the package, by name."""
    text = files("ep_backend.plan").joinpath("calibrations.toml").read_text(encoding="utf-8")
    return {name: Calibration.model_validate(table) for name, table in tomllib.loads(text).items()}


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through (bytes, microseconds) points, and how far the farthest point lies from it."""

    fixed_us: float
    gbs: float
    worst_error: float


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """Least squares of the relative error of t = fixed + bytes / rate, fixed not below 0. Needs two different sizes."""
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"{len(points)} points have fewer than two different sizes, so no line can be fitted")
    weights = [1 / us**2 for _, us in points]
    mean_size = _mean(weights, [size for size, _ in points])
    mean_us = _mean(weights, [us for _, us in points])
    spread = _mean(weights, [(size - mean_size) ** 2 for size, _ in points])
    slope = _mean(weights, [(size - mean_size) * (us - mean_us) for size, us in points]) / spread
    fixed = mean_us - slope * mean_size
    if fixed < 0:
        fixed = 0.0
        slope = sum(w * s * us for w, (s, us) in zip(weights, points, strict=True)) / sum(
            w * s * s for w, (s, _) in zip(weights, points, strict=True)
        )
    if slope <= 0:
        raise ValueError("the times do not grow with the bytes, so there is no bandwidth in them; measure larger batches")
    errors = [abs(fixed + slope * size - us) / us for size, us in points]
    return Fit(fixed, 1e-3 / slope, max(errors))


Count = Annotated[float, Field(strict=True, ge=0, le=MOST)]


class BenchTime(BaseModel):
    """One operation of a bench row. Sums of squares of numbers in these bounds are finite, and not 0."""

    p50_us: float = Field(ge=1e-3, le=1e12)
    remote_bytes: float = Field(ge=0, le=MOST, description="what a rank sent to other GPUs")
    scale_out_bytes: float | None = Field(
        default=None, ge=0, le=MOST, description="the part to other nodes, where there are several"
    )


class BenchRow(BaseModel):
    """What recalibration reads of a row of `ep-backend bench`; further keys are ignored."""

    mode: Mode
    ranks: int = Field(ge=1)
    gpus_per_node: int | None = Field(default=None, ge=1, description="absent: all ranks in one NVLink domain")
    dispatch: BenchTime
    combine: BenchTime

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // (self.gpus_per_node or self.ranks))


def recalibrated(base: Calibration, bench: Path) -> Calibration:
    """`base` with every line that `bench` (one JSON object a line) has data for; ValueError names the file and line."""
    groups: dict[tuple[Mode, Op, int], list[tuple[float, float]]] = defaultdict(list)
    for number, text in _numbered_lines(bench):
        try:
            row = BenchRow.model_validate_json(text)
        except ValidationError as error:
            if _failed(text):
                continue
            raise ValueError(f"{bench}:{number}: no row of a bench: {_reasons(error)}") from None
        for op, time in zip(OPS, (row.dispatch, row.combine), strict=True):
            size = time.remote_bytes if row.nodes == 1 else time.scale_out_bytes
            if size is None:
                raise ValueError(f"{bench}:{number}: {op} over {row.nodes} nodes has no scale_out_bytes")
            groups[row.mode, op, row.nodes].append((size, time.p50_us))
    if not groups:
        raise ValueError(f"{bench} has no rows; write them with `ep-backend bench`")
    fitted = [_line(key, points, bench) for key, points in groups.items()]
    replaced = {(line.mode, line.op, line.nodes) for line in fitted}
    kept = [line for line in base.lines if (line.mode, line.op, line.nodes) not in replaced]
    title = f"{base.title}; recalibrated from {bench.name}"
    return base.model_copy(update={"title": title, "records": "ep-backend", "lines": [*kept, *fitted]})


def _failed(text: str) -> bool:
    """Is it the line of a case that failed?"""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and "error" in row


def _line(key: tuple[Mode, Op, int], points: Sequence[tuple[float, float]], bench: Path) -> Line:
    mode, op, nodes = key
    try:
        result = fit(points)
    except ValueError as error:
        raise ValueError(f"{bench}: {mode.value} {op} on {nodes} node(s): {error}") from None
    rate = {"nvlink_gbs" if nodes == 1 else "nic_gbs": result.gbs}
    return Line(mode=mode, op=op, nodes=nodes, fixed_us=result.fixed_us, error=result.worst_error, basis="measured", **rate)


def _numbered_lines(file: Path) -> Iterable[tuple[int, str]]:
    try:
        text = read_text(file, MEASURED_BYTES)
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}); give the JSON lines of `ep-backend bench`") from None
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _reasons(error: ValidationError) -> str:
    return ", ".join(f"{'.'.join(map(str, e['loc'])) or 'line'}: {e['msg'].lower()}" for e in error.errors())


def _mean(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


class Histogram(BaseModel):
    """Expert load: one row a layer, or one row alone."""

    expert_counts: list[list[Count]] | list[Count]


def read_counts(file: Path) -> list[list[float]]:
    """A histogram of expert load: {"expert_counts": [[...], ...]}, one row a layer, or one row alone. ValueError if not."""
    try:
        given = Histogram.model_validate_json(read_text(file, MEASURED_BYTES)).expert_counts
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror})") from None
    except ValidationError:
        form = f'{{"expert_counts": [[...], ...]}} with numbers from 0 to {MOST:g}'
        raise ValueError(f"{file} is no histogram of expert load: {form}") from None
    counts = [row for row in given if isinstance(row, list)] or [[count for count in given if isinstance(count, float)]]
    if any(len(row) != len(counts[0]) or not sum(row) for row in counts):
        raise ValueError(f"{file}: every row of expert_counts needs the same length and counts from 0, not all 0")
    return counts
