"""The images compile, and the tuned ones neither spill nor use a stack."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from ep_backend.errors import EpError
from ep_backend.fabric.nvshmem import launch

BUILD = Path(__file__).resolve().parents[2] / "kernels" / "build.py"


@pytest.fixture(scope="module")
def builder() -> dict[str, Any]:
    return runpy.run_path(str(BUILD))


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine compiles slowly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_images_compile_and_the_hot_ones_are_lean(
    builder: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = builder["build"](tmp_path)
    assert all(p.exists() and p.stat().st_size for p in paths)
    report = json.loads((tmp_path / "images.json").read_text())["kernels"]
    hot = [k for k in report if "sm_90a" in k["image"]]
    assert {k["kernel"] for k in hot} >= {
        "ep_dispatch",
        "ep_send",
        "ep_await",
        "ep_place",
        "ep_combine",
        "ep_expert_send",
        "ep_expert_sum",
        "ep_ring_dispatch",
        "ep_ring_combine",
    }
    for k in hot:
        assert k["spill_bytes"] == 0 and k["stack_bytes"] == 0, k
        most = 72 if k["kernel"] in ("ep_ring_dispatch", "ep_ring_combine") else 64
        assert 0 < k["registers"] <= most, "a block of 1024 threads has 64 registers a thread, one of 896 has 72"
    assert "registers" in capsys.readouterr().out
    for p in paths:
        if p.suffix == ".cubin":
            assert (b"nvshmem" in p.read_bytes()) == ("_put" in p.name), "peer stores need no NVSHMEM device code"
    assert any("_put" in p.name for p in paths) == (builder["find_nvshmem"]() is not None)


REPORT = """ptxas info    : Compiling entry function 'ep_x' for 'sm_90a'
ptxas info    : Function properties for ep_x
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 512 bytes smem
"""


def test_a_spill_is_read_from_the_report(builder: dict[str, Any]) -> None:
    (found,) = builder["report"](REPORT, "x.sm_90a.cubin")
    assert (found.kernel, found.registers, found.shared_bytes) == ("ep_x", 64, 512)
    assert (found.stack_bytes, found.spill_bytes) == (16, 20)


def test_nvshmem_is_named_by_its_folder(builder: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "include" / "non_abi").mkdir(parents=True)
    defines = {"MAJOR": 3, "MINOR": 4, "PATCH": 5}
    text = "".join(f"#define NVSHMEM_VENDOR_{k}_VERSION {v}\n" for k, v in defines.items())
    (tmp_path / "include" / "non_abi" / "nvshmem_version.h").write_text(text)
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    assert builder["find_nvshmem"]() != tmp_path, "a folder without the library is none"
    (tmp_path / "lib" / "libnvshmem_device.a").touch()
    assert builder["find_nvshmem"]() == tmp_path
    assert builder["nvshmem_version"](tmp_path) == "3.4.5"


def test_device_code_of_another_nvshmem_is_refused() -> None:
    launch.same_nvshmem("3.4.5", "3.4.0")
    for image in ("3.3.9", None):
        with pytest.raises(EpError, match=r"hold NVSHMEM .*loaded 3\.4\.5"):
            launch.same_nvshmem(image, "3.4.5")


def test_an_image_of_other_sources_is_refused() -> None:
    launch.same_arguments("ep_send", (0, 0, launch.ARGS_BYTES))
    with pytest.raises(EpError, match=rf"image of ep_send takes 968 bytes .*packs {launch.ARGS_BYTES}"):
        launch.same_arguments("ep_send", (0, 0, 968))
