"""A deployment of fake engines: real processes, ports and shared memory, up within a second."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ep_backend
from ep_backend.deployment.processes import free_ports

FAKE = Path(__file__).with_name("fake_engine.py")

CONFIG = {
    **{"hidden_size": 512, "num_hidden_layers": 2, "n_routed_experts": 16, "num_experts_per_tok": 4},
    **{"moe_intermediate_size": 64, "num_attention_heads": 4},
}

PAIR = """\
name: {name}
topology: {{device: cuda}}
model: {{path: model}}
roles:
  prefill:
    data_parallel: 2
    ep: {{mode: direct, max_tokens: 1024}}
    args: {{max-num-batched-tokens: 1024, max-num-seqs: 8}}
  decode:
    data_parallel: 2
    ep: {{mode: low_latency, max_tokens: 256}}
    args: {{max-num-batched-tokens: 256}}
router: {{port: {port}}}
"""


@dataclass
class Workplace:
    """A folder with a deployment file, and `ep-backend` run in it with fake engines."""

    folder: Path
    file: Path
    env: dict[str, str]

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.folder / "bin" / "python"), "-m", "ep_backend", *arguments],
            cwd=self.folder,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, **env: str) -> tuple[int, str]:
        child = self.start(*arguments, **env)
        output, _ = child.communicate(timeout=120)
        return child.returncode, output

    def state(self) -> dict[str, object]:
        file = self.folder / ".ep" / "run" / self.folder.name / "state.json"
        state: dict[str, object] = json.loads(file.read_text())
        return state


@pytest.fixture
def write_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes the pair's file with replacements, beside a model of 16 experts."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))

    def write(*replacements: tuple[str, str]) -> Path:
        text = PAIR.format(name=tmp_path.name.lower(), port=free_ports(1))
        for old, new in replacements:
            assert old in text, old
            text = text.replace(old, new, 1)
        file = tmp_path / "deployment.yaml"
        file.write_text(text)
        return file

    return write


@pytest.fixture
def workplace(tmp_path: Path, write_file: Callable[..., Path]) -> Iterator[Workplace]:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    for name in ("vllm", "vllm-router"):
        (programs / name).symlink_to(FAKE)
    packages = [str(Path(ep_backend.__path__[0]).parent), *(path for path in sys.path if "site-packages" in path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
    place = Workplace(tmp_path, write_file(), env)
    yield place
    place.run("down", str(place.file))
