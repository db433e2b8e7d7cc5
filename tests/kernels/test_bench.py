"""The bench on the host fabric: it starts ranks, checks results and prints one JSON line a case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ep_backend.bench.cli import app
from ep_backend.bench.suites import SUITES


@pytest.mark.slow
def test_tiny_suite_on_the_host_fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    out = tmp_path / "lines.json"
    arguments = ["--fabric", "host", "--suite", "tiny", "--rounds", "3", "--ranks", "2", "--output", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    lines = [json.loads(x) for x in out.read_text().splitlines()]
    assert [x["name"] for x in lines] == [c.name for c in SUITES["tiny"]]
    for line in lines:
        assert line["ranks"] == 2 and line["rounds"] == 3 and line["input_hash"]
        for op in ("dispatch", "combine"):
            assert 0 < line[op]["p50_us"] <= line[op]["p99_us"] <= line[op]["max_us"]
            assert line[op]["remote_bytes"] > 0


def test_an_unknown_suite_is_named() -> None:
    done = CliRunner().invoke(app, ["--suite", "nope"])
    assert done.exit_code == 2
