"""The images compile, and the tuned ones neither spill nor use a stack."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

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
        assert 0 < k["registers"] <= 64, "a block of 1024 threads has 64 registers a thread"
    assert "registers" in capsys.readouterr().out
    for p in paths:
        assert b"nvshmem" not in p.read_bytes(), "peer stores need no NVSHMEM device code"


REPORT = """ptxas info    : Compiling entry function 'ep_x' for 'sm_90a'
ptxas info    : Function properties for ep_x
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 512 bytes smem
"""


def test_a_spill_is_read_from_the_report(builder: dict[str, Any]) -> None:
    (found,) = builder["report"](REPORT, "x.sm_90a.cubin")
    assert (found.kernel, found.registers, found.shared_bytes) == ("ep_x", 64, 512)
    assert (found.stack_bytes, found.spill_bytes) == (16, 20)
