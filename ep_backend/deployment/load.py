"""Reads a deployment file and reports everything that is wrong with it at once, each with its line and column."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml.comments import CommentedMap

from ep_backend.deployment.document import Place, located, parse, text_of, unreadable
from ep_backend.deployment.form import apart_from, place_of, problems_of
from ep_backend.deployment.lint import check
from ep_backend.deployment.problems import DeploymentError, Finding, Problem
from ep_backend.deployment.schema import PATTERNS, Deployment
from ep_backend.deployment.spelling import in_yaml
from ep_backend.values import NAME

MOST_FAULTS = 100


@dataclass(frozen=True)
class Loaded:
    """A valid deployment and where it was read, so that later checks can point into the file."""

    deployment: Deployment
    file: Path
    text: str
    document: Any

    def findings(self, problems: Sequence[Problem]) -> list[Finding]:
        """The problems in the order of the file's lines."""
        found = [located(self.file, self.document, problem) for problem in problems]
        return sorted(found, key=lambda finding: (finding.line, finding.column))

    def error(self, problems: Sequence[Problem]) -> DeploymentError:
        return DeploymentError.of(self.findings(problems))


def load(file: Path, text: str | None = None) -> Loaded:
    """The deployment in `file`, or in a text that is to replace it, without any error that the file alone shows.

    Relative paths in it start at the file's folder. Raises DeploymentError.
    """
    loaded, faults = read(file, text)
    problems = [*faults, *apart_from(faults, check(loaded.deployment))]
    if problems:
        raise loaded.error(problems)
    return loaded


def name_in(file: Path) -> str:
    """The deployment's name, for commands that ask what runs: the rest of the file may be half edited."""
    name = parse(file, text_of(file))[0].get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        what = f"name is {in_yaml(name)}, must be {PATTERNS[NAME]}"
        raise unreadable(file, 1, 1, what, "give the deployment its name")
    return name


def read(file: Path, text: str | None = None) -> tuple[Loaded, list[Problem]]:
    """The deployment in `file`, and the faults of its form; what it says is not judged.

    Values at fault are left out, so that the rest can be judged in the same run. Raises DeploymentError where no deployment
    remains.
    """
    text = text_of(file) if text is None else text
    document, faults = parse(file, text)
    known = {fault.place for fault in faults}
    given = _without(document, known)
    try:
        deployment = Deployment.model_validate(given)
    except ValidationError as error:
        found = [fault for fault in error.errors(include_url=False) if place_of(fault) not in known]
        faults += problems_of(found[:MOST_FAULTS])
        if len(found) > MOST_FAULTS:
            what = f"is the next of {len(found) - MOST_FAULTS} more faults"
            faults.append(Problem(place_of(found[MOST_FAULTS]), what, "correct the others first", "EP004"))
        try:
            deployment = Deployment.model_validate(_without(given, {place_of(fault) for fault in found}))
        except ValidationError:
            raise DeploymentError.of([located(file, document, problem) for problem in faults]) from None
    return Loaded(_with_paths_from(file.parent, deployment), file, text, document), faults


def _without(value: Any, places: Collection[Place], here: Place = ()) -> Any:
    """A plain copy of a document that lacks the parts at these places, and every key that is no text.

    A mapping with such a key is itself named as a fault, but goes on to be read.
    """
    if isinstance(value, Mapping):
        return {
            key: _without(part, places, (*here, key))
            for key, part in value.items()
            if isinstance(key, str) and (type(part) is CommentedMap or (*here, key) not in places)
        }
    if isinstance(value, list):
        return [_without(p, places, (*here, i)) for i, p in enumerate(value) if (*here, i) not in places]
    return value


def _with_paths_from(folder: Path, deployment: Deployment) -> Deployment:
    def absolute(path: Path | None) -> Path | None:
        return path and (folder / path).resolve()

    model, topology = deployment.model, deployment.topology
    routing = model.routing.model_copy(update={"expert_counts": absolute(model.routing.expert_counts)})
    return deployment.model_copy(
        update={
            "model": model.model_copy(update={"path": absolute(model.path), "routing": routing}),
            "topology": topology.model_copy(update={"bench": absolute(topology.bench)}),
        }
    )
