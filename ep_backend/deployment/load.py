"""Reads a deployment file and reports everything that is wrong with it at once, each with its line and column."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedBase, CommentedOrderedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from ep_backend.deployment.form import apart_from, problems_of
from ep_backend.deployment.lint import check
from ep_backend.deployment.problems import DeploymentError, Finding, Problem
from ep_backend.deployment.schema import Deployment
from ep_backend.deployment.spelling import in_yaml

MOST_VALUES = 100_000


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
    loaded, faults = read(file, text)
    problems = [*faults, *apart_from(faults, check(loaded.deployment))]
    if problems:
        raise loaded.error(problems)
    return loaded


def name_in(file: Path) -> str:
    """The deployment's name, for commands that ask what runs: the rest of the file may be half edited."""
    name = _parse(file, None).get("name")
    if not isinstance(name, str):
        raise _unreadable(file, 1, 1, f"name is {in_yaml(name)}, must be a word", "give the deployment its name")
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
    problems = problems_of(faults)
    try:
        deployment = Deployment.model_validate(_without(document, [problem.place for problem in problems]))
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
        # Where one is in itself, the document that is made of it lacks it.
        if "*" in text and (node := _in_itself(YAML(typ="rt").compose(text), {})):
            place = node.start_mark.line + 1, node.start_mark.column + 1
            raise _unreadable(file, *place, "is an alias of what it is part of", "write the values themselves")
        document = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        tab = "\\t" in str(error.problem)
        fix = "indent with spaces" if tab else "keep one" if "duplicate key" in str(error.problem) else "correct it"
        what = str(error.problem).partition(" with value ")[0]  # the value of a repeated key may be half the file
        if "another document" in what:
            what, fix = "holds several documents, must be one", "keep one, and no `---` after it"
        raise _unreadable(file, line, column, f"not valid YAML: {what}", fix) from None
    except ReaderError as error:
        line, column = text.count("\n", 0, error.position) + 1, error.position - text.rfind("\n", 0, error.position)
        what = f"not valid YAML: holds the control character U+{ord(text[error.position]):04X}"
        raise _unreadable(file, line, column, what, "remove it") from None
    except YAMLError as error:
        raise _unreadable(file, 1, 1, f"not valid YAML: {error}", "correct it") from None
    except RecursionError:
        raise _unreadable(file, 1, 1, "is nested too deeply to be read", "close what is open; no value here is deep") from None
    if not isinstance(document, dict):
        holds = {type(None): "is empty", CommentedSeq: "is a list"}.get(type(document), f"is only {in_yaml(document)}")
        raise _unreadable(file, 1, 1, f"{holds}, must be a mapping with `name` and `roles`", "write one")
    found = [_located(file, document, Problem(*fault, "EP004")) for fault in _unwritable(document, {})]
    if found:
        raise DeploymentError.of(found)
    return document


def _in_itself(node: Any, open_: dict[int, bool]) -> Any:
    """A node of YAML that an alias inside it refers to. `open_`: nodes that were met, and whether they are not yet left."""
    if id(node) in open_:
        return node if open_[id(node)] else None
    open_[id(node)] = True
    parts = node.value if isinstance(node, (MappingNode, SequenceNode)) else []
    below = (part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,)))
    found = next((found for part in below if (found := _in_itself(part, open_))), None)
    open_[id(node)] = False
    return found


def _unwritable(
    value: Any, sizes: dict[int, int], place: tuple[int | str, ...] = ()
) -> Iterator[tuple[tuple[int | str, ...], str, str]]:
    """YAML has values that JSON and UTF-8 have not, and everything here is written as those.

    `sizes` takes how many values each mapping and list stands for: aliases may make few lines stand for millions.
    """
    if id(value) in sizes:
        return
    if isinstance(value, Mapping) and not isinstance(value, CommentedOrderedMap):
        for key, part in value.items():
            if isinstance(key, str):
                yield from _unwritable(part, sizes, (*place, key))
            else:
                yield place, f"has the key {in_yaml(key)}, must be text", f'write "{in_yaml(key)}" in quotes'
    elif isinstance(value, CommentedSeq):
        for number, part in enumerate(value):
            yield from _unwritable(part, sizes, (*place, number))
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield place, f"is {float(value)}, must be a finite number", "write the number that is meant"
    elif isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            yield place, f"holds {value!a}, half of a character", "write the character itself"
        elif "\0" in value:
            yield place, "holds a NUL character, which neither paths nor arguments may", "remove it"
    elif value is not None and not isinstance(value, int):
        kind = "a date" if isinstance(value, date) else "of a type that YAML alone has"
        yield (
            place,
            f"is {kind}, must be text, a number, true or false, a list or a mapping",
            "write it in quotes, without a tag",
        )
    if isinstance(value, (Mapping, CommentedSeq)):
        sizes[id(value)] = 1 + sum(sizes.get(id(part), 1) for part in (value.values() if isinstance(value, Mapping) else value))
        if sizes[id(value)] > MOST_VALUES:
            yield place, f"stands for more than {MOST_VALUES} values by its aliases", "write fewer"
            sizes[id(value)] = 1  # told once


def _unreadable(file: Path, line: int, column: int, what: str, fix: str, code: str = "EP001") -> DeploymentError:
    return DeploymentError.of([Finding(str(file), line, column, Problem((), what, fix, code))])


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
