"""What the fabric asks of a device. There is none here: what is asked answers as one would that works, has failed, or hangs."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_backend.fabric.nvshmem.device import Gpu
from ep_backend.fabric.nvshmem.fabric import NvshmemFabric
from ep_backend.fabric.nvshmem.launch import Launch


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


class Stream:
    """A lane's own."""

    def fork(self) -> None: ...

    def join(self) -> None: ...

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_refusals_of_two_threads_go_to_the_streams_of_their_lanes() -> None:
    """A launch holds its stream, and another thread may come between its being set and the driver's reading it."""
    fabric, both = object.__new__(NvshmemFabric), threading.Barrier(2)
    here, found = threading.local(), {}

    def launch(how: Launch, args: int, stream: int) -> None:
        how.config.stream = stream
        both.wait(30.0)
        found[args] = how.config.stream

    fabric.rank, fabric._refused, fabric._refusals = 0, [0, 0], {0: 0, 1: 1}
    fabric._own = [Stream(), Stream()]
    fabric._meeting = SimpleNamespace(post=lambda *_, **__: None)
    fabric._gpu = SimpleNamespace(capturing=lambda: False, stream=lambda: here.stream)
    fabric._kernels = {"refuse": SimpleNamespace(launch=launch)}

    def refuse(lane: int) -> None:
        here.stream = 5 + lane
        fabric.refuse([(lane, 1)], "of that lane")

    threads = [threading.Thread(target=refuse, args=(lane,)) for lane in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert found == {0: 5, 1: 6} and fabric._refused == [1, 1]


def test_a_plan_that_is_repeated_is_kept_for_the_stream_that_does() -> None:
    """The dispatch that it is of may have allocated it on its lane's own stream."""
    fabric, used = object.__new__(NvshmemFabric), []
    fabric.shape, fabric.device = SimpleNamespace(local_experts=2), torch.device("cpu")
    fabric._gpu = SimpleNamespace(uses=used.append)
    fabric._pack = fabric._launch = lambda *_, **__: None
    kept = torch.zeros(4, dtype=torch.int32)
    routing = SimpleNamespace(counted=SimpleNamespace(plan=kept, counts=kept, rows=3))
    counted = fabric._count(SimpleNamespace(repeats=True, aside=False, routing=routing), SimpleNamespace(exact=True))
    assert counted.plan is kept and counted.rows == 3
    assert [id(t) for t in used] == [id(kept)]


def test_what_a_combine_aside_reads_is_kept_for_its_stream() -> None:
    """Of a dispatch on the caller's stream, where all of it was allocated."""
    fabric, used = object.__new__(NvshmemFabric), []
    fabric._seen = [0]
    fabric._gpu = SimpleNamespace(uses=used.append)
    kept = {name: torch.zeros(4) for name in ("ids", "weights", "beside", "plan", "counts")}
    counted = SimpleNamespace(plan=kept["plan"], counts=kept["counts"])
    state = SimpleNamespace(counted=counted, beside=kept["beside"])
    fabric.start_combine(
        SimpleNamespace(state=state, ids=kept["ids"], weights=kept["weights"], aside=True, split=False), torch.zeros(4)
    )
    assert {id(t) for t in used} == {id(t) for t in kept.values()}
