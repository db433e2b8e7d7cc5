"""What is measured: workloads as data, the most telling first."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from ep_backend.modes import Layout, Mode


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the bench. Times are from all inputs ready to all outputs ready."""

    name: str
    mode: str
    layout: str
    tokens: int  # of each rank
    fp8: bool = True
    graph: bool = True  # replay of a captured graph; else launched by the host each round
    host_counts: bool = False
    sms: int | None = None
    routing: str = "uniform"  # a kind of ep_backend.routing
    nodes: int = 1  # virtual ones, of equal size
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8

    @property
    def capacity(self) -> int:
        """max_tokens of the buffer: a decode role's usual 128 also for smaller batches."""
        return max(self.tokens, 128) if self.layout == Layout.MASKED.value else self.tokens

    @property
    def two_hops(self) -> bool:
        return Mode(self.mode).spec.two_hops and self.nodes > 1

    def hindrance(self, ranks: int) -> str | None:
        """Why it cannot run on so many. Nodes of one rank each have the rail hop alone: their relays forward to themselves."""
        if self.experts % ranks:
            return f"{self.experts} experts do not divide by {ranks} ranks"
        return f"{ranks} ranks do not divide by {self.nodes} nodes" if ranks % self.nodes else None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def _decode(tokens: int) -> Case:
    return Case(f"decode-{tokens}", "low_latency", "masked", tokens)


def _prefill(tokens: int) -> Case:
    return Case(f"prefill-{tokens}", "direct", "compact", tokens)


def _normal(tokens: int, nodes: int = 1) -> Case:
    name = f"normal-{tokens}" if nodes == 1 else f"normal-{tokens}-{nodes}-nodes"
    return Case(name, "normal", "compact", tokens, graph=False, host_counts=True, nodes=nodes)


def _hybrid(base: Case) -> Case:
    return replace(base, name=f"hybrid-{base.name}", mode="hybrid", nodes=2)


def _skewed(*cases: Case) -> list[Case]:
    return [replace(c, name=f"{c.name}-{routing}", routing=routing) for c in cases for routing in ("zipf", "hot_rank")]


def _compact(case: Case) -> Case:
    """As engines have it whose experts of the decode family take one bf16 row a token."""
    return replace(case, name=f"{case.name}-compact", layout="compact", fp8=False)


def _eager(case: Case) -> Case:
    waits = case.layout == Layout.COMPACT.value
    return replace(case, name=f"{case.name}-eager", graph=False, host_counts=waits)


DECODE = [_decode(t) for t in (128, 1, 8, 32, 512)]
PREFILL = [_prefill(t) for t in (4096, 8192)]
TWO_HOPS = [_hybrid(_decode(128)), _hybrid(_prefill(4096)), _normal(4096, 2)]
ALL = [
    *(_decode(128), _prefill(4096), _decode(1), _normal(4096), *TWO_HOPS, *DECODE[2:], _prefill(8192)),
    *(_compact(_decode(t)) for t in (32, 128)),
    *_skewed(_decode(128), _prefill(4096)),
    *(_hybrid(_decode(t)) for t in (1, 8, 32, 512)),
    *(_eager(_decode(128)), _eager(_prefill(4096)), _normal(8192), _hybrid(_prefill(8192)), _normal(8192, 2)),
    *_skewed(_hybrid(_decode(128)), _normal(4096), _hybrid(_prefill(4096)), _normal(4096, 2)),
]
TINY = [
    replace(
        case,
        name=f"tiny-{case.name}",
        tokens=8 if case.layout == Layout.MASKED.value else 64,
        graph=False,
        hidden=1024,
        experts=8,
        top_k=2,
    )
    for case in (_decode(128), _prefill(4096), _normal(4096), *TWO_HOPS, *_skewed(_decode(128)))
]  # for a laptop
SUITES = {"tiny": TINY, "decode": DECODE, "prefill": PREFILL, "two-hops": TWO_HOPS, "all": ALL}
