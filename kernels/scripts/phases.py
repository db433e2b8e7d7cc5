"""What each phase costs that waits for nobody: `python3 kernels/scripts/phases.py [SMS]`, one rank on one GPU, JSON lines.

A phase may take twice its bytes of global memory at 4.3 TB/s, plus 3 us (issue of the kernels); a call's SM budget is the GPU's
unless SMS says otherwise. Phases are those of hooks: send and place of a dispatch, return and sum of a combine.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ep_backend import layout
from ep_backend.bench.worker import event, lead
from ep_backend.buffer import EpBuffer
from ep_backend.layout import Payload

TOKENS, HIDDEN, EXPERTS, TOP_K = 4096, 7168, 64, 8
ROUNDS = 20
HBM_BYTES_PER_US, FACTOR, FIXED_US = 4.3e6, 2.0, 3.0
PHASES = ("send", "place", "return", "sum")


def bytes_of(form: str) -> dict[str, int]:
    """Read and written, of all tokens. Masked rows are one a pick, and a sum reads them all."""
    record = layout.record(Payload.FP8, HIDDEN, TOP_K).bytes
    row, rows = HIDDEN + layout.scale_bytes(Payload.FP8, HIDDEN), TOP_K if form == "masked" else 1
    each = {
        "send": 2 * HIDDEN + record,
        "place": record + rows * row,
        "return": (rows + 1) * 2 * HIDDEN,
        "sum": 2 * 2 * HIDDEN,
    }
    return {phase: TOKENS * n for phase, n in each.items()}


def measure(buffer: EpBuffer, mode: str, form: str, sms: int) -> dict[str, float]:
    """Median microseconds of each phase, queued while the device sleeps."""
    device = torch.device("cuda", 0)
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    ids = torch.rand(TOKENS, EXPERTS, device=device).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, device=device)
    y: Any = None
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        lead()
        marks = [event() for _ in range(len(PHASES) + 1)]
        marks[0].record()
        got = buffer.dispatch(x, ids, weights, mode=mode, layout=form, fp8="fp32", host_counts=False, sms=sms, return_hook=True)
        marks[1].record()
        assert got.hook is not None
        got.hook()
        marks[2].record()
        if y is None:
            y = torch.randn(got.rows.shape, device=device, dtype=torch.bfloat16)
        _, finish = buffer.combine(y, got.handle, return_hook=True)
        marks[3].record()
        finish()
        marks[4].record()
        torch.cuda.synchronize()
        for phase, (a, b) in zip(PHASES, pairwise(marks), strict=True):
            times[phase].append(a.elapsed_time(b) * 1e3)
    return {phase: round(statistics.median(us[1:]), 1) for phase, us in times.items()}


def main() -> None:
    torch.cuda.set_device(0)
    sms = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.get_device_properties(0).multi_processor_count
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    arguments: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K, "payloads": ("bf16", "fp8")}
    with EpBuffer(None, max_tokens={"direct": TOKENS, "hybrid": TOKENS}, **arguments) as buffer:
        for mode in ("direct", "hybrid"):
            for form in ("compact", "masked"):
                for phase, us in measure(buffer, mode, form, sms).items():
                    moved = bytes_of(form)[phase]
                    most = FACTOR * moved / HBM_BYTES_PER_US + FIXED_US
                    line = {"mode": mode, "layout": form, "phase": phase, "sms": sms, "us": us, "bytes": moved}
                    print(json.dumps({**line, "most_us": round(most, 1), "met": us <= most}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
