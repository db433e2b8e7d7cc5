"""What a running deployment writes about itself, and where."""

import os
import re
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from ep_backend.deployment.problems import DeploymentError
from ep_backend.deployment.schema import PATTERNS, STOP_TIMEOUT_S, RoleName
from ep_backend.deployment.spelling import in_yaml
from ep_backend.values import NAME

Phase = Literal["starting", "ready", "stopping", "failed"]


class InstanceState(BaseModel):
    """One process group of the deployment: a launch of an engine, or the router."""

    name: str
    role: RoleName | None
    log: Path
    agents: list[str] = []
    url: str | None = None
    pid: PositiveInt
    start_ticks: int
    """Of that process; where another one has its number by now, the launch is gone."""
    started_at: float = 0.0
    ready_after_s: float | None = None

    @property
    def starting_s(self) -> float | None:
        """Seconds that a launch with an address has not served for yet; None once it does."""
        return seconds_since(self.started_at) if self.url and self.ready_after_s is None else None


class RunState(BaseModel):
    model_config = ConfigDict(validate_assignment=True)

    name: str
    pid: PositiveInt
    start_ticks: int
    phase: Phase = "starting"
    started_at: float
    url: str
    served_name: str
    key: str | None = None
    stop_timeout_s: float = STOP_TIMEOUT_S
    control_url: str | None = None
    instances: list[InstanceState] = []
    error: str | None = None

    def of(self, role: RoleName) -> list[InstanceState]:
        return [instance for instance in self.instances if instance.role == role]


class StateUnreadable(DeploymentError):
    """What lies where the state belongs is none."""


def run_dir(name: str) -> Path:
    """Settings, logs and state of one deployment, below the current folder. DeploymentError if none may have that name, or
    there is no such folder any more."""
    if not re.fullmatch(NAME, name):
        raise DeploymentError([f"name is {in_yaml(name)}, must be {PATTERNS[NAME]}; choose such a name"])
    try:
        return Path.cwd() / ".ep" / "run" / name
    except FileNotFoundError:
        raise DeploymentError(["the current folder was removed; go to the one where the deployment was started"]) from None


def state_file(name: str) -> Path:
    return run_dir(name) / "state.json"


def write_state(state: RunState) -> None:
    """Atomic, for others read it at any moment; private, for it may hold the control key. DeploymentError if it cannot be."""
    file = state_file(state.name)
    draft = file.with_suffix(".tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.touch(mode=0o600)
        draft.write_text(state.model_dump_json(indent=2))
        os.replace(draft, file)
    except OSError as error:
        raise unusable(file, error) from None


def read_state(name: str) -> RunState | None:
    """None where there is no state. Raises StateUnreadable, or DeploymentError where the file cannot be read at all."""
    file = state_file(name)
    try:
        return RunState.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = ".".join(map(str, first["loc"])) or "it"
        raise StateUnreadable(
            [f"{file} is no state of a deployment ({what}: {first['msg']}); `ep-backend down FILE` cleans up"]
        ) from None
    except OSError as error:
        raise unusable(file, error) from None


def unusable(file: Path, error: OSError) -> DeploymentError:
    """Why a file below `.ep` cannot be used, and what to do."""
    blocking = next((parent for parent in file.parents if os.path.exists(parent) and not os.path.isdir(parent)), None)
    if blocking is not None:
        return DeploymentError([f"{blocking} is a file, must be a folder; move it away"])
    fix = "do this as the user who started it" if isinstance(error, PermissionError) else "see to it"
    return DeploymentError([f"{file} cannot be used: {error.strerror}; {fix}"])


def remove_state(name: str) -> None:
    state_file(name).unlink(missing_ok=True)


def seconds_since(moment: float) -> float:
    return time.time() - moment
