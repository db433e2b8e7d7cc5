"""Lets all ranks of an engine run on the first GPU: with this folder on PYTHONPATH, Python imports this file at its start.

They take turns on it, so this is for what is right or wrong, not for how fast it is. Each rank's process gives itself out for
a host of its own, since NCCL takes one rank a GPU of a host, and engines get the first GPU where they ask for that of a rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def own_host() -> None:
    os.environ["NCCL_HOSTID"] = f"one-gpu-{os.getpid()}"


def vllm_worker(module: ModuleType) -> None:
    """A data-parallel rank's worker takes the GPU of its local rank."""
    worker: Any = module.Worker  # type: ignore[attr-defined]  # vllm.v1.worker.gpu_worker
    init_device = worker.init_device

    def with_first_gpu(self: Any) -> None:
        self.parallel_config.data_parallel_rank_local = 0
        self.parallel_config.assigned_physical_gpu_ids = None
        init_device(self)

    worker.init_device = with_first_gpu


def sglang_utils(module: ModuleType) -> None:
    """What the launcher asks for the device of a scheduler with this number."""

    @contextmanager
    def first_gpu(_: int) -> Iterator[int]:
        yield 0

    module.maybe_reindex_device_id = first_gpu  # type: ignore[attr-defined]


CHANGED: dict[str, Callable[[ModuleType], None]] = {
    "vllm.v1.worker.gpu_worker": vllm_worker,
    "sglang.srt.utils.common": sglang_utils,
}


class Changing(Loader):
    def __init__(self, loader: Loader, change: Callable[[ModuleType], None]) -> None:
        self.loader, self.change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.change(module)


class Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = CHANGED.get(name)
        if change is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Changing(spec.loader, change)
        return spec


own_host()
os.register_at_fork(after_in_child=own_host)
sys.meta_path.insert(0, Finder())
