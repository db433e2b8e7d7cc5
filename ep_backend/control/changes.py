"""What differs between two deployments, and what it takes to get from one to the other."""

from typing import Any

from ep_backend.control.models import Action, Change
from ep_backend.deployment import changes as classes
from ep_backend.deployment.schema import Deployment, ModeName, RoleName
from ep_backend.deployment.spelling import visible


def changes(old: Deployment, new: Deployment, started: classes.Started) -> list[Change]:
    """Every value that differs and that something running depends on, with the least that applies it."""
    return [
        Change(
            place=".".join(change.place),
            role=change.role,
            old=_shown(change.old),
            new=_shown(change.new),
            action=_action(change),
        )
        for change in classes.changes(old, new, started)
        if change.role is not None or change.kind == "redeploy"
    ]


def mode_of(deployment: Deployment, role: RoleName) -> ModeName:
    return dict(deployment.roles.items())[role].ep.mode


def with_mode(deployment: Deployment, role: RoleName, mode: ModeName) -> Deployment:
    document = deployment.model_dump()
    document["roles"][role]["ep"]["mode"] = mode
    return Deployment.model_validate(document)


def _action(change: classes.Change) -> Action:
    """A flip drains where graphs hold the mode."""
    return "flip" if change.kind == "hot" or change.kind == "drain" else change.kind


def _shown(value: Any) -> str:
    return "none" if value is None else visible(str(value))
