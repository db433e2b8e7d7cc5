"""Rules on engine flags, environment variables and package versions."""

import re
from collections.abc import Iterable, Iterator

from pydantic import JsonValue

from ep_backend.deployment.engines import NVSHMEM_BUILT, SUPPORTED, installed, number, replaced, table
from ep_backend.deployment.engines.extract import Table
from ep_backend.deployment.engines.traits import FRACTION_FLAGS
from ep_backend.deployment.engines.values import SWITCH, TEXT
from ep_backend.deployment.flags import TRANSFER, further_transfer
from ep_backend.deployment.lint.values import refused, refused_inside
from ep_backend.deployment.lint.view import RoleView, problem
from ep_backend.deployment.problems import Problem
from ep_backend.deployment.schema import decimal, whole_number
from ep_backend.deployment.spelling import in_yaml
from ep_backend.errors import did_you_mean
from ep_backend.settings import SETTINGS_VARIABLE

# Flags that this file's own keys decide.
OWNED_FLAGS = {
    "all2all-backend": "ep",
    "enable-expert-parallel": "ep",
    "enable-dbo": "ep.overlap",
    "data-parallel-size": "data_parallel",
    "data-parallel-size-local": "nodes",
    "data-parallel-start-rank": "nodes",
    "data-parallel-address": "nodes",
    "data-parallel-rpc-port": "nodes",
    "headless": "nodes",
    "kv-transfer-config": "roles",
    "model": "model.path",
    "served-model-name": "model.served_name",
    "host": "router.host",
    "port": "router.port",
    # SGLang's
    "moe-a2a-backend": "ep",
    "deepep-mode": "ep.mode",
    "deepep-config": "ep.sms",
    "enable-two-batch-overlap": "ep.overlap",
    "attn-dp-size": "data_parallel",
    "dp-size": "data_parallel",
    "nnodes": "nodes",
    "node-rank": "nodes",
    "dist-init-addr": "nodes",
    "disaggregation-mode": "roles",
    "disaggregation-bootstrap-port": "roles",
    "device": "topology.device",
    "model-path": "model.path",
}
OTHER_WAYS = {
    "uds": "at a socket in a folder, not at its port",
    "ssl-certfile": "by HTTPS only",
    "ssl-keyfile": "by HTTPS only",
    "grpc": "by gRPC only",
    "grpc-mode": "by gRPC only",
    "smg-grpc-mode": "by gRPC only",
}
OWNED_ENV = (SETTINGS_VARIABLE, "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")
# Variables with these prefixes have a complete list of names; others are not judged.
OUR_ENV = (
    *(SETTINGS_VARIABLE, "EP_BACKEND_FAULT", "EP_CUDA"),
    *("EP_BACKEND_ALLOW_UNTESTED_VLLM", "EP_BACKEND_ALLOW_UNTESTED_SGLANG"),
)
OTHER_BACKENDS = re.compile(
    r"SGLANG_(DEEPEP|MORI|NIXL|PPLX)_|VLLM_DEEPEP_|DEEPEP_|EP_(JIT|NUM|DISABLE_GIN|NIC|OVERRIDE|REUSE|BUFFER)_?"
)
MOST_NAMES = 6
# Flags that the rules and the plan count with, of which no engine takes less than one.
COUNTS = ("tensor-parallel-size", "tp-size", "tp", "max-num-seqs", "max-num-batched-tokens", "max-running-requests")
NVSHMEM_PACKAGES = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")


def check_owned(view: RoleView) -> Iterator[Problem]:
    """Keys that the file itself decides, also where they are short for the flag, or turn it off."""
    known = table(view.role.engine, engine_version(view)).flags
    for key, value in view.role.args.items():
        if view.name != "unified" and _flag(key) == TRANSFER and isinstance(value, dict) and further_transfer(value) == value:
            continue
        if owner := OWNED_FLAGS.get(_switch(_written_out(key, known))):
            place = (*view.place, "args", key)
            yield problem("EP304", place, f"`{owner}` of this file decides that flag", "remove it here")
    for key in view.role.env:
        if key in OWNED_ENV:
            yield problem("EP305", (*view.place, "env", key), "`up` sets that variable itself", "remove it here")


def check_reachable(view: RoleView) -> Iterator[Problem]:
    """Router, probes, `up` and the control service ask an engine by plain HTTP at the port that it is given."""
    for key, value in view.role.args.items():
        place = (*view.place, "args", key)
        if _flag(key) in OTHER_WAYS and value not in (None, False):
            yield problem("EP315", place, f"lets the engine answer {OTHER_WAYS[_flag(key)]}", "remove it")
    if view.deployment.target.kind != "local":
        return
    keys = [("args", key) for key in view.role.args if _flag(key) == "api-key"]
    keys += [("env", key) for key in view.role.env if key == "VLLM_API_KEY"]
    for where in keys:
        what, fix = "is a key that neither `ask` nor `flip` has", "let what stands before the router ask"
        yield problem("EP316", (*view.place, *where), what, fix)


