"""What lint refuses in a migrated document, taken out or put right, with lint's own words as the reason."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from ep_backend.deployment.document import Place
from ep_backend.deployment.lint import lint
from ep_backend.deployment.migrate.notes import Note, Unmovable
from ep_backend.deployment.problems import Problem
from ep_backend.deployment.schema import Deployment

# Keys of args or env that the engine's version does not take, or that this file decides.
REMOVED = {"EP212", "EP301", "EP302", "EP303", "EP304", "EP305", "EP308", "EP314", "EP320", "EP321", "EP322", "EP323"}
MODES = {"EP201", "EP202", "EP203", "EP204"}
SHM, GPUS = "64GiB", 8


def checked(document: dict[str, Any]) -> Deployment:
    """The deployment that the document describes. Raises Unmovable."""
    try:
        return Deployment.model_validate(document)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise Unmovable(
            f"{place} would be {fault['input']!r}: {fault['msg'].lower()}; correct the command, or give another"
        ) from None


def repaired(document: dict[str, Any]) -> Iterator[Note]:
    """Changes the document until lint finds nothing more that is repaired here. Each round repairs, so there is an end."""
    while found := list(filter(_repairable, lint(checked(document)))):
        done: list[Place] = []
        for problem in found:
            # What lint says of a place that was just changed, or of what is in it or around it, may no longer hold.
            if not any(problem.place[: len(place)] == place[: len(problem.place)] for place in done):
                yield _repair(document, problem)
                done.append(problem.place)


def _repairable(problem: Problem) -> bool:
    deep = len(problem.place) > 3
    return (
        (problem.code in REMOVED | {"EP307"} and deep)
        or (problem.code in MODES and problem.place[-1] == "mode")
        or problem.code in ("EP401", "EP402", "EP403")
    )


def _repair(document: dict[str, Any], problem: Problem) -> Note:
    code, place = problem.code, [str(part) for part in problem.place]
    if place[0] == "target":
        pod = document["target"].setdefault("pod", {})
        if code == "EP401":
            pod["shm"], became = SHM, f"shm: {SHM}"
        elif code == "EP402":
            pod["capabilities"], became = [*pod.get("capabilities", []), "IPC_LOCK"], "capabilities: IPC_LOCK"
        else:
            per_node = document["topology"].get("gpus_per_node", GPUS)
            name = next(iter(pod.get("rdma", {})), "rdma/ib")
            pod["rdma"], became = {name: per_node}, f"rdma: {name}: {per_node}"
        why = f"{problem.what}{'; check what your cluster calls it' if code == 'EP403' else ''}"
        return Note("added", "all", "target.pod", became, why)
    _, role, part, key = place[:4]
    held = document["roles"][role][part]
    if code in MODES:
        mode, held["mode"] = held["mode"], "auto"
        return Note("changed", role, f"mode {mode}", "ep.mode: auto", problem.what)
    for inner in place[4:]:  # of a flag that takes JSON
        held, key = held[key], inner
    value = held.pop(key)
    name = ".".join(place[3:])
    spelt = f"{name}={value}" if part == "env" else f"--{name} {'' if value is True else value}".strip()
    if code == "EP307":
        whole = problem.what.removeprefix("is short for ")
        held[whole] = value
        return Note("changed", role, spelt, f"args.{whole}", problem.what)
    return Note("left out", role, spelt, "", f"{problem.what}; {problem.fix}")
