"""What a node finds out for its launch: GPUs under CUDA_VISIBLE_DEVICES in any form, their NICs, addresses."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ep_backend.deployment.node import Gpus, NodeUnfit, address_towards, hca_mapping, parsed, resolved, visible

LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-8932f937-d72c-4106-c12f-20bd9faed9f6)
  MIG 1g.10gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1g.10gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-8932aaaa-1111-4106-c12f-20bd9faed9f6)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-12345678-d72c-4106-c12f-20bd9faed9f6)
GPU 3: NVIDIA H100 80GB HBM3 (UUID: GPU-abcdef01-d72c-4106-c12f-20bd9faed9f6)
"""
NICS = ("mlx5_0:1", "mlx5_0:1", "mlx5_2", "mlx5_3:2")


@pytest.fixture
def gpus() -> Gpus:
    return parsed(LISTING)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        (" 3 , 1 ", [3, 1]),
        ("0,-1,2", [0]),
        ("0,4,2", [0]),
        ("1,1", []),
        ("NoDevFiles", []),
        ("GPU-12345678-d72c-4106-c12f-20bd9faed9f6,GPU-abc", [2, 3]),
        ("GPU-8932", []),  # two begin so
        ("GPU-8932f,2", [0, 2]),
        ("MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb", [0]),
        ("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0", [0]),
        ("GPU-nothing", []),
    ],
)
def test_every_form_of_cuda_visible_devices(variable: str | None, expected: list[int], gpus: Gpus) -> None:
    assert visible(variable, gpus) == expected


@pytest.mark.parametrize(
    ("chosen", "ranks", "mapping"),
    [
        ([0, 1, 2, 3], 4, "mlx5_0:1:2,mlx5_2:1:1,mlx5_3:2:1"),
        ([3, 0, 2, 1], 4, "mlx5_3:2:1,mlx5_0:1:1,mlx5_2:1:1,mlx5_0:1:1"),
        ([2, 3, 0], 2, "mlx5_2:1:1,mlx5_3:2:1"),
    ],
)
def test_nics_follow_the_gpus_of_the_ranks(chosen: list[int], ranks: int, mapping: str, gpus: Gpus) -> None:
    assert hca_mapping(NICS, gpus, chosen, ranks) == mapping


def test_what_does_not_fit_is_named(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(NodeUnfit, match="CUDA_VISIBLE_DEVICES=2 shows 1 GPUs for 2 ranks"):
        hca_mapping(NICS, gpus, [2], 2)
    with pytest.raises(NodeUnfit, match="names the HCAs of 4 GPUs, but nvidia-smi shows 2"):
        hca_mapping(NICS, gpus[:2], [0, 1], 2)


def test_a_leader_whose_name_never_resolves_is_waited_for_within_bounds() -> None:
    started = time.monotonic()
    with pytest.raises(NodeUnfit, match=r"waited 1 s for the leader's name no-such-leader\.invalid to resolve"):
        resolved("no-such-leader.invalid", timeout_s=1)
    assert time.monotonic() - started < 30


def test_addresses() -> None:
    assert resolved("localhost") == "127.0.0.1"
    assert resolved("::1") == "::1"
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_the_shell_is_told_and_an_ipv6_leader_has_brackets(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ep_backend.deployment.node", "--ranks", "1", "--leader"]
    told = subprocess.run([*command, "::1"], env={"ADDRESS": "fd00::2"}, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.splitlines() == ["export LEADER=::1", "export LEADER_HOST='[::1]'", "export ADDRESS=fd00::2"]
    missing = subprocess.run(
        [*command, "127.0.0.1", "--devices", "mlx5_0"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert missing.returncode == 1
    assert "`nvidia-smi -L` does not answer" in missing.stderr and "Traceback" not in missing.stderr
