"""One rank of the bench, started by torchrun: `python -m torch.distributed.run … -m ep_backend.bench.worker '{json}'`."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_backend.bench.cases import dequantized, draw, expected, predicted
from ep_backend.bench.origin import gpus
from ep_backend.bench.suites import Case
from ep_backend.buffer import EpBuffer
from ep_backend.modes import Layout, Mode

OPS = ("dispatch", "combine")
LEAD_NS = 3_000_000  # the device sleeps while the host queues a batch of rounds
BATCH = 20
TIMEOUT_S = 20.0  # of every wait in a buffer
# Relative error of a token: bf16 rounds the experts' answer, partial sums and the result; a cast may take the neighbour of
# the reference's e4m3. A lost pick is off by its share of the weights, 1 / K on average.
WORST_ROW = 0.015
BROKEN = 17  # exit status: this process's GPU can do no more


class CaseFailed(Exception):
    """A rank could not go on; raised on all of them, with every rank's reason."""


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

    def gather(self, value: Any = None, error: str | None = None) -> list[Any]:
        """Every rank's value, or CaseFailed if one has an error.

        The only way in which ranks meet here, so that one that fails meets the others wherever they are.
        """
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (error, value))
        errors = [f"rank {r}: {e}" for r, (e, _) in enumerate(found) if e]
        if errors:
            raise CaseFailed("; ".join(errors)[:2000])
        return [v for _, v in found]

    def align(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.gather()


class Workload:
    """Dispatch, experts that multiply by 1 + id / E, and combine of one case."""

    def __init__(self, me: Rank, case: Case, buffer: EpBuffer) -> None:
        self.me, self.case, self.buffer = me, case, buffer
        self.inputs = draw(case, me.rank, me.size, me.device)
        self.out = torch.empty_like(self.inputs.x)
        self.got: Any = None
        self.call: Any = None
        self.y: Any = None

    def dispatch(self) -> None:
        c, given = self.case, self.inputs
        self.got = self.buffer.dispatch(
            given.x,
            given.ids,
            given.weights,
            mode=c.mode,
            layout=c.layout,
            fp8="fp32" if c.fp8 else None,
            host_counts=c.host_counts,
            sms=c.sms,
        )
        self.call = self.got.handle.call

    def combine(self) -> None:
        self.buffer.combine(self.y, self.got.handle, out=self.out)

    def blocks(self, op: str) -> dict[str, list[int]]:
        """Of every launch of the last call's operation, by kernel; the nvshmem fabric's."""
        call = self.call
        found: dict[str, list[int]] = {}
        for part in ("count", op) if call.mode is Mode.NORMAL and op == "dispatch" else (op,):
            for one in call.state.plan.launches(part, call, send=True, receive=True):
                found.setdefault(one.kernel, []).append(one.blocks)
        return found

    def experts(self) -> None:
        """What a rank's experts would return; NaN in rows that combine must not read."""
        got, c = self.got, self.case
        rows = got.rows.float() if got.scales is None else dequantized(got.rows, got.scales)
        first = self.me.rank * (c.experts // self.me.size)
        if c.layout == Layout.MASKED.value:
            local = torch.arange(got.rows.shape[0], device=self.me.device)
            factor = (1.0 + (local + first).float() / c.experts)[:, None]
            live = torch.arange(got.rows.shape[1], device=self.me.device) < got.counts[:, None]
        else:
            ours = got.topk_ids >= 0
            each = (1.0 + (got.topk_ids + first).float() / c.experts) * got.topk_weights
            factor, live = torch.where(ours, each, 0.0).sum(1), ours.any(1)
        answer = torch.where(live[..., None], rows * factor[..., None], float("nan")).to(torch.bfloat16)
        if self.y is None or self.y.shape != answer.shape:
            self.y = answer
        else:
            self.y.copy_(answer)  # a captured combine reads it there

    def poison(self) -> None:
        """Whatever the next round leaves unwritten shows."""
        if self.got is not None:
            self.got.rows.view(torch.uint8).fill_(0xFF)  # NaN in bf16 and e4m3
            for tensor in (self.got.scales, self.got.topk_weights):
                if tensor is not None:
                    tensor.fill_(float("nan"))
        self.out.fill_(float("nan"))

    def check(self, steps: Steps, when: str) -> None:
        """One round on the timed buffers. Collective."""
        self.poison()
        steps[0]()
        self.experts()
        steps[1]()
        want = expected(self.case, self.inputs)
        off = (self.out.float() - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-9)
        worst = float(off.max())  # a NaN stays one
        error = self.buffer.failure()
        if not error and not worst < WORST_ROW:
            error = f"wrong {when}: token {int(off.argmax())} is off by {worst:.4f} of its norm, at most {WORST_ROW}"
        self.me.gather(error=error)

    def captured(self) -> Steps:
        """Replays of dispatch and combine as two graphs, with the experts' answer to the captured dispatch between them."""
        graphs = []
        for step in (self.dispatch, self.combine):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            graphs.append(graph)
            graph.replay()
            torch.cuda.synchronize()
            if step == self.dispatch:
                self.experts()
        return graphs[0].replay, graphs[1].replay


Steps = tuple[Callable[[], object], Callable[[], object]]
Times = tuple[list[float], list[float]]


def rounds(w: Workload, count: int) -> tuple[Steps, Times]:
    """What is timed, and microseconds of each round's dispatch and combine; results are checked before and after."""
    steps: Steps = (w.dispatch, w.combine)
    w.check(steps, "at first")
    if w.me.cuda and w.case.graph:
        steps = w.captured()
        w.check(steps, "replayed")
    times = cuda_times(w, steps, count) if w.me.cuda else host_times(w, steps, count)
    w.check(steps, "after the timed rounds")
    return steps, times


def cuda_times(w: Workload, steps: Steps, count: int) -> Times:
    """By events. The combine before a round has aligned the ranks' devices."""
    times: Times = ([], [])
    while len(times[0]) < count:
        w.me.align()
        marks = []
        if w.case.graph:
            lead()
        for _ in range(BATCH + 1):
            e = [event() for _ in range(3)]
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
    return times


def host_times(w: Workload, steps: Steps, count: int) -> Times:
    """The same on the host fabric, by its clock."""
    times: Times = ([], [])
    for turn in range(count + 1):
        t = [time.perf_counter()]
        for step in steps:
            step()
            t.append(time.perf_counter())
        if turn:
            for i in range(2):
                times[i].append((t[i + 1] - t[i]) * 1e6)
    return times


def kernels(w: Workload, steps: Steps, count: int = 20) -> dict[str, float]:
    """Median microseconds of each kernel of both operations, as CUPTI sees them."""
    from torch.profiler import ProfilerActivity, profile

    w.me.align()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            for step in steps:
                step()
        torch.cuda.synchronize()
    by_name: dict[str, list[float]] = {}
    for e in found.events():
        if e.device_type.name == "CUDA":
            by_name.setdefault(e.name, []).append(e.time_range.elapsed_us())
    return {name: round(statistics.median(us), 2) for name, us in by_name.items() if len(us) >= count}


def ceilings(me: Rank) -> dict[str, float]:
    """What this run's hardware does, so that its figures can be judged: GB/s and microseconds.

    Copy engines: all ranks to their neighbour at once (``ceiling_gb_s``, each rank's egress), all others to rank 0
    (``ingress_gb_s``), and inside a GPU, read plus write (``hbm_copy_gb_s``). ``empty_graph_us``: a graph of one kernel that
    does nothing, between the same events as a round.
    """
    if not me.cuda:
        return {}
    local = torch.empty((2, 1 << 30), dtype=torch.uint8, device=me.device)
    found = {"hbm_copy_gb_s": 2 * (1 << 30) / _step_us(me, lambda: local[1].copy_(local[0])) / 1e3}
    word = torch.zeros(1, device=me.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        word.zero_()
    found["empty_graph_us"] = _step_us(me, graph.replay)
    with EpBuffer(None, **_copied(me.size)) as buffer:
        heap = buffer._fabric._heap  # type: ignore[attr-defined]
        part = heap.size // 2 // me.size // 16 * 16
        stream = torch.cuda.current_stream().cuda_stream

        def copy(to: int) -> None:
            from ep_backend.fabric.nvshmem.world import check, driver

            end = heap.peers[to] + heap.size - part * me.rank
            check(driver().cuMemcpyAsync(end - part, local.data_ptr(), part, stream))

        found["ceiling_gb_s"] = part / _step_us(me, lambda: copy((me.rank + 1) % me.size)) / 1e3
        into_one = _step_us(me, (lambda: copy(0)) if me.rank else None)
        found["ingress_gb_s"] = sum(me.gather(part / into_one / 1e3 if me.rank else 0.0))
    return {name: round(value, 1) for name, value in found.items()}


def _copied(ranks: int) -> dict[str, Any]:
    """A buffer with room to copy into."""
    return {"hidden": 7168, "num_experts": ranks, "top_k": 1, "max_tokens": {"direct": 8192}, "payloads": ("bf16",)}


def _step_us(me: Rank, step: Callable[[], object] | None, count: int = 16) -> float:
    """Median of so many steps, queued while the devices of all ranks sleep. Collective; None: only meet."""
    marks = [event() for _ in range(count + 1)]
    me.align()
    lead()
    for e in marks:
        e.record()
        if step is not None:
            step()
    me.align()
    return float(statistics.median(a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)))


def lead() -> None:
    """The device sleeps, so that what follows is queued by the time it is due."""
    torch.cuda._sleep(int(LEAD_NS * 1.9))  # type: ignore[no-untyped-call]


def event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def measure(me: Rank, case: Case, buffers: Buffers, count: int, profiled: bool) -> dict[str, Any]:
    """A case's line. Collective; CaseFailed on every rank if one cannot."""
    try:
        buffer = buffers.of(case)
        w = Workload(me, case, buffer)
        before = _bytes_sent(buffer, case)
        steps, times = rounds(w, count)
        after = _bytes_sent(buffer, case)
        moved = {op: _per_call(before[op], after[op]) for op in OPS}
        profile = kernels(w, steps) if profiled and me.cuda else {}
    except CaseFailed:
        raise
    except Exception as error:
        me.gather(error=f"{type(error).__name__}: {error}")
        raise  # not reached
    everyone = me.gather((times, moved))
    line: dict[str, Any] = {
        **{**case.as_dict(), "ranks": me.size, "gpus_per_node": me.size // case.nodes},
        **{"input_hash": w.inputs.hash(), "rounds": len(times[0])},
        **({"kernels_us": profile} if profile else {}),
    }
    for i, op in enumerate(OPS):
        slowest = [max(r[0][i][n] for r in everyone) for n in range(len(times[0]))]
        sent = [r[1][op] for r in everyone]
        remote = [s["scale_up"] + s["scale_out"] for s in sent]
        wanted = predicted(case, w.inputs.everyones_ids, op)
        p50 = statistics.median(slowest)
        line[op] = {
            "p50_us": round(p50, 2),
            "p90_us": round(percentile(slowest, 0.9), 2),
            "p99_us": round(percentile(slowest, 0.99), 2),
            "max_us": round(max(slowest), 2),
            "remote_bytes": round(max(remote)),
            "scale_out_bytes": round(max(s["scale_out"] for s in sent)),
            "bytes_as_predicted": [round(n) for n in remote] == wanted["remote"],
            "busiest_port_bytes": wanted["busiest_port"],
            "remote_gb_s": round(max(remote) / p50 / 1e3, 1),
            "logical_gb_s": round(max(r + s["local"] for r, s in zip(remote, sent, strict=True)) / p50 / 1e3, 1),
            **({"blocks": w.blocks(op)} if me.fabric == "nvshmem" else {}),
        }
    return line


def _bytes_sent(buffer: EpBuffer, case: Case) -> dict[str, dict[str, float]]:
    """By operation: calls, and bytes by path."""
    found = buffer.stats()["modes"].get(case.mode)
    if found is None:
        return {op: {} for op in OPS}
    return {
        "dispatch": {"calls": found["dispatches"], **found["bytes"]},
        "combine": {"calls": found["combines"], **found["combine_bytes"]},
    }


def _per_call(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    calls = after["calls"] - before.get("calls", 0)
    return {path: (n - before.get(path, 0)) / max(calls, 1) for path, n in after.items() if path != "calls"}


class Buffers:
    """One for each model shape, number of nodes and capacity, made when it is first used."""

    def __init__(self, me: Rank, cases: Iterable[Case]) -> None:
        self._me, self._cases = me, list(cases)
        self._made: dict[tuple[int, ...], EpBuffer] = {}
        if me.cuda:  # where the heap cannot grow, it must hold all of them from the start
            every = [_copied(me.size), *(self._arguments(key) for key in {_key(c) for c in self._cases})]
            size = sum(EpBuffer.size_hint(me.size, **arguments)["total"] for arguments in every)
            os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(size * 5 // 4))

    def of(self, case: Case) -> EpBuffer:
        key = _key(case)
        if key not in self._made:
            self._made[key] = EpBuffer(None, fabric=self._me.fabric, timeout_s=TIMEOUT_S, **self._arguments(key))
        return self._made[key]

    def drop(self, case: Case) -> None:
        if buffer := self._made.pop(_key(case), None):
            buffer.destroy()

    def close(self) -> None:
        for buffer in self._made.values():
            buffer.destroy()

    def _arguments(self, key: tuple[int, ...]) -> dict[str, Any]:
        hidden, experts, top_k, nodes, capacity = key
        return {
            **{"hidden": hidden, "num_experts": experts, "top_k": top_k, "gpus_per_node": self._me.size // nodes},
            "max_tokens": {c.mode: capacity for c in self._cases if _key(c) == key},
            "payloads": ("bf16", "fp8"),
        }


def _key(c: Case) -> tuple[int, ...]:
    return c.hidden, c.experts, c.top_k, c.nodes, c.capacity


def about(me: Rank) -> dict[str, Any]:
    """Hardware and versions."""
    facts: dict[str, Any] = {
        **{"fabric": me.fabric, "python": platform.python_version(), "torch": torch.__version__},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if not me.cuda:
        return {**facts, "device": f"cpu ({platform.machine()})"}
    from ep_backend.fabric.nvshmem.world import joined

    driver = gpus("driver_version")
    return {
        **facts,
        **{"device": torch.cuda.get_device_name(me.device), "driver": driver[0] if driver else None},
        **{"cuda": torch.version.cuda, "nvshmem": joined().library},
    }


def main(options: dict[str, Any]) -> int:
    """Measures ``cases`` in order until ``deadline`` (of time.monotonic, alike in all processes of a host); ``results`` gets an
    empty line, then theirs."""
    _end_with_the_launcher()
    fabric, device = options["fabric"], torch.device("cpu")
    if fabric == "nvshmem":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=4 * TIMEOUT_S))
    me = Rank(dist.get_rank(), dist.get_world_size(), device, fabric)
    cases = [Case(**c) for c in options["cases"]]
    buffers = Buffers(me, cases)
    limits = ceilings(me)
    facts = {**about(me), **limits, **options["facts"]}
    with Path(options["results"]).open("a") as results:
        if me.rank == 0:  # an empty line: whatever ends the ranks from here on, a case does
            results.write("\n")
            results.flush()
        for case in cases:
            if me.gather(time.monotonic() > options["deadline"])[0]:
                break
            broken = False
            try:
                line = measure(me, case, buffers, options["rounds"], options["profile"])
            except CaseFailed as error:
                line = {**case.as_dict(), "ranks": me.size, "error": str(error)}
                broken = any(me.gather(_is_broken(me)))
                if not broken:
                    buffers.drop(case)
            if me.rank == 0:
                results.write(json.dumps({**line, **facts}) + "\n")
                results.flush()
            if broken:
                return BROKEN
    buffers.close()
    dist.destroy_process_group()
    return 0


def _end_with_the_launcher() -> None:
    """torchrun gives ranks sessions of their own: one that outlived it would keep its GPU."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _is_broken(me: Rank) -> bool:
    """After some errors a process's GPU answers nothing any more."""
    try:
        if me.cuda:
            torch.cuda.synchronize()
            torch.zeros(1, device=me.device).item()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    status = main(json.loads(sys.argv[1]))
    if status:
        sys.stdout.flush()
        os._exit(status)  # no library may wait for the GPU
