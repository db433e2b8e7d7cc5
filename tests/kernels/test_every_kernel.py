"""What memcheck.sh runs under compute-sanitizer reaches every kernel."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels import every_kernel


def test_nothing_is_left_out() -> None:
    assert every_kernel.RELAYS < every_kernel.ALL


@pytest.mark.parametrize("size", [1, 2])
def test_every_kernel_runs(ranks: Any, kernels: str, size: int) -> None:
    for seen in ranks(size, kernels).run(every_kernel.every_kernel):
        assert seen == every_kernel.expected(size)
