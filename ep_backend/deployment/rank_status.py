"""What the agent in an engine's rank answers."""

from pydantic import BaseModel


class ModeCounters(BaseModel):
    dispatches: int = 0
    combines: int = 0
    tokens: int = 0
    slots_high_water: int = 0
    seconds: float = 0.0
    combine_seconds: float = 0.0
    phase_s: dict[str, float] = {}
    combine_phase_s: dict[str, float] = {}
    records: dict[str, int] = {}
    bytes: dict[str, int] = {}
    combine_records: dict[str, int] = {}
    combine_bytes: dict[str, int] = {}

    def since(self, before: "ModeCounters") -> "ModeCounters":
        return ModeCounters(
            dispatches=self.dispatches - before.dispatches,
            combines=self.combines - before.combines,
            records={path: count - before.records.get(path, 0) for path, count in self.records.items()},
            bytes={path: count - before.bytes.get(path, 0) for path, count in self.bytes.items()},
        )


class NicPort(BaseModel):
    """One RDMA port of the rank's host; see :mod:`ep_backend.control.nics`."""

    device: str
    port: int
    rate_gbps: float
    errors: dict[str, int]


class FlipState(BaseModel):
    """A rank's side of a change of mode; see :class:`ep_backend.control.flip.Flip`."""

    mode: str = "auto"
    proposed: str | None = None
    token: int = 0
    agreed_token: int = 0
    agreed_epoch: int = 0
    flips: int = 0


class GraphState(BaseModel):
    """CUDA graphs of a rank: do they hold the mode, what keeps it from capturing anew, and how its last try ended."""

    captured: bool = False
    obstacle: str | None = None
    token: int = 0
    error: str | None = None
    seconds: float = 0.0


class RankStatus(BaseModel):
    """One rank's answer; `error` says why there is none, `silent_s` since when its process has said nothing."""

    agent: str
    role: str | None = None
    rank: int = -1
    world_size: int = 0
    gpus_per_node: int = 1
    engine: str = ""
    pid: int = 0
    mode_desired: str | None = None
    mode_executed: str | None = None
    epoch: int | None = None
    lane_rounds: list[int] = []  # finished, of each micro-batch
    failed: str | None = None
    timeouts: int = 0
    modes: dict[str, ModeCounters] = {}
    max_tokens: dict[str, int] = {}
    expert_rows: list[int] = []  # received by each local expert
    wait_s: dict[int, float] = {}
    buffer_bytes: dict[str, int] = {}
    sms: int | None = None
    fallbacks: dict[str, int] = {}
    estimates: dict[str, float] = {}
    nics: list[NicPort] = []
    flip: FlipState = FlipState()
    graphs: GraphState = GraphState()
    silent_s: float = 0.0
    error: str | None = None
