"""What the figures should be on H200s of one NVLink domain, p50 in microseconds, and whether they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEVICE = "H200"
OPS = ("dispatch", "combine")
# By ranks and case: dispatch, combine. From the bytes that must cross at 345 GB/s egress a GPU, plus a fixed part.
LIMITS: dict[int, dict[str, tuple[float, float]]] = {
    2: {"decode-1": (8, 9), "decode-128": (13, 18), "prefill-4096": (130, 210), "prefill-8192": (260, 420)},
    4: {"decode-1": (9, 10), "decode-128": (16, 24), "prefill-4096": (285, 530), "prefill-8192": (570, 1060)},
}
# So many times another case of the same run.
RATIOS = {
    "normal-4096": (1.25, "prefill-4096"),
    "hybrid-decode-128": (1.6, "decode-128"),
    "hybrid-prefill-4096": (1.35, "prefill-4096"),
}
# Skewed: the busiest port's bytes at the rate at which a GPU takes what all others send, plus the fixed part.
SKEW, FIXED = 1.15, "decode-1"


def target(line: Mapping[str, Any], op: str, run: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Microseconds that a case's operation may take; ``run``: the run's lines by case. None: no target, or no base for it."""
    if DEVICE not in line.get("device", ""):
        return None
    name = line["name"]
    limit = LIMITS.get(line["ranks"], {}).get(name)
    if limit is not None:
        return limit[OPS.index(op)]
    if line["nodes"] > 1 and line["gpus_per_node"] == 1:  # half of two hops
        return None
    if name in RATIOS:
        factor, base = RATIOS[name]
        return factor * run[base][op]["p50_us"] if base in run else None
    if line["routing"] != "uniform" and line["nodes"] == 1 and FIXED in run and "ingress_gb_s" in line:
        busiest = line[op]["busiest_port_bytes"] / line["ingress_gb_s"] / 1e3
        return SKEW * float(busiest) + float(run[FIXED][op]["p50_us"])
    return None
