"""Capturing CUDA graphs anew in a worker: the order of its steps, its failures, and the names it needs of vLLM.

Nothing here runs on a GPU; the runner and its graphs are stand-ins, their classes are vLLM's own."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="these tests need vLLM: run ./ep test")

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker import workspace
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper
from vllm.v1.worker.gpu_worker import Worker

from ep_backend.control.flip import Flip
from ep_backend.modes import Mode
from ep_backend.policy import Role, Wish, check_wish
from server_plugins.vllm import graphs


class Buffer:
    def propose(self, token: int) -> None: ...
    def agreed(self) -> int:
        return 0

    def stats(self) -> dict[str, Any]:
        return {"epoch": 41}


class Runner:
    """Notes what happens to it; ``fails`` as often as it says."""

    model: Any = None

    def __init__(self, flip: Flip, fails: int = 0) -> None:
        self.steps: list[str] = []
        self._flip = flip
        self._fails = fails

    @contextmanager
    def preserve_serving_state(self) -> Any:
        self.steps.append("guarded")
        yield
        self.steps.append("restored")

    def capture_model(self) -> None:
        self.steps.append(f"capture {getattr(self._flip.mode, 'value', self._flip.mode)}")
        if self._fails:
            self._fails -= 1
            raise RuntimeError("CUDA error: out of memory")


def check(wish: Wish) -> None:
    check_wish(Role.DECODE, wish)


@pytest.fixture
def flip() -> Flip:
    return Flip(Mode.LOW_LATENCY, buffers=lambda: [Buffer()], check=check)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was dropped and unlocked, in order."""
    seen: list[str] = []
    monkeypatch.setattr(CUDAGraphWrapper, "clear_all_graphs", classmethod(lambda cls: seen.append("wrappers")))
    monkeypatch.setattr(workspace, "unlock_workspace", lambda: seen.append("unlocked"))
    monkeypatch.setattr(workspace, "lock_workspace", lambda: seen.append("locked"))
    return seen


def test_this_vllm_has_all_that_a_capture_needs() -> None:
    assert graphs.obstacle(graphs.EXTENSION) is None
    assert callable(GPUModelRunner.capture_model) and callable(CudaGraphManager.release_graphs)
    assert callable(GPUModelRunner.preserve_serving_state)
    for worker in (Worker, CPUWorker):  # vLLM refuses an extension that hides a worker's own attribute
        assert not [name for name in dir(graphs.WorkerExtension) if not name.startswith("__") and hasattr(worker, name)]
    assert resolve_obj_by_qualname(graphs.EXTENSION) is graphs.WorkerExtension


@pytest.mark.parametrize(
    "owner, name, told",
    [
        (CUDAGraphWrapper, "clear_all_graphs", "CUDAGraphWrapper.clear_all_graphs"),
        (UBatchWrapper, "clear_graphs", "UBatchWrapper.clear_graphs"),
        (workspace, "unlock_workspace", "unlock_workspace"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, flip: Flip, owner: Any, name: str, told: str) -> None:
    monkeypatch.delattr(owner, name)
    state = graphs.Graphs(True, flip, check)
    assert f"has no {told}; restart the role" in state.state()["obstacle"]
    runner = Runner(flip)
    state.recapture(SimpleNamespace(model_runner=runner), 3, "hybrid")
    assert told in state.state()["error"] and runner.steps == [] and flip.mode is Mode.LOW_LATENCY


def test_another_extension_in_its_place_is_an_obstacle(flip: Flip) -> None:
    told = graphs.Graphs(True, flip, check, "mine.Extension").state()["obstacle"]
    assert told == "--worker-extension-cls mine.Extension stands where this backend's extension is needed; restart the role"
    assert graphs.Graphs(False, flip, check, "mine.Extension").state()["obstacle"] is None


def test_drop_change_capture(flip: Flip, dropped: list[str]) -> None:
    state, runner = graphs.Graphs(True, flip, check), Runner(flip)
    state.recapture(SimpleNamespace(model_runner=runner), 3, "hybrid")
    assert dropped == ["wrappers", "unlocked", "locked"]
    assert runner.steps == ["guarded", "capture hybrid", "restored"]
    now = state.state()
    assert (now["captured"], now["token"], now["error"]) == (True, 3, None)
    assert (flip.state()["mode"], flip.state()["flips"], flip.state()["agreed_epoch"]) == ("hybrid", 1, 41)


def test_a_failed_capture_is_reported_and_the_way_back_works(flip: Flip, dropped: list[str]) -> None:
    state, runner = graphs.Graphs(True, flip, check), Runner(flip, fails=1)
    worker = SimpleNamespace(model_runner=runner)
    state.recapture(worker, 3, "hybrid")
    assert state.state()["error"] == "RuntimeError: CUDA error: out of memory" and dropped[-1] == "locked"
    state.recapture(worker, 4, "low_latency")
    assert state.state()["error"] is None and state.state()["token"] == 4
    assert runner.steps[-2] == "capture low_latency" and flip.mode is Mode.LOW_LATENCY


def test_a_mode_that_cannot_be_served_drops_nothing(flip: Flip, dropped: list[str]) -> None:
    state, runner = graphs.Graphs(True, flip, check), Runner(flip)
    state.recapture(SimpleNamespace(model_runner=runner), 3, "normal")
    assert "mode normal does not serve role decode" in state.state()["error"]
    assert dropped == [] and runner.steps == [] and flip.mode is Mode.LOW_LATENCY


def test_micro_batches_and_the_second_runner_are_dropped_too(flip: Flip, dropped: list[str]) -> None:
    class Manager:
        def release_graphs(self) -> None:
            dropped.append("manager")

        def capture(self) -> None: ...

    runner = Runner(flip)
    runner.model = UBatchWrapper.__new__(UBatchWrapper)
    vars(runner.model).update(cudagraphs={1: object()}, cudagraph_wrapper=None)
    graphs.drop(SimpleNamespace(model_runner=runner))
    assert runner.model.cudagraphs == {} and dropped == ["wrappers"]
    second = SimpleNamespace(model=None, cudagraph_manager=Manager(), speculator=SimpleNamespace(draft=Manager(), depth=2))
    graphs.drop(SimpleNamespace(model_runner=second))
    assert dropped == ["wrappers", "manager", "manager", "wrappers"]
    second.cudagraph_manager = object()
    with pytest.raises(RuntimeError, match="cannot release its graphs"):
        graphs.drop(SimpleNamespace(model_runner=second))


def test_without_graphs_only_the_mode_changes(flip: Flip, dropped: list[str]) -> None:
    state, runner = graphs.Graphs(False, flip, check), Runner(flip)
    state.recapture(SimpleNamespace(model_runner=runner), 3, "hybrid")
    assert dropped == [] and runner.steps == [] and flip.mode is Mode.HYBRID and state.state()["error"] is None


def test_the_wrappers_forget_their_graphs() -> None:
    """vLLM's own dictionary, by the name that clear_graphs empties."""
    wrapper = CUDAGraphWrapper.__new__(CUDAGraphWrapper)
    vars(wrapper).update(concrete_cudagraph_entries={"batch": object()})
    CUDAGraphWrapper._all_instances.add(wrapper)
    CUDAGraphWrapper.clear_all_graphs()
    assert wrapper.concrete_cudagraph_entries == {}
