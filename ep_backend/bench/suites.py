"""What is measured: workloads as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the bench. Times are from all inputs ready to all outputs ready."""

    name: str
    mode: str
    layout: str
    tokens: int
    fp8: bool = True
    graph: bool = True  # replay of a captured graph; else launched by the host each round
    host_counts: bool = False
    sms: int | None = None
    routing: str = "uniform"
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


DECODE = [Case(f"decode-{t}", "low_latency", "masked", t) for t in (1, 8, 64, 128)]
PREFILL = [Case(f"prefill-{t}", "direct", "compact", t) for t in (1024, 4096, 8192)]
EAGER = [
    Case("decode-128-eager", "low_latency", "masked", 128, graph=False),
    Case("prefill-4096-eager", "direct", "compact", 4096, graph=False, host_counts=True),
]
TINY = [
    Case("tiny-decode", "low_latency", "masked", 8, fp8=False, graph=False, hidden=256, experts=8, top_k=2),
    Case("tiny-prefill", "direct", "compact", 64, graph=False, hidden=256, experts=8, top_k=2, host_counts=True),
]  # for a laptop
SUITES = {"tiny": TINY, "decode": DECODE, "prefill": PREFILL, "eager": EAGER, "all": [*DECODE, *PREFILL, *EAGER]}
