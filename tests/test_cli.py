"""The command line starts quickly and imports nothing heavy."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ep_backend.cli.app import app
from ep_backend.modes import Mode
from ep_backend.policy import POLICY

ROOT = Path(__file__).parents[1]
EP128 = str(ROOT / "deploy" / "deepseek-v3-h800-ep128.yaml")


def test_importing_and_helping_need_no_torch() -> None:
    code = (
        "import sys, ep_backend\n"
        "from typer.testing import CliRunner\n"
        "from ep_backend.cli.app import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'ruamel.yaml', 'httpx', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("command", ["checkpoint", "up", "down", "status", "flip", "ask", "demo", "modes", "doctor"])
def test_every_command_has_help(command: str) -> None:
    subprocess.run([sys.executable, "-m", "ep_backend", command, "--help"], check=True, capture_output=True, timeout=60)


def documented() -> list[str]:
    """Calls with arguments, in a code span or on a line of their own."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    program = r"(?:ep-backend|\./ep) (?!test)"
    places = re.compile(rf"`{program}(\w+ [^`]+)`|^ *{program}(\w+ [^`#\n]+)", re.MULTILINE)
    found = [call for page in pages for call in places.findall(page.read_text())]
    return sorted({" ".join("".join(call).split()) for call in found})


@pytest.mark.parametrize("call", documented())
def test_a_documented_call_is_one(call: str) -> None:
    name, *arguments = shlex.split(call)
    command = typer.main.get_command(app).commands[name]
    command.make_context(name, arguments)


def test_modes_prints_the_tables_that_the_code_uses() -> None:
    def run(*options: str) -> str:
        command = [sys.executable, "-m", "ep_backend", "modes", *options]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    tables = json.loads(run("--json"))
    assert list(tables["modes"]) == [mode.value for mode in Mode]
    assert [row["mode"] for row in tables["policy"]] == [row.mode.value for row in POLICY]
    assert all(mode.value in run() for mode in Mode)


PRINTING = [
    ["plan", EP128],
    ["plan", EP128, "--json"],
    ["lint", EP128],
    ["explain"],
    ["schema"],
    ["modes"],
    ["--help"],
    ["plan", "--help"],
]


@pytest.mark.parametrize("command", PRINTING, ids=lambda command: "-".join(Path(word).name for word in command))
def test_a_reader_that_is_gone_ends_it_quietly(command: list[str]) -> None:
    """As `| head` does: the status is SIGPIPE's, as of other programs."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "ep_backend", *command], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


@pytest.mark.parametrize("command", PRINTING, ids=lambda command: "-".join(Path(word).name for word in command))
def test_a_full_disk_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "ep_backend", *command], stdout=full, stderr=subprocess.PIPE, timeout=60)
    said = b"ep-backend: the output cannot be written: No space left on device; free space, or send it elsewhere\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_folder_that_cannot_be_made_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ep_backend", "checkpoint", "/proc/no"], capture_output=True, text=True, timeout=60
    )
    said = "ep-backend: /proc/no cannot be written: No such file or directory; choose another folder\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_closed_output_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m ep_backend explain EP101 >&-"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
