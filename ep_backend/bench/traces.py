"""What a trace of torch's profiler says of the all-to-all of a model's layers."""

from __future__ import annotations

import gzip
import json
import re
import statistics
import time
import zlib
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from ep_backend.fabric.nvshmem.images import IMAGE_KERNELS

OURS = re.compile("|".join(f"^ep_{name}$" for names in IMAGE_KERNELS.values() for name in names))
# The kernel that begins a dispatch, one a layer and micro-batch; and both ends of one whose phases are apart.
BEGINS = re.compile("^ep_(dispatch|send|rail_send|ring_dispatch|expert_send)$")
SENDS = re.compile("^ep_(dispatch|send|rail_send|expert_send)$")
RECEIVES = re.compile("^ep_(dispatch|await|expert_await)$")
COMBINES = re.compile(
    "^ep_(combine|sums|rail_return|rail_sum|ring_combine|expert_return|expert_sum)$|reduce_?scatter|all_?reduce|cross_device",
    re.IGNORECASE,
)
COLLECTIVE = re.compile("nccl|all_?gather|reduce_?scatter|all_?reduce|cross_device", re.IGNORECASE)
STEP = 20  # kernels of a graph that is a step, at least: engines capture smaller things, too


def first_trace(traces: Path, seconds: float = 60.0) -> tuple[Path, list[dict[str, Any]]]:
    """The first whole trace with kernels in a folder; TimeoutError if there is none so soon."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for path in sorted(traces.rglob("*.json*")):
            try:
                text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
            except (EOFError, OSError, ValueError, zlib.error):  # still being written
                continue
            if kernels := [event for event in events if event.get("cat") == "kernel"]:
                return path, kernels
        time.sleep(1.0)
    raise TimeoutError(f"no kernels in {[path.name for path in traces.rglob('*')]}")


def all_to_all(kernels: list[dict[str, Any]], layers: int | None = None) -> dict[str, Any]:
    """What a trace's kernels say of the all-to-all: ours if there are any, else the collectives.

    ``us_a_layer`` is all its kernels' time by the number of dispatches: ``layers``, or as many as begin one (collectives: of
    the rarest kind of kernel that there is a hundredth of). ``overlapped``: the share of its time in which another kernel
    ran, too; ``covered``: the share of the other kernels' time in which it ran.
    """
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel["name"]].append(kernel["dur"])
    names = _names(kernels)
    layers = layers or sum(len(us) for name, us in by_name.items() if BEGINS.match(name))
    if names and not any(map(OURS.match, names)):
        counts = [len(by_name[name]) for name in names]
        layers = min(count for count in counts if count * 100 >= max(counts))
    combine = sum(sum(by_name[name]) for name in names if COMBINES.search(name))
    total = sum(sum(by_name[name]) for name in names)
    ours, others = [k for k in kernels if k["name"] in names], [k for k in kernels if k["name"] not in names]

    def a_layer(us: float) -> float | None:
        return round(us / layers, 2) if layers else None

    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:40]
    return {
        "layers": layers,
        "us_a_layer": a_layer(total),
        "dispatch_us_a_layer": a_layer(total - combine),
        "combine_us_a_layer": a_layer(combine),
        "overlapped": _share(ours, others),
        "covered": _share(others, ours),
        "kernels": [{"name": n[:100], "calls": len(us), "median_us": statistics.median(us), "us": sum(us)} for n, us in top],
    }


def steps(kernels: list[dict[str, Any]], layers: int) -> dict[str, Any] | None:
    """Of steps in CUDA graphs, medians: us from one's begin to the next's, those of them in which its graph ran, and its
    all-to-all by its ``layers`` with experts.

    The kernels of one launch of a graph have one correlation. None if there are not two launches.
    """
    launched: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for kernel in kernels:
        launched[kernel.get("args", {}).get("correlation", -1)].append(kernel)
    launched.pop(-1, None)
    found = [launch for launch in launched.values() if len(launch) >= STEP]
    begins = sorted(min(kernel["ts"] for kernel in launch) for launch in found)
    if len(begins) < 2:
        return None
    ran = [max(k["ts"] + k["dur"] for k in launch) - min(k["ts"] for k in launch) for launch in found]
    names = _names(kernels)
    spent = [[k["dur"] / layers for k in launch if k["name"] in names] for launch in found]
    combines = [[k["dur"] / layers for k in launch if k["name"] in names and COMBINES.search(k["name"])] for launch in found]
    total, combine = statistics.median(map(sum, spent)), statistics.median(map(sum, combines))
    return {
        "steps": len(found),
        "step_us": round(statistics.median(after - before for before, after in pairwise(begins)), 1),
        "graph_us": round(statistics.median(ran), 1),
        "us_a_layer": round(total, 2),
        "combine_us_a_layer": round(combine, 2),
    }


def between(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a trace where dispatches send and receive apart: how many, and the time of other kernels that began in between.

    With two micro-batches that is the other one's work, while records are under way: also where one stream runs both.
    """
    sent: float | None = None
    work, found = 0.0, []
    for kernel in sorted(kernels, key=lambda kernel: kernel["ts"]):
        if sent is not None and RECEIVES.match(kernel["name"]):
            found.append(work)
            sent = None
        elif SENDS.match(kernel["name"]):
            sent, work = kernel["ts"] + kernel["dur"], 0.0
        elif sent is not None and kernel["ts"] >= sent and not OURS.match(kernel["name"]):
            work += kernel["dur"]
    with_work = [us for us in found if us]
    median = round(statistics.median(with_work), 2) if with_work else None
    return {"dispatches": len(found), "with_work": len(with_work), "median_us": median}


def _names(kernels: list[dict[str, Any]]) -> set[str]:
    """Of the all-to-all's kernels."""
    names = {kernel["name"] for kernel in kernels}
    return {name for name in names if OURS.match(name)} or {name for name in names if COLLECTIVE.search(name)}


def _share(kernels: list[dict[str, Any]], others: list[dict[str, Any]]) -> float | None:
    """Of the kernels' time, how much at least one of the others ran in."""
    merged: list[list[float]] = []
    for begin, end in sorted((k["ts"], k["ts"] + k["dur"]) for k in others):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    total = both = 0.0
    at = 0
    for begin, end in sorted((k["ts"], k["ts"] + k["dur"]) for k in kernels):
        total += end - begin
        while at < len(merged) and merged[at][1] <= begin:
            at += 1
        for first, last in merged[at:]:
            if first >= end:
                break
            both += min(end, last) - max(begin, first)
    return round(both / total, 4) if total else None
