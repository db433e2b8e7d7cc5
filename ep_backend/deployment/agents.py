"""Asks the agents in the engine's ranks what their buffers did."""

import httpx
from pydantic import BaseModel

from ep_backend.deployment.state import InstanceState, RunState

PATHS = ("local", "scale_up", "scale_out", "forwarded")
TIMEOUT_S = 30.0  # an agent answers on its own, so this is the time that a crowded machine may take to run it


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


def rank_statuses(instance: InstanceState, key: str | None) -> list[RankStatus]:
    """The answers of an instance's ranks, in rank order."""
    return [_ask(agent, instance, key) for agent in instance.agents]


def status_in(response: httpx.Response, agent: str) -> RankStatus:
    """A rank's answer. HTTPError; ValueError if it is none."""
    if not response.is_success:  # httpx's own words have two lines
        said = f"{agent} answers with status {response.status_code}"
        raise httpx.HTTPStatusError(said, request=response.request, response=response)
    try:
        return RankStatus.model_validate({**response.json(), "agent": agent})
    except (ValueError, TypeError):
        raise ValueError(f"what answers at {agent} is no agent of a rank of this version") from None


def all_statuses(state: RunState) -> list[RankStatus]:
    return [status for instance in state.instances for status in rank_statuses(instance, state.key)]


def _ask(agent: str, instance: InstanceState, key: str | None) -> RankStatus:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{agent}/status", headers=headers, timeout=TIMEOUT_S)
        return status_in(response, agent)
    except (httpx.HTTPError, ValueError) as error:
        return RankStatus(agent=agent, role=instance.role, error=f"{type(error).__name__}: {error}")
