"""CUDA graphs hold the mode they were captured in: this drops a worker's graphs and captures them anew.

Written against the interfaces of vLLM 0.26 to 0.33, which :func:`obstacle` asks for by name; on GPUs only 0.26 has run it. The
engine must be drained and its caches cleared (`/pause?mode=wait&clear_cache=true`), so that no request has state here.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ep_backend.control.flip import Flip
from ep_backend.modes import parse_mode
from ep_backend.policy import AUTO, Wish

log = logging.getLogger("vllm.ep_backend")
EXTENSION = f"{__name__}.WorkerExtension"


class Graphs:
    """What one rank knows of its graphs. ``captured``: do they hold the mode? ``check`` raises ValueError for a wish that
    the rank cannot serve. ``extension``: the one that vLLM's worker has."""

    def __init__(self, captured: bool, flip: Flip, check: Callable[[Wish], None], extension: str = EXTENSION) -> None:
        self._captured = captured
        self._flip = flip
        self._check = check
        self._obstacle = obstacle(extension) if captured else None
        self._token = 0
        self._error: str | None = None
        self._seconds = 0.0

    def state(self) -> dict[str, Any]:
        """JSON-ready. ``token`` of the last capture that was asked for, and how it ended; ``obstacle``: why none can be."""
        return {
            **{"captured": self._captured, "obstacle": self._obstacle},
            **{"token": self._token, "error": self._error, "seconds": round(self._seconds, 3)},
        }

    def recapture(self, worker: Any, token: int, mode: str) -> None:
        """Drop, change, capture. Raises nothing: an exception would reach one engine only, the report all who ask."""
        started, error = time.monotonic(), None
        try:
            if self._obstacle is not None:
                raise RuntimeError(self._obstacle)
            wish: Wish = AUTO if mode == AUTO else parse_mode(mode)
            self._check(wish)  # before anything is dropped
            if self._captured:
                drop(worker)
            self._flip.switch(wish)
            if self._captured:
                capture(worker)
        except Exception as failure:
            log.exception("cannot capture CUDA graphs in mode %s", mode)
            error = f"{type(failure).__name__}: {failure}"
        self._seconds = time.monotonic() - started
        self._error, self._token = error, token


class WorkerExtension:
    """What vLLM mixes into its workers, for /collective_rpc; see ParallelConfig.worker_extension_cls."""

    def ep_recapture(self, token: str, mode: str) -> None:
        from vllm.distributed.parallel_state import get_ep_group

        get_ep_group().device_communicator.all2all_manager.graphs.recapture(self, int(token), mode)


def obstacle(extension: str) -> str | None:
    """What this vLLM lacks for a capture while it runs, or None."""
    if extension != EXTENSION:
        return f"--worker-extension-cls {extension} stands where this backend's extension is needed; restart the role"
    import vllm
    from vllm.compilation import cuda_graph, monitor
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.worker import gpu_model_runner, gpu_ubatch_wrapper, gpu_worker, workspace

    wanted = {
        "CUDAGraphWrapper.clear_all_graphs": getattr(cuda_graph.CUDAGraphWrapper, "clear_all_graphs", None),
        "UBatchWrapper.clear_graphs": getattr(gpu_ubatch_wrapper.UBatchWrapper, "clear_graphs", None),
        "GPUModelRunner.capture_model": getattr(gpu_model_runner.GPUModelRunner, "capture_model", None),
        "set_cudagraph_capturing_enabled": getattr(monitor, "set_cudagraph_capturing_enabled", None),
        "unlock_workspace": getattr(workspace, "unlock_workspace", None),
        "lock_workspace": getattr(workspace, "lock_workspace", None),
        "EngineCoreProc.pause_scheduler": getattr(EngineCoreProc, "pause_scheduler", None),
        "EngineCoreProc.resume_scheduler": getattr(EngineCoreProc, "resume_scheduler", None),
        "Worker.load_model": getattr(gpu_worker.Worker, "load_model", None),
    }
    missing = [name for name, found in wanted.items() if not callable(found)]
    return f"vLLM {vllm.__version__} has no {', '.join(missing)}; restart the role" if missing else None


def drop(worker: Any) -> None:
    """Forget every captured graph. The memory of their pool stays, for the next capture."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

    runner = worker.model_runner
    managers = _managers(runner)
    for manager in managers:
        if not hasattr(manager, "release_graphs"):
            raise RuntimeError("this vLLM's second model runner cannot release its graphs; restart the role")
    for manager in managers:
        manager.release_graphs()
    CUDAGraphWrapper.clear_all_graphs()
    BreakableCUDAGraphWrapper.clear_all_graphs()
    if isinstance(runner.model, UBatchWrapper):
        runner.model.clear_graphs()


def capture(worker: Any) -> None:
    """As at start. Collective: every rank of the EP group captures the same sizes in the same order."""
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.v1.worker.workspace import lock_workspace, unlock_workspace

    unlock_workspace()
    try:
        with _serving_state(worker.model_runner):
            worker.model_runner.capture_model()
    finally:
        set_cudagraph_capturing_enabled(False)
        lock_workspace()


def _managers(runner: Any) -> list[Any]:
    """Where the second model runner keeps graphs: its own manager, and those of a speculator. None in the first one."""
    own = getattr(runner, "cudagraph_manager", None)
    if own is None:
        return []
    speculator = getattr(runner, "speculator", None)
    more = [value for value in vars(speculator).values() if hasattr(value, "capture")] if speculator else []
    return [own, *more]


def _serving_state(runner: Any) -> AbstractContextManager[None]:
    """vLLM's own guard of block tables against the dummy batches of a capture, where it has one."""
    if hasattr(runner, "preserve_serving_state"):
        guard: AbstractContextManager[None] = runner.preserve_serving_state()
        return guard
    try:
        from vllm.v1.worker.gpu.eplb_utils import preserve_serving_state
    except ImportError:
        return nullcontext()
    if not _managers(runner):
        return nullcontext()
    guard = preserve_serving_state(runner)
    return guard