def check_values(view: RoleView) -> Iterator[Problem]:
    """Values that the flag's own parser refuses. Choices only of the very version: others may have more or fewer."""
    known, version = table(view.role.engine, engine_version(view)), engine_version(view)
    spelt: dict[str, str] = {}
    for key, value in view.role.args.items():
        flag = _flag(key)
        if "." not in key and (before := spelt.setdefault(_switch(key), key)) != key:
            yield problem("EP300", (*view.place, "args", key), f"is {before} again, in another spelling", "keep one of them")
        takes = None if "." in key else known.flags.get(flag)
        if flag in known.inside:
            yield from _values_inside(view, known, key, exact=version in (None, known.version))
        if flag in COUNTS and (count := whole_number(value)) is not None and count < 1:
            what = f"is {in_yaml(value)}, must be at least 1"
            yield problem("EP309", (*view.place, "args", key), what, "write 1 or more, or leave it out")
            continue
        if flag in OWNED_FLAGS or flag not in known.flags or _value_gone(known, flag, value):
            continue
        if isinstance(takes, list) and version not in (None, known.version):
            takes = TEXT
        if flag in FRACTION_FLAGS and (share := decimal(value)) is not None and not 0 < share <= 1:
            what = f"is {in_yaml(value)}, must be a share of the GPU's memory, above 0 and at most 1"
            yield problem("EP309", (*view.place, "args", key), what, "write one such as 0.85")
        elif fault := refused(takes, value):
            kind, fix = fault
            what = f"is {in_yaml(value)}, but {_name(known)} takes {kind}"
            yield problem("EP309", (*view.place, "args", key), what, fix)


def _values_inside(view: RoleView, known: Table, key: str, *, exact: bool) -> Iterator[Problem]:
    """Of a flag that takes JSON. Without its keys it is no JSON, or JSON of something else."""
    value, inside = view.role.args[key], known.inside[_flag(key)]
    for place, path, given in _pairs(view, key):
        takes = inside.get(_field(key, path[0])) if len(path) == 1 else None
        if fault := refused_inside(takes if exact or not isinstance(takes, list) else TEXT, given):
            kind, fix = fault
            yield problem("EP309", place, f"is {in_yaml(given)}, but {_name(known)} takes {kind}", fix)
    if "." not in key and isinstance(value, (str, list)) and not str(value).isdigit():
        what = f"is {in_yaml(value)}, but {_name(known)} takes JSON with keys"
        fix = f"write a mapping, such as {{{next(iter(inside))}: ...}}"
        yield problem("EP309", (*view.place, "args", key), what, fix)


def _keys_inside(view: RoleView, known: Table, key: str) -> Iterator[Problem]:
    """Keys of a JSON flag that the engine's class does not have, each of which ends its start."""
    inside = known.inside[_flag(key)]
    for place, (inner, *_), _ in _pairs(view, key):
        if _field(key, inner) not in inside:
            what = f"{f'has no key {inner}' if '.' in key else f'is no key of {_flag(key)}'} in {_name(known)}"
            yield problem("EP314", place, what, _suggest(inner, inside, "remove it"))


def _field(key: str, inner: str) -> str:
    """The name in the class; only of the speculative configuration vLLM takes dashes for underscores."""
    return inner.replace("-", "_") if _flag(key) == "speculative-config" else inner


def _pairs(view: RoleView, key: str) -> Iterator[tuple[tuple[str, ...], list[str], JsonValue]]:
    """Place, path and value of each key of a JSON flag, also of the one after a dot."""
    value, place, (_, *path) = view.role.args[key], (*view.place, "args", key), key.split(".")
    if path:
        yield place, path, value
    elif isinstance(value, dict):
        for inner, given in value.items():
            yield (*place, inner), [inner], given


def check_flags(view: RoleView) -> Iterator[Problem]:
    engine = view.role.engine
    known, old = table(engine, engine_version(view)), replaced(engine)["flags"]
    flags = set(known.flags)
    for key, value in view.role.args.items():
        flag, place = _flag(key), (*view.place, "args", key)
        if flag in known.inside:
            yield from _keys_inside(view, known, key)
        if flag in OWNED_FLAGS or flag in flags:
            if value is False and known.flags.get(flag) in (SWITCH, None) and flag in flags and f"no-{flag}" not in flags:
                what = f"is false, and {_name(known)} has no --no-{flag}"
                yield problem("EP308", place, what, "leave it out: it is off unless it is given")
            if gone := _value_gone(known, flag, value):
                yield problem("EP302", place, f"is {in_yaml(value)}, which is gone from {_name(known)}", f"write {gone}")
            continue
        longer = _longer(flag, flags)
        if flag in old:
            yield problem("EP302", place, f"is gone from {_name(known)}", f"write {old[flag]}")
        elif len(longer) > 1:
            yield problem("EP303", place, f"fits {_some(longer)} of {_name(known)}", "write one of them")
        elif longer and _switch(longer[0]) not in OWNED_FLAGS:
            yield problem("EP307", place, f"is short for {longer[0]}", f"write {longer[0]}")
        elif not longer:
            yield problem("EP301", place, f"is no flag of {_name(known)}", _suggest(flag, flags, "remove it"))


