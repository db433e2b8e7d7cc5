"""What the control service answers."""

from typing import Literal

from pydantic import BaseModel, Field

from ep_backend.deployment.engines.traits import Engine
from ep_backend.deployment.rank_status import RankStatus
from ep_backend.deployment.schema import ModeName, RoleName
from ep_backend.deployment.state import InstanceState, Phase

Action = Literal["flip", "restart", "redeploy"]


class Change(BaseModel):
    """One difference between what runs and what is wanted."""

    place: str = Field(description="dotted, as in the file")
    role: RoleName | None = None
    old: str
    new: str
    action: Action = Field(description="flip: at run time; restart: of the role; redeploy: down and up")

    def __str__(self) -> str:
        return f"{self.place}: {self.old} -> {self.new} ({self.action})"


class Pending(BaseModel):
    mode: ModeName
    token: int


class RoleStatus(BaseModel):
    role: RoleName
    engine: Engine
    mode_desired: ModeName
    mode_executed: str | None = Field(description="of the last dispatch; null before the first, or where ranks differ")
    allowed: list[str] = Field(description="modes that a flip can reach without a restart")
    pending: Pending | None = None
    drift: list[str] = Field(default=[], description="ranks that differ from the mode desired, and how")
    ranks: list[RankStatus]


class DeploymentStatus(BaseModel):
    name: str
    phase: Phase
    url: str = Field(description="where clients send requests")
    file: str
    drift: list[Change] = Field(description="what the file says now, and what runs")
    file_error: str | None = Field(default=None, description="why the file cannot be compared")
    roles: list[RoleStatus]
    instances: list[InstanceState]

    @property
    def starting(self) -> set[RoleName]:
        """Roles that do not serve yet: their ranks cannot answer."""
        return {i.role for i in self.instances if i.role is not None and i.starting_s is not None}


class FlipResult(BaseModel):
    """How a change of mode ended. ``epoch`` is the dispatch after which every rank changed."""

    role: RoleName
    before: ModeName
    mode: ModeName
    outcome: Literal["applied", "would apply", "unchanged"]
    epoch: int | None = None
    ranks: int
    seconds: float = 0.0


class Applied(BaseModel):
    """What a whole file changed."""

    changes: list[Change]
    dry_run: bool
    flips: list[FlipResult] = []
    restarted: list[RoleName] = []


class Answer(BaseModel):
    answer: str


class AuditEntry(BaseModel):
    time: str
    client: str
    action: str
    what: str
    outcome: str
