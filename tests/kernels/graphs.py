"""Capture and replay: CUDA graphs, or in emulation launches that are kept with their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.core.pool import World
from tests.kernels import emulator


class CudaGraph:
    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._capture: Any = torch.cuda.graph(self._graph)

    def __enter__(self) -> CudaGraph:
        self._capture.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._capture.__exit__(*error)

    def call(self, fn: Callable[[], object]) -> None:
        """Something of torch's, between the launches."""
        fn()

    def replay(self) -> None:
        self._graph.replay()


def graph(world: World) -> Any:
    """To be entered once: what is called inside is captured, not run."""
    return CudaGraph() if world.device.type == "cuda" else emulator.Graph()