def _value_gone(known: Table, flag: str, value: JsonValue) -> str | None:
    """What to write where this version does not take the value any more."""
    since, _, instead = replaced(known.name).get("values", {}).get(f"{flag}={value}", "").partition(": ")
    return instead if instead and number(known.version) >= number(since) else None


def check_env(view: RoleView) -> Iterator[Problem]:
    engine, traits = view.role.engine, view.role.traits
    known = table(engine, engine_version(view))
    old = replaced(engine)["env"]
    lists = {
        "EP_": set(OUR_ENV),
        "NVSHMEM_": set(table("nvshmem", None).env),
        traits.variables: set(known.env),
    }
    for key in view.role.env:
        place = (*view.place, "env", key)
        names = next((names for prefix, names in lists.items() if key.startswith(prefix)), None)
        if key == "NVSHMEM_MAX_TEAMS":
            yield problem("EP322", place, "is set", "remove it")
        elif OTHER_BACKENDS.match(key):
            yield problem("EP323", place, "is read by another all-to-all backend only", "remove it; see `ep`")
        elif key in old and key not in known.env:
            yield problem("EP321", place, f"is not read by {_name(known)}", f"write {old[key]}")
        elif names is not None and key not in names and key not in OWNED_ENV:
            fix = _suggest(key, names, "")
            # Where the engine reads others than those, only a near miss is a mistake.
            if fix or traits.registers_variables or not key.startswith(traits.variables):
                yield problem("EP320", place, "is read by nothing here", fix or "remove it")


def check_versions(view: RoleView) -> Iterator[Problem]:
    engine, packages = view.role.engine, packages_of(view)
    place = _packages_place(view)
    version = packages.get(engine)
    if version is not None:
        first, beyond = SUPPORTED[engine]
        if not number(first) <= number(version) < number(beyond):
            yield problem("EP313", place, f"has {engine} {version}", f"use {first} or later, below {beyond}")
        pin, torch = table(engine, version).torch, packages.get("torch")
        # Builds for a CPU have pins of their own.
        exact = table(engine, version).version == version and view.deployment.topology.device == "cuda"
        if exact and pin and torch and number(torch) != number(pin):
            yield problem("EP311", place, f"has torch {torch}, but {engine} {version} pins {pin}", f"install torch {pin}")
    loaded = next((packages[name] for name in NVSHMEM_PACKAGES if name in packages), None)
    if loaded is not None and view.deployment.topology.device == "cuda" and number(loaded) != number(NVSHMEM_BUILT):
        what = f"has NVSHMEM {loaded}, but the device images are built against {NVSHMEM_BUILT}"
        yield problem("EP312", place, what, f"install {NVSHMEM_BUILT}, which torch pins")


def check_one_environment(views: list[RoleView]) -> Iterator[Problem]:
    """Roles of different engines, or packages of both, in one environment."""
    for view in views:
        if {"vllm", "sglang"} <= set(view.image.packages):
            yield problem("EP310", _packages_place(view), "has vllm and sglang", "give each role its own image")
            return
    if len(views) == 2 and views[0].role.engine != views[1].role.engine and views[0].image == views[1].image:
        place = (*views[1].place, "engine")
        yield problem(
            "EP310", place, f"is {views[1].role.engine}, in the environment of {views[0].role.engine}", "give it its image"
        )


def engine_version(view: RoleView) -> str | None:
    return packages_of(view).get(view.role.engine)


def packages_of(view: RoleView) -> dict[str, str]:
    """Versions in the role's image; those installed here for a local target that names none."""
    if view.image.packages or view.deployment.target.kind != "local":
        return view.image.packages
    names = (view.role.engine, "torch", *NVSHMEM_PACKAGES)
    return {name: version for name in names if (version := installed(name))}


def _packages_place(view: RoleView) -> tuple[str, ...]:
    return (*view.place, "image", "packages") if view.role.image else ("target", "image", "packages")


def _name(known: Table) -> str:
    return f"{known.name} {known.version}"


def _flag(key: str) -> str:
    """A flag's name without dashes before it, and without the JSON path after a dot."""
    return key.replace("_", "-").lstrip("-").split(".")[0]


def _switch(key: str) -> str:
    """The flag that this one turns off, or itself."""
    return _flag(key).removeprefix("no-")


def _written_out(key: str, flags: Iterable[str]) -> str:
    """The flag that the engine's parser takes it for."""
    longer = _longer(_flag(key), flags)
    return longer[0] if len(longer) == 1 else _flag(key)


def _longer(flag: str, flags: Iterable[str]) -> list[str]:
    """The flags that it may be short for, itself among them."""
    return sorted(name for name in flags if flag and name.startswith(flag))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"


def _suggest(name: str, known: Iterable[str], otherwise: str) -> str:
    return did_you_mean(name, known, otherwise, cutoff=0.75)
