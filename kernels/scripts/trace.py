"""Where a kernel's time goes: `torchrun --nproc-per-node=2 kernels/scripts/trace.py [CASE…]`.

Needs images of `kernels/build.py ep_backend/images -DEP_TRACE`. For cases of the bench (default decode-1, decode-128 and
normal-4096): microseconds from when the first warp of a launch begins until warps pass each point, earliest, median and last
warp, each the median of so many rounds on rank 0.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ep_backend.bench.suites import ALL, Case
from ep_backend.bench.worker import Buffers, Rank, Workload, lead
from ep_backend.fabric.nvshmem.images import IMAGE_KERNELS
from ep_backend.fabric.nvshmem.world import check, driver

ROUNDS, WARM_UP = 20, 3
SHAPE = (132, 32, 16)  # kTraceBlocks, kTraceWarps, kTracePoints of trace.cuh
END = {15: "block has ended"}
RECORDS = {
    **{0: "begins", 1: "block begins", 2: "count told", 3: "all signalled", 4: "row in shared memory", 5: "row stored"},
    **{6: "plan made", 7: "may receive", 8: "record signalled", 9: "record loaded", 10: "record placed"},
    **{11: "rows taken", 12: "rows under way", 13: "scales stored", **END},
}
SUMS = {0: "begins", 1: "block begins", 2: "sums sent", 3: "sums added", 4: "all have said returned", **END}
RINGS = {0: "begins", 1: "block begins", 2: "warp has ended", 10: "count begins", 11: "counts told", 12: "counts here"}
POINTS = {"dispatch": RECORDS, "combine": SUMS, "hybrid": RECORDS, "rings": RINGS, "per_expert": RECORDS}


class Log:
    """Each image's ep_trace."""

    def __init__(self) -> None:
        self._libraries: list[Any] = []
        api = driver()
        load = api.cuLibraryLoadData

        def noted(*arguments: Any) -> Any:
            found = load(*arguments)
            self._libraries.append(found[1])
            return found

        api.cuLibraryLoadData = noted

    def begin(self) -> None:
        """On the current stream: what ran before is forgotten."""
        for at, size in self._arrays().values():
            check(driver().cuMemsetD8Async(at, 0, size, torch.cuda.current_stream().cuda_stream))

    def take(self) -> dict[str, np.ndarray[Any, Any]]:
        """Nanoseconds by image."""
        found = {}
        for image, (at, _) in self._arrays().items():
            times = np.zeros(SHAPE, np.uint64)
            check(driver().cuMemcpyDtoH(times.ctypes.data, at, times.nbytes))
            if times.any():
                found[image] = times
        return found

    def _arrays(self) -> dict[str, tuple[Any, int]]:
        found = {}
        for image, library in zip(IMAGE_KERNELS, self._libraries, strict=False):
            status, at, size = driver().cuLibraryGetGlobal(library, b"ep_trace")
            if int(status) != 0:
                raise SystemExit(f"the image {image} keeps no times: build.py ep_backend/images -DEP_TRACE")
            found[image] = (at, size)
        return found


def points(times: np.ndarray[Any, Any]) -> dict[int, tuple[float, float, float, int]]:
    """Earliest, median and last warp, microseconds, and how many warps."""
    begun = int(times[times > 0].min())
    found = {}
    for point in range(SHAPE[2]):
        passed = times[..., point][times[..., point] > 0]
        if passed.size:
            us = (passed.astype(np.int64) - begun) / 1e3
            found[point] = (float(us.min()), float(np.median(us)), float(us.max()), int(passed.size))
    return found


def trace(me: Rank, log: Log, case: Case, buffers: Buffers) -> None:
    work = Workload(me, case, buffers.of(case))
    work.dispatch()
    work.experts()
    work.combine()
    steps = work.captured() if case.graph else (work.dispatch, work.combine)
    seen: dict[tuple[str, str], list[dict[int, tuple[float, float, float, int]]]] = {}
    dispatch, combine = steps
    for _ in range(ROUNDS):
        for name, step in (("dispatch", dispatch), ("combine", combine)):
            me.align()
            if case.graph:
                lead()
            for _ in range(WARM_UP):  # whole rounds bring the ranks' devices together, as in the bench
                if name == "combine":
                    combine()
                dispatch()
                if name == "dispatch":
                    combine()
            log.begin()
            step()
            torch.cuda.synchronize()
            for image, times in log.take().items():
                seen.setdefault((name, image), []).append(points(times))
    for (name, image), rounds in seen.items() if me.rank == 0 else ():
        print(f"{case.name} {name}")
        for point, says in POINTS[image].items():
            all_rounds = [r[point] for r in rounds if point in r]
            if all_rounds:
                early, middle, late = (statistics.median(r[i] for r in all_rounds) for i in range(3))
                print(f"  {says:24} {early:7.2f} {middle:7.2f} {late:7.2f}   {all_rounds[0][3]} warps")


def main() -> None:
    wanted = sys.argv[1:] or ["decode-1", "decode-128", "normal-4096"]
    cases = [c for c in ALL if c.name in wanted]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    me = Rank(dist.get_rank(), dist.get_world_size(), device, "nvshmem")
    log, buffers = Log(), Buffers(me, cases)
    for case in cases:
        trace(me, log, case, buffers)
    buffers.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
