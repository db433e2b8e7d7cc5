"""Reads a deployment file and reports everything that is wrong with it at once, each with its line and column."""

import difflib
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedBase
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from ep_backend.deployment.checks import check
from ep_backend.deployment.problems import DeploymentError, Problem
from ep_backend.deployment.schema import Deployment


@dataclass(frozen=True)
class Loaded:
    """A valid deployment and where it was read, so that later checks can point into the file."""

    deployment: Deployment
    file: Path
    document: Any

    def error(self, problems: Sequence[Problem]) -> DeploymentError:
        return DeploymentError([_located(self.file, self.document, problem) for problem in problems])


def load(file: Path, text: str | None = None) -> Loaded:
    """The deployment in `file`, or in a text that is to replace it; relative paths in it start at the file's folder.

    Raises DeploymentError.
    """
    document = _parse(file, text)
    try:
        deployment = Deployment.model_validate(document)
    except ValidationError as error:
        problems = [_schema_problem(details) for details in error.errors(include_url=False)]
        raise DeploymentError([_located(file, document, problem) for problem in problems]) from None
    model = deployment.model.model_copy(update={"path": (file.parent / deployment.model.path).resolve()})
    loaded = Loaded(deployment.model_copy(update={"model": model}), file, document)
    if problems := check(loaded.deployment):
        raise loaded.error(problems)
    return loaded


def _parse(file: Path, text: str | None) -> Any:
    try:
        text = file.read_text(encoding="utf-8") if text is None else text
    except OSError as error:
        raise DeploymentError([f"{file}: cannot be read: {error.strerror}; give the path of a deployment file"]) from None
    try:
        document = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        raise DeploymentError([f"{place}: not valid YAML: {error.problem}"]) from None
    except YAMLError as error:
        raise DeploymentError([f"{file}: not valid YAML: {error}"]) from None
    if not isinstance(document, dict):
        raise DeploymentError([f"{file}:1:1: holds {type(document).__name__}, must be a mapping with `name` and `roles`"])
    return document


def _schema_problem(details: ErrorDetails) -> Problem:
    place = details["loc"]
    if details["type"] == "extra_forbidden":
        known = _fields_at(place[:-1])
        close = difflib.get_close_matches(str(place[-1]), known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(known)}"
        return Problem(place, "unknown key", hint)
    if details["type"] == "missing":
        return Problem(place, "is missing", "add it")
    message = details["msg"]
    return Problem(place, f"{message[0].lower()}{message[1:]}", f"it is {details['input']!r} now")


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


def _located(file: Path, document: Any, problem: Problem) -> str:
    line, column = _position(document, problem.place)
    name = ".".join(str(part) for part in problem.place)
    return f"{file}:{line}:{column}: {name}: {problem.what}; {problem.fix}"


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
