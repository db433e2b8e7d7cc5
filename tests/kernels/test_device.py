"""The end of a buffer on a device that does not end, or has failed. There is none here: what is asked of it answers so."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_backend.fabric.nvshmem.device import Gpu
from ep_backend.fabric.nvshmem.fabric import NvshmemFabric


def device(monkeypatch: pytest.MonkeyPatch, synchronize: Any) -> Gpu:
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    gpu = object.__new__(Gpu)
    gpu.device = torch.device("cuda", 0)
    return gpu


def failed(_: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_no_wait_for_a_device_is_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    collective_is_over = threading.Event()
    assert not device(monkeypatch, lambda _: collective_is_over.wait(30.0)).ends(0.05)
    collective_is_over.set()
    assert device(monkeypatch, lambda _: None).ends(30.0)
    assert not device(monkeypatch, failed).ends(30.0)


@pytest.mark.parametrize("ends", [True, False])
def test_destroy_frees_only_what_the_device_has_done_with(ends: bool, caplog: pytest.LogCaptureFixture) -> None:
    fabric, closed, asked = object.__new__(NvshmemFabric), [], []
    fabric.rank, fabric.device, fabric.allocated_bytes, fabric._reason = 0, torch.device("cuda", 0), 4096, None
    fabric.config = SimpleNamespace(timeout_s=2.0)
    fabric._gpu = SimpleNamespace(ends=lambda seconds: asked.append(seconds) or ends)
    fabric._heap = SimpleNamespace(base=1, close=closed.append)
    fabric.destroy()
    assert asked == [7.0] and closed == [2.0] * ends
    assert ("4096 bytes stay until the process ends" in caplog.text) != ends
