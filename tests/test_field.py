"""FIELD.md maps every known field failure to tests that exist, or says why there is none."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
IDS = (TESTS / "field_rows.txt").read_text().split()
NAMED = re.compile(r"tests/[\w/]+\.py::\w+")


def table() -> dict[str, str]:
    """The last cell of every row, by id."""
    found: dict[str, str] = {}
    for line in (TESTS / "FIELD.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"[A-Z]\d+", cells[0]):
            assert cells[0] not in found, f"{cells[0]} has two rows"
            assert len(cells) == 3 and all(cells), f"{cells[0]}: give id, what breaks, tests or reason"
            found[cells[0]] = cells[2]
    return found


@functools.cache
def functions(path: str) -> set[str]:
    tree = ast.parse((TESTS.parent / path).read_text())
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_no_row_is_missing_and_none_invented() -> None:
    assert len(IDS) == len(set(IDS)) > 100
    assert sorted(table()) == sorted(IDS)


@pytest.mark.parametrize("row", IDS)
def test_a_row_has_tests_or_a_reason(row: str) -> None:
    cell = table()[row]
    if not re.match(r"(not yet|n/a): .{10}", cell):
        assert cell == ", ".join(NAMED.findall(cell)), f"{row}: tests as path::name, comma between"
    for test in NAMED.findall(cell):
        path, name = test.split("::")
        assert (TESTS.parent / path).is_file(), f"{row}: {path} does not exist"
        assert name.startswith("test_") and name in functions(path), f"{row}: {test} does not exist"
