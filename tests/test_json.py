"""docs/json.md and docs/doctor.md name every key that a command prints as JSON, and no other."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BROKEN = ROOT / "tests" / "deployment" / "broken"
EP128 = ROOT / "deploy" / "deepseek-v3-h800-ep128.yaml"
SERVE = "vllm serve deepseek-ai/DeepSeek-V3 --data-parallel-size 8 --enable-expert-parallel --port 8000 --max-num-seqs 64\n"


def printed(*command: str) -> Any:
    done = subprocess.run([sys.executable, "-m", "ep_backend", *command], capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout)


def documented(page: str, section: str) -> set[str]:
    """First cells of the table below a heading."""
    text = (ROOT / "docs" / page).read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


def keys(value: Any, named: tuple[str, ...] = (), before: str = "") -> set[str]:
    """Paths of all keys. `named`: keys whose own keys are names, written as `*`."""
    if isinstance(value, list):
        return {path for each in value for path in keys(each, named, f"{before}[]" if before else "")}
    if not isinstance(value, dict):
        return set()
    prefix = f"{before}." if before else ""
    found = set[str]()
    for key, below in value.items():
        found.add(f"{prefix}{key}")
        for each in below.values() if key in named else [below]:
            found |= keys(each, named, f"{prefix}{key}.*" if key in named else f"{prefix}{key}")
    return found


def test_lint() -> None:
    rows = printed("lint", str(BROKEN / "flag_gone.yaml"), str(BROKEN / "direct_across_nodes.yaml"), "--format", "json")
    assert len(rows) >= 2
    assert {frozenset(row) for row in rows} == {frozenset(documented("json.md", "lint --format json"))}


def test_diff(tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    new.write_text(EP128.read_text().replace("mode: auto, max_tokens: 128", "mode: hybrid, max_tokens: 128"))
    rows = printed("diff", str(EP128), str(new), "--json")
    assert rows
    assert {frozenset(row) for row in rows} == {frozenset(documented("json.md", "diff --json"))}


def test_migrate(tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text(SERVE)
    made = printed("migrate", str(tmp_path / "serve.sh"), "--json")
    assert made["changes"]
    assert keys(made) == documented("json.md", "migrate --json")


def test_modes() -> None:
    assert keys(printed("modes", "--json"), named=("modes",)) == documented("json.md", "modes --json")


def test_doctor() -> None:
    report = printed("doctor", "--json")
    below = {key for row in report["checks"] for key in row}
    assert set(report) | below == documented("doctor.md", "Keys of `--json`")
    assert set(report["counts"]) == {"pass", "warn", "fail", "skip"}


@pytest.mark.parametrize("command", ["plan", "lint", "diff", "migrate", "doctor", "modes", "status"])
def test_help_names_the_page(command: str) -> None:
    """And the page, or the one it names, has the command."""
    words = [sys.executable, "-m", "ep_backend", command, "--help"]
    text = subprocess.run(words, capture_output=True, text=True, timeout=60, env={"COLUMNS": "200"}).stdout
    pages = {"plan": "docs/plan.md", "doctor": "docs/doctor.md"}
    assert pages.get(command, "docs/json.md") in text
    assert f"| `{command} " in (ROOT / "docs" / "json.md").read_text()
    assert "(docs/json.md)" in (ROOT / "README.md").read_text()
