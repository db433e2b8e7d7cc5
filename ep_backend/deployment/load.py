"""Reads a deployment file and reports everything that is wrong with it at once, each with its line and column."""

import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedBase
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from ep_backend.deployment.lint import check
from ep_backend.deployment.problems import DeploymentError, Finding, Problem
from ep_backend.deployment.schema import Deployment
from ep_backend.errors import did_you_mean


@dataclass(frozen=True)
class Loaded:
    """A valid deployment and where it was read, so that later checks can point into the file."""

    deployment: Deployment
    file: Path
    document: Any

    def findings(self, problems: Sequence[Problem]) -> list[Finding]:
        """The problems in the order of the file's lines."""
        found = [_located(self.file, self.document, problem) for problem in problems]
        return sorted(found, key=lambda finding: (finding.line, finding.column))

    def error(self, problems: Sequence[Problem]) -> DeploymentError:
        return DeploymentError.of(self.findings(problems))


def load(file: Path, text: str | None = None) -> Loaded:
    """The deployment in `file`, or in a text that is to replace it, without any error that the file alone shows.

    Relative paths in it start at the file's folder. Raises DeploymentError.
    """
    loaded, problems = read(file, text)
    problems += check(loaded.deployment)
    if problems:
        raise loaded.error(problems)
    return loaded


def name_in(file: Path) -> str:
    """The deployment's name, for commands that ask what runs: the rest of the file may be half edited."""
    name = _parse(file, None).get("name")
    if not isinstance(name, str):
        raise _unreadable(file, 1, 1, f"name is {name!r}, must be a word", "give the deployment its name")
    return name


def read(file: Path, text: str | None = None) -> tuple[Loaded, list[Problem]]:
    """The deployment in `file`, and the faults of its form; what it says is not judged.

    Values at fault are left out, so that the rest can be judged in the same run. Raises DeploymentError where no deployment
    remains.
    """
    document = _parse(file, text)
    try:
        return Loaded(_with_paths_from(file.parent, Deployment.model_validate(document)), file, document), []
    except ValidationError as error:
        faults = error.errors(include_url=False)
    problems = [_schema_problem(details) for details in faults]
    try:
        deployment = Deployment.model_validate(_without(document, [details["loc"] for details in faults]))
    except ValidationError:
        raise DeploymentError.of([_located(file, document, problem) for problem in problems]) from None
    return Loaded(_with_paths_from(file.parent, deployment), file, document), problems


def _without(document: Any, places: Sequence[tuple[int | str, ...]], here: tuple[int | str, ...] = ()) -> Any:
    """A plain copy of the document that lacks the keys at these places."""
    if not isinstance(document, Mapping):
        return document
    return {key: _without(value, places, (*here, key)) for key, value in document.items() if (*here, key) not in places}


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


def _parse(file: Path, text: str | None) -> Any:
    try:
        text = file.read_text(encoding="utf-8") if text is None else text
    except OSError as error:
        raise _unreadable(
            file, 1, 1, f"cannot be read: {error.strerror}", "give the path of a deployment file", "EP005"
        ) from None
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}"
        raise _unreadable(file, 1, 1, what, "give the path of a deployment file, or save it as UTF-8") from None
    try:
        document = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        tab = "\\t" in str(error.problem)
        fix = "indent with spaces" if tab else "keep one" if "duplicate key" in str(error.problem) else "correct it"
        what = str(error.problem).partition(" with value ")[0]  # the value of a repeated key may be half the file
        raise _unreadable(file, line, column, f"not valid YAML: {what}", fix) from None
    except YAMLError as error:
        raise _unreadable(file, 1, 1, f"not valid YAML: {error}", "correct it") from None
    except RecursionError:
        raise _unreadable(file, 1, 1, "is nested too deeply to be read", "close what is open; no value here is deep") from None
    if not isinstance(document, dict):
        holds = "is empty" if document is None else "is a list" if isinstance(document, list) else f"is only {document!r}"
        raise _unreadable(file, 1, 1, f"{holds}, must be a mapping with `name` and `roles`", "write one")
    for place, what, fix in _unwritable(document):
        raise DeploymentError.of([_located(file, document, Problem(place, what, fix, "EP004"))])
    return document


def _unwritable(value: Any, place: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], str, str]]:
    """YAML has values that JSON and UTF-8 have not, and everything here is written as those."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _unwritable(part, (*place, str(key)))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _unwritable(part, (*place, number))
    elif isinstance(value, float) and not math.isfinite(value):
        yield place, f"is {float(value)}, must be a finite number", "write the number that is meant"
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        yield place, f"holds {value!a}, half of a character", "write the character itself"


def _unreadable(file: Path, line: int, column: int, what: str, fix: str, code: str = "EP001") -> DeploymentError:
    return DeploymentError.of([Finding(str(file), line, column, Problem((), what, fix, code))])


def _schema_problem(details: ErrorDetails) -> Problem:
    place = details["loc"]
    if details["type"] == "extra_forbidden":
        known = _fields_at(place[:-1])
        hint = did_you_mean(str(place[-1]), known, f"known here: {', '.join(known)}")
        return Problem(place, "unknown key", hint, "EP002")
    if details["type"] == "missing":
        return Problem(place, "is missing", "add it", "EP003")
    if details["type"] == "preset":
        names: list[str] = details["ctx"]["names"]
        hint = did_you_mean(str(details["input"]), names, f"choose one of {', '.join(names)}")
        return Problem(place, f"{details['input']!r} is no {details['ctx']['kind']} preset", hint, "EP012")
    message, given = details["msg"], details["input"]
    fix = f'write "{given}" in quotes' if details["type"] == "string_type" else f"replace {given!r}"
    if details["type"] == "literal_error":
        fix = did_you_mean(str(given), re.findall(r"'([^']+)'", details["ctx"]["expected"]), fix)
    return Problem(place, f"{message[0].lower()}{message[1:]}", fix, "EP004")


def _fields_at(place: Sequence[int | str]) -> list[str]:
    """The keys that the schema knows at a place."""
    model: type[BaseModel] = Deployment
    for part in place:
        field = model.model_fields.get(str(part))
        if field is None:
            return []
        choices = [field.annotation, *typing.get_args(field.annotation)]
        nested = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)


def _located(file: Path, document: Any, problem: Problem) -> Finding:
    return Finding(str(file), *_position(document, problem.place), problem)


def _position(document: Any, place: Sequence[int | str]) -> tuple[int, int]:
    """Line and column, from 1, of the deepest part of a place that the file has."""
    line, column, node = 0, 0, document
    for part in place:
        if not isinstance(node, CommentedBase):
            break
        try:
            line, column = node.lc.key(part) if isinstance(part, str) else node.lc.item(part)
            node = node[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            break
    return line + 1, column + 1
