"""What a running deployment writes about itself, and where."""

import os
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ep_backend.deployment.schema import RoleName

Phase = Literal["starting", "ready", "stopping", "failed"]


class InstanceState(BaseModel):
    """One process group of the deployment: a launch of an engine, or the router."""

    name: str
    role: RoleName | None
    log: Path
    agents: list[str] = []
    url: str | None = None
    pid: int = 0
    started_at: float = 0.0
    ready_after_s: float | None = None

    @property
    def starting_s(self) -> float | None:
        """Seconds that a launch with an address has not served for yet; None once it does."""
        return seconds_since(self.started_at) if self.url and self.ready_after_s is None else None


class RunState(BaseModel):
    model_config = ConfigDict(validate_assignment=True)

    name: str
    pid: int
    start_ticks: int
    phase: Phase = "starting"
    started_at: float
    url: str
    served_name: str
    key: str | None = None
    control_url: str | None = None
    instances: list[InstanceState] = []
    error: str | None = None

    def of(self, role: RoleName) -> list[InstanceState]:
        return [instance for instance in self.instances if instance.role == role]


def run_dir(name: str) -> Path:
    """Settings, logs and state of one deployment, below the current folder."""
    return Path.cwd() / ".ep" / "run" / name


def state_file(name: str) -> Path:
    return run_dir(name) / "state.json"


def write_state(state: RunState) -> None:
    """Atomic, for others read it at any moment; private, for it may hold the control key."""
    file = state_file(state.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".tmp")
    draft.touch(mode=0o600)
    draft.write_text(state.model_dump_json(indent=2))
    os.replace(draft, file)


def read_state(name: str) -> RunState | None:
    try:
        return RunState.model_validate_json(state_file(name).read_text())
    except FileNotFoundError:
        return None


def remove_state(name: str) -> None:
    state_file(name).unlink(missing_ok=True)


def seconds_since(moment: float) -> float:
    return time.time() - moment
