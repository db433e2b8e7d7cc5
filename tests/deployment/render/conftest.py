"""Rendered scripts run with stand-ins for the engines, which write down how they were called."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import ep_backend
from ep_backend.deployment.migrate import migrate
from ep_backend.deployment.render import render, write

from ..migrate.cases import CASES

GOLDEN = Path(__file__).parent / "golden"
ENGINES = ("vllm", "vllm-router", "srun", "sglang")
RECORD = """\
#!{python}
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], dict(os.environ)]), file=calls)
"""
# The module that reads this node runs for real, the engine does not.
PYTHON3 = """\
#!/bin/bash
if [[ $1 == -c || $2 == ep_backend.* ]]; then exec {python} "$@"; fi
exec sglang "$@"
"""
NVIDIA_SMI = """\
#!/bin/bash
for i in 0 1 2 3 4 5 6 7; do echo "GPU $i: NVIDIA H200 (UUID: GPU-$i$i$i$i-aa)"; done
"""


@dataclass
class Call:
    """How a program was called."""

    program: str
    arguments: list[str]
    env: dict[str, str]


@dataclass
class Launcher:
    """Runs rendered scripts."""

    folder: Path
    programs: Path

    def run(self, script: Path, **env: str) -> tuple[int, str, list[Call]]:
        """Exit status, standard error and the calls of stand-ins."""
        calls = self.folder / "calls"
        calls.write_text("")
        here = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "CALLS": str(calls),
            "PYTHONPATH": os.pathsep.join([str(Path(ep_backend.__path__[0]).parent), *sys.path]),
        }
        done = subprocess.run(
            ["bash", str(script)], env=here | env, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, done.stderr, [Call(*json.loads(line)) for line in calls.read_text().splitlines()]

    def node(self, script: Path, node: int, **env: str) -> Call:
        code, error, calls = self.run(script, NODE=str(node), LEADER="127.0.0.1", **env)
        assert code == 0, error
        (call,) = calls
        return call


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    programs = tmp_path / "bin"
    programs.mkdir()
    texts = {name: RECORD for name in ENGINES} | {"python3": PYTHON3, "nvidia-smi": NVIDIA_SMI}
    for name, text in texts.items():
        (programs / name).write_text(text.format(python=shlex.quote(sys.executable)) if "{python}" in text else text)
        (programs / name).chmod(0o755)
    return Launcher(tmp_path, programs)


@pytest.fixture
def rendered(tmp_path: Path) -> Callable[..., Path]:
    """Renders a golden input, with replacements in its text, into a folder."""

    def make(name: str, *replacements: tuple[str, str], kinds: tuple[str, ...] = ()) -> Path:
        text = (GOLDEN / f"{name}.yaml").read_text()
        for old, new in replacements:
            assert old in text, old
            text = text.replace(old, new)
        file, out = tmp_path / f"{name}.yaml", tmp_path / "out"
        file.write_text(text)
        write(render(file, kinds), out)  # type: ignore[arg-type]
        return out

    return make


@pytest.fixture
def rendered_case(tmp_path: Path) -> Callable[..., Path]:
    """Migrates a public setup and renders what comes out."""

    def make(name: str) -> Path:
        file, out = tmp_path / f"{name}.yaml", tmp_path / name
        file.write_text(migrate(CASES[name].texts, **CASES[name].options).text)  # type: ignore[arg-type]
        write(render(file), out)
        return out

    return make
