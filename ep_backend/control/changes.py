"""What differs between two deployments, and what it takes to get from one to the other."""

from collections.abc import Iterator, Mapping
from typing import Any

from ep_backend.control.models import Action, Change
from ep_backend.deployment.schema import Deployment, ModeName, RoleName, modes_of

# Read by `down` and `flip` themselves: nothing that runs depends on it.
IDLE_KEYS = ("target",)


def changes(old: Deployment, new: Deployment) -> list[Change]:
    """Every value that differs, with the least that applies it."""
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    return [
        _change(old, place, was, becomes)
        for place, was, becomes in _differences(before, after)
        if place[0] not in IDLE_KEYS
    ]


def mode_of(deployment: Deployment, role: RoleName) -> ModeName:
    return dict(deployment.roles.items())[role].ep.mode


def with_mode(deployment: Deployment, role: RoleName, mode: ModeName) -> Deployment:
    document = deployment.model_dump()
    document["roles"][role]["ep"]["mode"] = mode
    return Deployment.model_validate(document)


def reachable(deployment: Deployment, role: RoleName) -> list[str]:
    """The modes that a flip of the role can reach: its family's, and auto where that means the same family."""
    modes = modes_of(role, mode_of(deployment, role))
    return [*(mode.value for mode in modes), *(["auto"] if modes_of(role, "auto") == modes else [])]


def _change(old: Deployment, place: tuple[str, ...], was: Any, becomes: Any) -> Change:
    action: Action = "redeploy"
    role: RoleName | None = None
    if place[0] == "roles" and was is not None and becomes is not None and len(place) > 2:
        name = next(name for name, _ in old.roles.items() if name == place[1])
        hot = place[2:] == ("ep", "mode") and becomes in reachable(old, name)
        role, action = name, "flip" if hot else "restart"
    return Change(place=".".join(place), role=role, old=_shown(was), new=_shown(becomes), action=action)


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], place: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    for key in dict.fromkeys([*old, *new]):
        was, becomes = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(becomes, dict):
            yield from _differences(was, becomes, (*place, key))
        elif was != becomes:
            yield (*place, key), was, becomes


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
