"""One rank of the bench, started by torchrun: `python -m torch.distributed.run … -m ep_backend.bench.worker '{json}'`."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ep_backend.bench.cases import Inputs, draw, expected
from ep_backend.bench.suites import SUITES, Case
from ep_backend.buffer import EpBuffer

LEAD_NS = 3_000_000  # the device sleeps while the host queues a batch of rounds
BATCH = 20


@dataclass(slots=True)
class Rank:
    """This process."""

    rank: int
    size: int
    device: torch.device
    fabric: str

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def align(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()


class Workload:
    """Dispatch, experts that multiply by 1 + id / E, and combine of one case."""

    def __init__(self, me: Rank, case: Case, buffer: EpBuffer) -> None:
        self.me, self.case, self.buffer = me, case, buffer
        self.inputs: Inputs = draw(case, me.size)
        everyones = self.inputs.x, self.inputs.ids, self.inputs.weights
        self.x, self.ids, self.weights = (t[me.rank].to(me.device) for t in everyones)
        self.out = torch.empty_like(self.x)
        self.got: Any = None
        self.y: Any = None

    def dispatch(self) -> None:
        c = self.case
        self.got = self.buffer.dispatch(
            self.x,
            self.ids,
            self.weights,
            mode=c.mode,
            layout=c.layout,
            fp8="fp32" if c.fp8 else None,
            host_counts=c.host_counts,
            sms=c.sms,
        )

    def combine(self) -> None:
        self.buffer.combine(self.y, self.got.handle, out=self.out)

    def experts(self) -> None:
        """What a rank's experts would return, in the form that combine takes."""
        got, c = self.got, self.case
        rows = got.rows.float()
        if got.scales is not None:
            rows = (rows.unflatten(-1, (-1, 128)) * got.scales[..., None]).flatten(-2)
        first = self.me.rank * (c.experts // self.me.size)
        if c.layout == "masked":
            local = torch.arange(got.rows.shape[0], device=self.me.device)
            factor = (1.0 + (local + first).float() / c.experts)[:, None, None]
        else:
            live = got.topk_ids >= 0
            each = (1.0 + (got.topk_ids + first).float() / c.experts) * got.topk_weights
            factor = torch.where(live, each, 0.0).sum(1)[:, None]
        answer = (rows * factor).nan_to_num(0.0).to(torch.bfloat16)
        if self.y is None or self.y.shape != answer.shape:
            self.y = answer
        else:
            self.y.copy_(answer)  # a captured combine reads it there

    def poison(self) -> None:
        if self.got is not None:
            self.got.rows.view(torch.uint8).fill_(0xFF)
        self.out.fill_(float("nan"))

    def check(self) -> None:
        want = expected(self.case, self.inputs, self.me.rank)
        off = (self.out.float().cpu() - want).norm() / want.norm().clamp_min(1e-9)
        limit = 0.06 if self.case.fp8 else 0.01
        if not float(off) < limit:
            raise AssertionError(f"rank {self.me.rank}, {self.case.name}: relative error {float(off):.4f}, at most {limit}")


def graphs(w: Workload) -> tuple[Any, Any]:
    """Dispatch and combine as two graphs, with the experts' answer of the captured dispatch between them."""
    parts = []
    for step in (w.dispatch, w.combine):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        parts.append(graph)
        graph.replay()
        if step == w.dispatch:
            torch.cuda.synchronize()
            w.experts()
        torch.cuda.synchronize()
    return parts[0], parts[1]


def rounds(me: Rank, w: Workload, count: int) -> tuple[list[float], list[float]]:
    """Microseconds of each round's dispatch and combine. The combine before a round has aligned the ranks' devices."""
    w.dispatch()
    w.experts()
    w.combine()
    w.check()
    w.poison()
    if w.case.graph:
        first, second = graphs(w)
        steps = first.replay, second.replay
    else:
        steps = w.dispatch, w.combine
    times: tuple[list[float], list[float]] = [], []
    while len(times[0]) < count:
        me.align()
        marks = []
        if w.case.graph:
            torch.cuda._sleep(int(LEAD_NS * 1.9))  # type: ignore[no-untyped-call]
        for _ in range(BATCH + 1):
            e = [_event() for _ in range(3)]
            e[0].record()
            steps[0]()
            e[1].record()
            steps[1]()
            e[2].record()
            marks.append(e)
        torch.cuda.synchronize()
        for e in marks[1:]:
            times[0].append(e[0].elapsed_time(e[1]) * 1e3)
            times[1].append(e[1].elapsed_time(e[2]) * 1e3)
    w.poison()
    steps[0]()
    w.experts()
    steps[1]()
    w.check()
    return times


def host_rounds(w: Workload, count: int) -> tuple[list[float], list[float]]:
    """The same on the host fabric, by its clock."""
    times: tuple[list[float], list[float]] = [], []
    for turn in range(count + 1):
        t = [time.perf_counter()]
        w.dispatch()
        t.append(time.perf_counter())
        if turn == 0:
            w.experts()
        t.append(time.perf_counter())
        w.combine()
        t.append(time.perf_counter())
        if turn:
            times[0].append((t[1] - t[0]) * 1e6)
            times[1].append((t[3] - t[2]) * 1e6)
    w.check()
    return times


def ceiling(me: Rank, buffer: EpBuffer) -> float | None:
    """GB/s a GPU sends when all copy to their neighbour at once by copy engine, into the buffer's own memory."""
    if not me.cuda or me.size == 1:
        return None
    heap = buffer._fabric._heap  # type: ignore[attr-defined]
    half = min(heap.size // 2, 256 << 20) // 16 * 16
    from ep_backend.fabric.nvshmem.world import check, driver

    target = heap.peers[(me.rank + 1) % me.size] + heap.size - half
    source = torch.empty(half, dtype=torch.uint8, device=me.device)
    stream = torch.cuda.current_stream().cuda_stream
    me.align()
    marks = [_event() for _ in range(9)]
    for e in marks:
        e.record()
        check(driver().cuMemcpyAsync(target, source.data_ptr(), half, stream))
    me.align()
    best = min(a.elapsed_time(b) for a, b in itertools.pairwise(marks[1:]))
    return float(half / best / 1e6)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def measure(me: Rank, case: Case, buffer: EpBuffer, count: int) -> dict[str, Any] | None:
    w = Workload(me, case, buffer)
    before = buffer.stats()["modes"].get(case.mode)
    times = rounds(me, w, count) if me.cuda else host_rounds(w, count)
    after = buffer.stats()["modes"][case.mode]
    everyone: list[Any] = [None] * me.size
    dist.all_gather_object(everyone, times)
    if me.rank != 0:
        return None
    line: dict[str, Any] = {**case.as_dict(), "ranks": me.size, "input_hash": w.inputs.hash(), "rounds": len(times[0])}
    keys = (("dispatch", "dispatches", "bytes"), ("combine", "combines", "combine_bytes"))
    for i, (op, calls_key, key) in enumerate(keys):
        slowest = [max(r[i][n] for r in everyone) for n in range(len(times[0]))]
        calls = after[calls_key] - (before[calls_key] if before else 0)
        moved = {p: (after[key][p] - (before[key][p] if before else 0)) / max(calls, 1) for p in after[key]}
        p50 = statistics.median(slowest)
        remote, logical = moved["scale_up"] + moved["scale_out"], sum(moved.values())
        line[op] = {
            "p50_us": round(p50, 2),
            "p90_us": round(percentile(slowest, 0.9), 2),
            "p99_us": round(percentile(slowest, 0.99), 2),
            "max_us": round(max(slowest), 2),
            "remote_bytes": round(remote),
            "remote_gb_s": round(remote / p50 / 1e3, 1),
            "logical_gb_s": round(logical / p50 / 1e3, 1),
        }
    return line


def main(options: dict[str, Any]) -> None:
    local = int(os.environ["LOCAL_RANK"])
    fabric = options["fabric"]
    device = torch.device("cpu")
    if fabric == "nvshmem":
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    me = Rank(dist.get_rank(), dist.get_world_size(), device, fabric)
    cases = [Case(**c) for c in options["cases"]] if "cases" in options else SUITES[options["suite"]]
    facts = {
        "fabric": fabric,
        "device": torch.cuda.get_device_name(device) if me.cuda else "cpu",
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    shapes = {(c.hidden, c.experts, c.top_k) for c in cases}
    for hidden, experts, top_k in sorted(shapes):
        mine = [c for c in cases if (c.hidden, c.experts, c.top_k) == (hidden, experts, top_k)]
        tokens = {m: max((c.tokens for c in mine if c.mode == m), default=0) for m in {c.mode for c in mine}}
        with EpBuffer(
            None, hidden=hidden, num_experts=experts, top_k=top_k, max_tokens=tokens, fabric=fabric, payloads=("bf16", "fp8")
        ) as buffer:
            top = ceiling(me, buffer)
            facts["ceiling_gb_s"] = round(top, 1) if top else None
            for case in mine:
                line = measure(me, case, buffer, options["rounds"])
                if line is not None:
                    print(json.dumps({**line, **facts}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
