"""The JSON lines of earlier runs, read and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ep_backend.files import read_text

MOST_BYTES = 64 << 20
WRITTEN_BY = "give the files that `ep-backend bench --output FILE` wrote"


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Operation(_Checked):
    """What a table reads of an operation."""

    p50_us: float = Field(gt=0)
    p90_us: float
    p99_us: float
    max_us: float
    remote_bytes: int
    bytes_as_predicted: bool
    busiest_port_bytes: int
    remote_gb_s: float
    logical_gb_s: float
    blocks: dict[str, list[int]] = {}


class _Failed(_Checked):
    """A case that failed."""

    name: str
    ranks: int
    error: str


class _Measured(_Checked):
    """A case's line: what a table reads, and by what it tells lines apart."""

    name: str
    mode: str
    layout: str
    tokens: int
    fp8: bool
    graph: bool
    host_counts: bool
    sms: int | None
    routing: str
    nodes: int = Field(ge=1)
    hidden: int
    experts: int
    top_k: int
    ranks: int = Field(ge=1)
    gpus_per_node: int
    dispatch: _Operation
    combine: _Operation
    device: str = ""
    fabric: str | None = None
    input_hash: str | None = None
    rounds: int | None = None
    commit: str | None = None
    driver: str | None = None
    nvshmem: str | None = None
    torch: str | None = None
    ceiling_gb_s: float = 0
    ingress_gb_s: float = Field(default=1, gt=0)
    hbm_copy_gb_s: float = 0
    empty_graph_us: float = 0


def read(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """A file's lines, and notes on cut ones, which are left out; ValueError names file, line and reason."""
    try:
        text = read_text(file, MOST_BYTES)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}; {WRITTEN_BY}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}:{line}: no text (byte {error.start} is not UTF-8); {WRITTEN_BY}") from None
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    *whole, rest = text.split("\n")
    for number, one in enumerate([*whole, rest], 1):
        if not one.strip():
            continue
        try:
            line = json.loads(one)
        except (ValueError, RecursionError) as error:
            if one.startswith("{") and (number > len(whole) or not one.endswith("}")):
                notes.append(f"{file}:{number} is cut, as an interrupted run leaves it, and is left out")
                continue
            raise ValueError(f"{file}:{number}: no JSON ({error}); remove that line, or {WRITTEN_BY}") from None
        if problem := _problem(line):
            raise ValueError(f"{file}:{number}: no line of the bench ({problem}); {WRITTEN_BY}")
        lines.append(line)
    return lines, notes


def _problem(line: Any) -> str | None:
    if not isinstance(line, dict):
        return f"a {type(line).__name__}, not an object"
    try:
        (_Failed if "error" in line else _Measured).model_validate(line)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    return None
