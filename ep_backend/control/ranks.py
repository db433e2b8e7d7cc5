"""Talks to the agents of a role: always to every rank, and what one rank cannot do fails for all.

Agents serve either engine. SGLang's own /set_internal_state reaches every rank as well, but answers with one boolean a group
of ranks and no reason, and does not answer while a scheduler is stuck, which is when one wants to know.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from ep_backend.agent import SILENT_S
from ep_backend.deployment.agents import TIMEOUT_S, status_in
from ep_backend.deployment.rank_status import RankStatus
from ep_backend.deployment.schema import RoleName


class RankFailed(Exception):
    """A rank did not do what all must do. ``refused``: it answered, and said no."""

    def __init__(self, lines: Sequence[str], refused: bool) -> None:
        super().__init__("; ".join(lines))
        self.refused = refused


class Ranks:
    """The agents of one role, in rank order."""

    def __init__(self, role: RoleName, agents: Sequence[str], key: str | None, http: httpx.AsyncClient) -> None:
        self.role = role
        self.agents = agents
        self._http = http
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def statuses(self) -> list[RankStatus]:
        """One answer a rank; of a rank without one, the reason."""
        return list(await asyncio.gather(*map(self._status, self.agents)))

    async def healthy(self) -> list[RankStatus]:
        """The ranks' answers; RankFailed if there are none, or one is missing, failed, or of another instance."""
        statuses = await self.statuses()
        faults = [f"{self._name(rank)} {fault}" for rank, status in enumerate(statuses) if (fault := _fault(status, rank))]
        if not statuses:
            faults = [f"{self.role} has no agents"]
        elif not faults and statuses[0].world_size != len(statuses):
            faults = [f"{self.role} has {statuses[0].world_size} ranks, but {len(statuses)} agents are known"]
        if faults:
            raise RankFailed(faults, refused=False)
        return statuses

    async def check(self, mode: str) -> None:
        """Ask every rank whether it could run the mode; RankFailed says which cannot."""
        await self._post("/flip/check", {"mode": mode})

    async def prepare(self, token: int, mode: str) -> None:
        """Propose on every rank. RankFailed if one does not; then the others may have proposed."""
        await self._post("/flip/prepare", {"token": token, "mode": mode})

    async def abandon(self, token: int) -> None:
        """Withdraw on every rank; RankFailed names those that did not answer."""
        await self._post("/flip/abandon", {"token": token})

    async def _post(self, route: str, body: dict[str, Any]) -> None:
        # An agent answers for its rank at the latest when that has been silent for too long.
        limit = SILENT_S + TIMEOUT_S
        asked = (self._http.post(f"{agent}{route}", json=body, headers=self._headers, timeout=limit) for agent in self.agents)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        faults, refused = [], False
        for rank, answer in enumerate(answers):
            if isinstance(answer, httpx.HTTPError):
                faults.append(f"{self._name(rank)} does not answer ({_reason(answer)})")
            elif isinstance(answer, BaseException):
                raise answer
            elif answer.status_code != 200:
                refused = refused or answer.status_code in (409, 422)
                said = "refuses" if answer.status_code in (409, 422) else "does not answer"
                faults.append(f"{self._name(rank)} {said}: {_detail(answer)}")
        if faults:
            raise RankFailed(faults, refused)

    async def _status(self, agent: str) -> RankStatus:
        try:
            response = await self._http.get(f"{agent}/status", headers=self._headers)
            return status_in(response, agent)
        except (httpx.HTTPError, ValueError) as error:
            return RankStatus(agent=agent, role=self.role, error=_reason(error))

    def _name(self, rank: int) -> str:
        return f"{self.role} rank {rank} ({self.agents[rank]})"


def _fault(status: RankStatus, rank: int) -> str | None:
    if status.error is not None:
        return f"does not answer ({status.error})"
    if status.rank != rank:
        return f"answers as rank {status.rank}"
    if status.failed is not None:
        return f"has a failed buffer: {status.failed}"
    return silence(status)


def silence(status: RankStatus) -> str | None:
    """Set when a rank has been silent for so long that it will not take part in anything."""
    if status.silent_s <= SILENT_S:
        return None
    return f"has been silent for {status.silent_s:.0f} s: its process {status.pid} is stopped, or gets no processor time"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"
