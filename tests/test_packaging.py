"""What is installed, when CUDA images are compiled, and which Pythons the bootstrap takes."""

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import setuptools

from server_plugins.sglang import compat as sglang
from server_plugins.vllm import compat as vllm

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy, so that building leaves nothing in the repository."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, copy)
    for name in ("ep_backend", "server_plugins", "kernels", "deploy", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "images"))
    return copy


def build(checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    return subprocess.run(command, cwd=checkout, env={**os.environ, **env}, capture_output=True, text=True, timeout=250)


@pytest.mark.slow
def test_the_wheel_has_two_packages_and_the_entry_points(checkout: Path) -> None:
    result = build(checkout, EP_CUDA="0")
    assert result.returncode == 0, result.stderr
    (wheel,) = (checkout / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"ep_backend", "server_plugins"}
    assert "ep_backend = server_plugins.vllm:register" in entry_points
    assert "ep_backend = server_plugins.sglang:register" in entry_points
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not [line for line in required if any(name in line for name in ("torch", "vllm", "sglang"))]


@pytest.fixture
def compile_images(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return runpy.run_path(str(ROOT / "setup.py"))["compile_images"]


def use_builder(compile_images: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, nvcc: bool) -> None:
    builder = tmp_path / "build.py"
    builder.write_text(f"def find_nvshmem(): pass\ndef build(out_dir):\n    {body}\n")
    monkeypatch.setitem(compile_images.__globals__, "BUILDER", builder)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/nvcc" if nvcc else None)


def test_images_are_compiled_where_nvcc_is(
    compile_images: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EP_CUDA", raising=False)
    use_builder(compile_images, monkeypatch, tmp_path, "return [out_dir / 'images.json']", nvcc=True)
    assert compile_images(tmp_path / "images") == [tmp_path / "images" / "images.json"]
    use_builder(compile_images, monkeypatch, tmp_path, "raise RuntimeError('no such arch')", nvcc=True)
    assert compile_images(tmp_path / "images") == []
    assert "compiling failed: no such arch (EP_CUDA=1 makes this fatal)" in capsys.readouterr().err


def test_ep_cuda_forces_and_forbids(compile_images: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_builder(compile_images, monkeypatch, tmp_path, "raise RuntimeError('called')", nvcc=True)
    monkeypatch.setenv("EP_CUDA", "0")
    assert compile_images(tmp_path) == []
    monkeypatch.setenv("EP_CUDA", "1")
    with pytest.raises(RuntimeError, match="called"):
        compile_images(tmp_path)
    use_builder(compile_images, monkeypatch, tmp_path, "pass", nvcc=False)
    with pytest.raises(SystemExit, match="EP_CUDA=1 but nvcc is not on PATH"):
        compile_images(tmp_path)
    monkeypatch.setitem(compile_images.__globals__, "BUILDER", tmp_path / "gone.py")
    with pytest.raises(SystemExit, match=r"EP_CUDA=1 but .*gone\.py is not there"):
        compile_images(tmp_path)
    monkeypatch.setenv("EP_CUDA", "yes")
    with pytest.raises(SystemExit, match="EP_CUDA='yes': must be 0"):
        compile_images(tmp_path)


NVCC = """#!/bin/sh
# Writes what a compiler would, in name only; BREAK names an image on which it fails.
case "$*" in *"-o "*"$BREAK"*) echo no such arch >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
echo image > "$2"
"""


@pytest.fixture
def nvcc(checkout: Path) -> dict[str, str]:
    """Environment of a build that finds a compiler, and of which NVSHMEM is known."""
    (checkout / "bin").mkdir()
    (checkout / "bin" / "nvcc").write_text(NVCC)
    (checkout / "bin" / "nvcc").chmod(0o755)
    home = checkout / "nvshmem"
    for name in ("lib/libnvshmem_device.a", "include/non_abi/nvshmem_version.h"):
        (home / name).parent.mkdir(parents=True)
        (home / name).touch()
    return {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "NVSHMEM_HOME": str(home), "BREAK": "nothing"}


def packed(checkout: Path, **env: str) -> set[str]:
    result = build(checkout, **env)
    assert result.returncode == 0, result.stderr
    (wheel,) = (checkout / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name.rpartition("/")[2] for name in archive.namelist() if name.startswith("ep_backend/images/")}


@pytest.mark.slow
def test_a_wheel_has_all_images_of_its_own_build_or_none(checkout: Path, nvcc: dict[str, str]) -> None:
    images = checkout / "ep_backend" / "images"
    images.mkdir()
    (images / "old.sm_70.cubin").touch()
    nvcc["EP_CUDA"] = "auto"
    kinds = ("dispatch", "combine", "per_expert", "hybrid", "rings", "refuse", "hybrid_put", "refuse_put")
    every = {"images.json", *(f"{kind}.sm_{n}a.cubin" for kind in kinds for n in (90, 100))}
    assert packed(checkout, **nvcc) == every
    assert packed(checkout, **nvcc | {"EP_CUDA": "0"}) == set()
    assert every < {p.name for p in images.iterdir()}, "the tree keeps its own"
    assert packed(checkout, **nvcc | {"BREAK": "rings.sm_100a.cubin"}) == set()
    assert {p.name for p in images.iterdir()} == {"old.sm_70.cubin"}
    wrong = build(checkout, **nvcc | {"NVSHMEM_HOME": str(checkout / "bin")})
    assert wrong.returncode != 0 and "bin has no lib/libnvshmem_device.a" in wrong.stdout + wrong.stderr


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 15, 0)])
def test_the_bootstrap_refuses_other_pythons(version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap = runpy.run_path(str(ROOT / "ep"))
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit, match=r"must be 3\.11 to 3\.14"):
        bootstrap["main"]()


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs `ep` with these words, without installing or starting anything; returns the environments that it made."""
    script = runpy.run_path(str(ROOT / "ep"))
    made: list[str] = []
    monkeypatch.setattr(script["Environment"], "ensure", lambda self: made.append(self.folder.name))
    monkeypatch.setattr(script["Environment"], "complete", lambda self: self.folder.name in made)
    monkeypatch.setitem(script["main"].__globals__, "refuse_faulty", lambda program, file: None)
    monkeypatch.setattr(os, "execv", lambda program, words: None)
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name != "EP_SGLANG_PYTHON"})

    def run(*words: str) -> list[str]:
        made.clear()
        monkeypatch.setattr(sys, "argv", ["ep", *words])
        script["main"]()
        return list(made)

    return run


@pytest.mark.parametrize("line", ["engine: sglang", "  - {engine : 'sglang', nodes: 1}", '"engine": "sglang"'])
def test_sglang_has_an_environment_made_when_a_file_asks(
    line: str, bootstrap: Callable[..., list[str]], tmp_path: Path
) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(f"name: some\n{line}\n")
    assert bootstrap("status", str(file)) == [".venv"]
    assert bootstrap("up", str(file), "--detach") == [".venv", ".venv-sglang"]
    assert os.environ["EP_SGLANG_PYTHON"] == str(ROOT / ".venv-sglang" / "bin" / "python")
    os.environ["EP_SGLANG_PYTHON"] = "/opt/sglang/bin/python"
    assert bootstrap("up", str(file)) == [".venv"]
    del os.environ["EP_SGLANG_PYTHON"]
    file.write_text("name: some\nengine: vllm # not sglang\n")
    assert bootstrap("up", str(file)) == [".venv"]


def test_a_python_without_a_build_of_sglang_is_told(
    bootstrap: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    with pytest.raises(SystemExit, match=r"SGLang 0\.5\.23 has no build for Python .*, only for 3\.11 to 3\.13"):
        bootstrap("test", "sglang")
    with pytest.raises(SystemExit, match="EP_SGLANG_PYTHON may name the Python of another environment"):
        bootstrap("up", str(ROOT / "deploy" / "local-cpu-sglang.yaml"))


def test_the_readme_names_the_engine_versions_that_are_taken() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    for engine, compat in (("vLLM", vllm), ("SGLang", sglang)):
        *parts, beyond = compat.BEYOND.split(".")
        assert f"{engine} {compat.FIRST} to {'.'.join([*parts, str(int(beyond) - 1)])}" in text
