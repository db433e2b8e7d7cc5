"""Fixtures that several test folders share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# For `tests.core...`, here and in workers.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

NVSHMEM = pytest.param("nvshmem", marks=pytest.mark.gpu)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """``ranks(size, fabric="host")``: a pool of worker processes, kept over the session."""
    from tests.core.pool import pools

    with pools() as made:
        yield made


@pytest.fixture(params=["host", "emulated", NVSHMEM])
def fabric(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["emulated", NVSHMEM])
def kernels(request: pytest.FixtureRequest) -> str:
    """The fabric that runs the CUDA kernels, or their emulation."""
    return str(request.param)


def pytest_configure() -> None:
    """A shell starts what it runs in the background with ctrl-C ignored, and what tests start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    from tests.core.pool import ROUNDS

    counts = ", ".join(f"{count} on {size} {fabric}" for (fabric, size), count in sorted(ROUNDS.items()) if count)
    if counts:
        terminalreporter.write_line(f"rounds checked against the oracle, by ranks and fabric: {counts}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [i for i in items if i.get_closest_marker("gpu") or i.get_closest_marker("multigpu")]
    if not marked:
        return
    import torch

    found = torch.cuda.device_count()
    for item in marked:
        need = 2 if item.get_closest_marker("multigpu") else 1
        if found < need:
            item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA devices, found {found}"))
