"""The command line starts quickly and imports nothing heavy."""

import json
import subprocess
import sys
import time

import pytest

from ep_backend.modes import Mode
from ep_backend.policy import POLICY


def test_importing_and_helping_need_no_torch() -> None:
    code = (
        "import sys, ep_backend\n"
        "from typer.testing import CliRunner\n"
        "from ep_backend.cli.app import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "assert 'numpy' not in sys.modules, 'numpy'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def best_of(times: int, *arguments: str) -> float:
    """Seconds of the quickest run: the others waited for the machine."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def test_help_takes_at_most_350_ms_more_than_python() -> None:
    extra = best_of(7, "-m", "ep_backend", "--help") - best_of(7, "-c", "pass")
    assert extra <= 0.350, f"{extra * 1000:.0f} ms"


@pytest.mark.parametrize("command", ["checkpoint", "up", "down", "status", "flip", "ask", "demo", "modes", "doctor"])
def test_every_command_has_help(command: str) -> None:
    subprocess.run([sys.executable, "-m", "ep_backend", command, "--help"], check=True, capture_output=True, timeout=60)


def test_modes_prints_the_tables_that_the_code_uses() -> None:
    def run(*options: str) -> str:
        command = [sys.executable, "-m", "ep_backend", "modes", *options]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    tables = json.loads(run("--json"))
    assert list(tables["modes"]) == [mode.value for mode in Mode]
    assert [row["mode"] for row in tables["policy"]] == [row.mode.value for row in POLICY]
    assert all(mode.value in run() for mode in Mode)
