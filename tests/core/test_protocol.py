"""PROTOCOL.md says of every signal word who writes it, when, in which order, and what it frees."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from ep_backend.layout import Words

PROTOCOL = Path(__file__).resolve().parents[2] / "kernels" / "PROTOCOL.md"


def rows() -> list[list[str]]:
    """Cells of each table row whose first cell is one `word`, with or without its index."""
    lines = [x.strip() for x in PROTOCOL.read_text().splitlines() if x.strip().startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_word_has_exactly_one_row() -> None:
    described = [cells[0].split("`")[1].split("[")[0].split(" ")[0] for cells in rows()]
    words = [f.name for f in fields(Words) if f.name != "bytes"] + ["abort"]
    assert sorted(d for d in described if d in words) == sorted(words)


def test_no_cell_is_empty() -> None:
    words = {f.name for f in fields(Words)} | {"abort"}
    found = [r for r in rows() if r[0].split("`")[1].split("[")[0].split(" ")[0] in words]
    assert found
    for cells in found:
        assert len(cells) >= 5 and all(cells), f"row {cells[0]} leaves a question open"
