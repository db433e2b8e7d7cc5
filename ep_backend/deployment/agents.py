"""Asks the agents in the engine's ranks what their buffers did."""

import httpx

from ep_backend.deployment.rank_status import RankStatus
from ep_backend.deployment.state import InstanceState, RunState

TIMEOUT_S = 30.0  # an agent answers on its own, so this is the time that a crowded machine may take to run it


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
        response = httpx.get(f"{agent}/status", headers=headers, timeout=TIMEOUT_S, trust_env=False)
        return status_in(response, agent)
    except (httpx.HTTPError, ValueError) as error:
        return RankStatus(agent=agent, role=instance.role, error=f"{type(error).__name__}: {error}")
