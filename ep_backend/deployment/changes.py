"""What differs between two deployments, and what it takes to get from one to the other."""

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

from ep_backend.deployment.batches import eager
from ep_backend.deployment.resolve import group_of
from ep_backend.deployment.schema import Deployment, ModeName, Role, RoleName, modes_of, serves_both_families

Kind = Literal["hot", "drain", "restart", "redeploy"]
SECRET = re.compile(r"(^|[_-])(key|token|secret|password)$", re.IGNORECASE)
HIDDEN = "***"
Started = Mapping[RoleName, ModeName]
"""The mode that each role was started with. Its buffer and experts are of that mode's family, whatever it was flipped to."""
DECODE = {mode.value for mode in modes_of("decode", "auto")}


@dataclass(frozen=True)
class Change:
    """One value that differs. hot: while it serves; drain: between requests; restart: of the role; redeploy: of all."""

    place: tuple[str, ...]
    role: RoleName | None
    old: Any
    new: Any
    kind: Kind
    why: str


# The first pattern that fits a place decides; the mode of a role is decided by `_mode_change`.
CLASSES: tuple[tuple[str, Kind, str], ...] = (
    ("model.routing*", "hot", "only plan and lint read it"),
    ("topology.calibration", "hot", "only plan reads it"),
    ("topology.bench", "hot", "only plan reads it"),
    ("topology.*_gbs", "hot", "only plan reads it"),
    ("topology.nic.devices", "restart", "NVSHMEM takes its NIC at start"),
    ("topology.nic*", "hot", "only plan and lint read it"),
    ("topology.hbm", "hot", "only plan and lint read it"),
    ("topology.sms", "hot", "only plan and lint read it"),
    ("topology.gpu", "hot", "only plan and lint read it"),
    ("target.*_timeout_s", "hot", "the next restart of a role takes it"),
    ("control.flip_timeout_s", "hot", "`flip` reads it itself"),
    ("roles.*.ep.max_tokens", "restart", "slots are allocated once, and graphs hold their addresses"),
    ("roles.*.ep.lanes", "restart", "lanes are allocated once"),
    ("roles.*.ep.redundant_experts", "restart", "every rank's local experts and slots change"),
    ("roles.*.ep.fp8", "restart", "records and slots have the size of the payload"),
    ("roles.*.ep.layout", "restart", "the engine builds its experts for it"),
    ("roles.*.ep.overlap", "restart", "the engine builds its micro-batches at start"),
    ("roles.*.ep.gpus_per_node", "restart", "the buffer's layout depends on the domains"),
    ("roles.*.ep.*", "restart", "the buffer is made with it"),
    ("roles.prefill.engine", "redeploy", "both roles and their router are of one engine"),
    ("roles.decode.engine", "redeploy", "both roles and their router are of one engine"),
    ("roles.*.data_parallel", "restart", "the EP group changes size"),
    ("roles.*.nodes", "restart", "the EP group changes its machines"),
    ("roles.*.args*", "restart", "the engine reads its flags at start"),
    ("roles.*.env*", "restart", "a process keeps the environment it was started with"),
    ("roles.*", "restart", "the role's processes are others"),
    ("model.*", "restart", "the engines load the model at start"),
    ("topology.*", "restart", "ranks lie on other machines"),
    ("router.*", "restart", "the router listens at its address from its start"),
    ("control.*", "restart", "agents and service listen from their start"),
    ("target.*", "restart", "the manifests change"),
    ("name", "restart", "it is another deployment"),
)


def changes(old: Deployment, new: Deployment, started: Started | None = None) -> list[Change]:
    """Every value that differs, with the least that applies it. Keys and the like differ, but are not shown.

    `started`: where roles of the old one run and were flipped since; else they are as it says.
    """
    differing = _differences(old.model_dump(mode="json"), new.model_dump(mode="json"))
    started = started or {name: role.ep.mode for name, role in old.roles.items()}
    return [_change(old, new, place, was, becomes, started) for place, was, becomes in differing]


def reachable(deployment: Deployment, name: RoleName, started: ModeName) -> list[str]:
    """The modes that a role reaches without a restart: those of its buffer, and auto where that means the same ones."""
    role = dict(deployment.roles.items())[name]
    several = group_of(deployment, role).nodes > 1
    modes = modes_of(name, started, several, role.engine, role.ep.rail)
    auto = modes_of(name, "auto", several, role.engine, role.ep.rail)
    return [*(mode.value for mode in modes), *(["auto"] if auto == modes else [])]


def _change(old: Deployment, new: Deployment, place: tuple[str, ...], was: Any, becomes: Any, started: Started) -> Change:
    before, after = dict(old.roles.items()), dict(new.roles.items())
    if SECRET.search(place[-1]):
        was, becomes = (value and HIDDEN for value in (was, becomes))
    name = next((name for name in before if place[:2] == ("roles", name) and name in after), None)
    if name is not None and place[2:] == ("ep", "mode"):
        kind, why = _mode_change(old, name, before[name], becomes, started[name])
    else:
        path = ".".join(place)
        kind, why = next((kind, why) for pattern, kind, why in CLASSES if fnmatch(path, pattern))
        if name is None and kind == "restart":
            kind = "redeploy"
    return Change(place, name, was, becomes, kind, why)


def _mode_change(deployment: Deployment, name: RoleName, role: Role, mode: str, started: ModeName) -> tuple[Kind, str]:
    if mode not in reachable(deployment, name, started):
        return "restart", "the buffer was not made for it, or it gives the experts another layout"
    touched = {role.ep.mode, mode} if serves_both_families(name, role.engine) else {started}
    if captures(deployment, name, role, touched):
        if not role.traits.recaptures:
            return "restart", f"captured graphs replay their mode, and {role.engine} cannot capture anew while it runs"
        return "drain", "captured graphs replay their mode: pause, drop them, capture again, resume"
    return "hot", "the buffer serves both, and all ranks change at the same dispatch"


def captures(deployment: Deployment, name: RoleName, role: Role, modes: AbstractSet[str]) -> bool:
    """Do graphs hold one of these modes? Both engines run prefill's all-to-all outside graphs."""
    decodes = name == "decode" or (name == "unified" and not DECODE.isdisjoint(modes))
    return decodes and deployment.topology.device == "cuda" and not eager(role)


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], place: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    for key in dict.fromkeys([*old, *new]):
        was, becomes = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(becomes, dict):
            yield from _differences(was, becomes, (*place, key))
        elif was != becomes:
            yield (*place, key), was, becomes
