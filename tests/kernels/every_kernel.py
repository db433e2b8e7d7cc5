"""Every kernel, on a few tokens, for tools under which kernels run a hundred times slower.

`python -m tests.kernels.every_kernel` is one rank, told who it is by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without a
GPU it runs the emulated kernels.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from ep_backend.fabric.nvshmem import launches
from ep_backend.fabric.nvshmem.images import IMAGE_KERNELS
from tests.core import oracle
from tests.core.pool import World, gpus_for
from tests.core.rounds import Round

ALL = frozenset(name for names in IMAGE_KERNELS.values() for name in names)
RELAYS = frozenset({"forward"})  # runs where there are several nodes
TOKENS = 8
# Arguments, the most tokens that count as a small batch, and what is called.
BUFFERS: tuple[tuple[dict[str, Any], int, tuple[tuple[str, str], ...]], ...] = (
    (
        {"deterministic": True},
        launches.SMALL,
        (
            *(("direct", "compact"), ("low_latency", "masked"), ("hybrid", "compact"), ("hybrid", "masked")),
            *(("normal", "compact"), ("normal", "masked")),
        ),
    ),
    (
        {"low_latency_form": "per_expert"},
        -1,
        (("low_latency", "masked"), ("direct", "compact"), ("direct", "masked"), ("normal", "masked")),
    ),
    ({"rail": "put"}, launches.SMALL, (("hybrid", "masked"),)),
)


class Noted:
    """A kernel that says that it was launched."""

    def __init__(self, kernel: Any, name: str, seen: set[str]) -> None:
        self._kernel, self._name, self._seen = kernel, name, seen

    def launch(self, *args: Any) -> None:
        self._seen.add(self._name)
        self._kernel.launch(*args)


def every_kernel(world: World, say: Callable[[str], None] = lambda _: None) -> set[str]:
    """Names of the kernels that ran. Nodes have one rank each; all rounds are checked, with refused calls in between."""
    seen: set[str] = set()
    usual = launches.SMALL
    for arguments, small, forms in BUFFERS:
        tokens = dict.fromkeys((mode for mode, _ in forms), TOKENS)
        shared: dict[str, Any] = {"lanes": 1, "gpus_per_node": 1, "timeout_s": 120.0, "max_tokens": tokens}
        with world.make(**shared, **arguments) as buffer:
            say(f"buffer {arguments}")
            kernels = buffer._fabric._kernels
            buffer._fabric._kernels = {name: Noted(kernel, name, seen) for name, kernel in kernels.items()}
            launches.SMALL = small
            for n, (mode, layout) in enumerate(forms):
                for payload, hook in (("bf16", False), ("fp8_cast", mode != "normal")):
                    case = oracle.make_case(n, [TOKENS - 3 * r for r in range(world.size)], kind="holes")
                    Round(world, buffer, case, mode, layout=layout, payload=payload, hook=hook).run()
                over = Round(world, buffer, oracle.make_case(n, [TOKENS + 1] * world.size), mode, layout=layout)
                with contextlib.suppress(ValueError):
                    over.dispatch()
                    raise AssertionError("more tokens than there is room for")
                say(f"{mode} {layout}")
            launches.SMALL = usual
    return seen


def expected(ranks: int) -> frozenset[str]:
    return ALL if ranks > 1 else ALL - RELAYS


def main() -> None:
    import torch
    import torch.distributed as dist

    start = time.monotonic()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % gpus_for(size, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    else:
        from tests.kernels import emulator

        emulator.install()
    dist.init_process_group("gloo")

    def say(text: str) -> None:
        print(f"rank {rank} of {size}, {time.monotonic() - start:.1f} s: {text}", flush=True)

    seen = every_kernel(World(rank, size, "nvshmem", dist.group.WORLD, device), say)
    assert seen == expected(size), f"not launched: {sorted(expected(size) - seen)}"
    say(f"{len(seen)} kernels ran, all rounds are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
