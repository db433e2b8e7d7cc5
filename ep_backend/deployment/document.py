"""A deployment file as YAML: a document that knows its lines, or the place of what is no YAML or stands for no value here."""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedBase, CommentedOrderedMap, CommentedSeq
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.constructor import ConstructorError, RoundTripConstructor, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from ep_backend.deployment.problems import DeploymentError, Finding, Problem
from ep_backend.deployment.spelling import in_yaml, shortened
from ep_backend.files import read_text

Place = tuple[int | str, ...]

MOST_VALUES = 10_000
MOST_DEPTH = 50
MOST_BITS = 64
MOST_TEXT = 1 << 16  # Linux passes a program's arguments and variables up to twice that


def parse(file: Path, text: str) -> tuple[Any, list[Problem]]:
    """The mapping that the text of a file holds; and its values that cannot be written elsewhere.

    Raises DeploymentError where there is no such mapping.
    """
    try:
        # Where one is in itself, the document that is made of it lacks it.
        if "*" in text and (node := _in_itself(_yaml(_RoundTrip, "rt").compose(text), {})):
            place = node.start_mark.line + 1, node.start_mark.column + 1
            raise unreadable(file, *place, "is an alias of what it is part of", "write the values themselves")
        document = _yaml(_RoundTrip, "rt").load(text)
    except YAMLError as error:
        raise unreadable(file, *_of_yaml(error, text)) from None
    if not isinstance(document, dict):
        holds = {type(None): "is empty", CommentedSeq: "is a list"}.get(type(document), f"is only {in_yaml(document)}")
        raise unreadable(file, 1, 1, f"{holds}, must be a mapping with `name` and `roles`", "write one")
    sizes: dict[int, int] = {}
    faults = [Problem(*fault, "EP004") for fault in _unwritable(document, sizes)]
    if sizes[id(document)] > MOST_VALUES:
        what = f"stands for more than {MOST_VALUES} values, counting what aliases stand for"
        raise DeploymentError.of([located(file, document, Problem(_largest(document, sizes), what, "write fewer", "EP004"))])
    return document, faults


def plain_documents(text: str) -> list[Any]:
    """The documents of a YAML text, as plain values. Raises YAMLError, whatever is wrong with it."""
    return list(_yaml(_Plain, "safe").load_all(text))


def unreadable(file: Path, line: int, column: int, what: str, fix: str, code: str = "EP001") -> DeploymentError:
    return DeploymentError.of([Finding(str(file), line, column, Problem((), what, fix, code))])


def located(file: Path, document: Any, problem: Problem) -> Finding:
    return Finding(str(file), *_position(document, problem.place), problem)


class _NoValue(ConstructorError):
    """A text that is no value of its type."""


class _Marked(SafeConstructor):
    """Tells the place of a value that cannot be made: the types' own errors pass through ruamel without one."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except YAMLError:
            raise
        except Exception:  # of any kind: a tag may name a type that the value does not fit
            kind = str(node.tag).rpartition(":")[2]
            value = f"`{shortened(str(node.value))}`" if isinstance(node, ScalarNode) else "the value"
            raise _NoValue(None, None, f"{value} is no {kind} that can be read", node.start_mark) from None


class _RoundTrip(_Marked, RoundTripConstructor):
    pass


class _Plain(_Marked):
    pass


def _yaml(constructor: type[SafeConstructor], kind: str) -> YAML:
    yaml = YAML(typ=kind, pure=True)
    yaml.Constructor = constructor
    yaml.max_depth = MOST_DEPTH
    return yaml


def text_of(file: Path) -> str:
    """The text of a deployment file. Raises DeploymentError."""
    try:
        return read_text(file)
    except OSError as error:
        raise unreadable(
            file, 1, 1, f"cannot be read: {error.strerror}", "give the path of a deployment file", "EP005"
        ) from None
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}"
        raise unreadable(file, 1, 1, what, "give the path of a deployment file, or save it as UTF-8") from None


def _of_yaml(error: YAMLError, text: str) -> tuple[int, int, str, str]:
    """Line, column, what is wrong and the fix."""
    if isinstance(error, ReaderError):
        line, column = text.count("\n", 0, error.position) + 1, error.position - text.rfind("\n", 0, error.position)
        return line, column, f"not valid YAML: holds the control character U+{ord(text[error.position]):04X}", "remove it"
    if not isinstance(error, MarkedYAMLError):
        return 1, 1, f"not valid YAML: {error}", "correct it"
    mark = error.problem_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    if isinstance(error, MaxDepthExceededError):
        return line, column, f"is nested more than {MOST_DEPTH} deep", "close what is open; no value here is deep"
    if "another document" in str(error.problem):
        return line, column, "not valid YAML: holds several documents, must be one", "keep one, and no `---` after it"
    tab, twice = "\\t" in str(error.problem), "duplicate key" in str(error.problem)
    fix = "indent with spaces" if tab else "keep one" if twice else "correct it"
    if isinstance(error, _NoValue):
        fix = "correct it, or write it in quotes if it is text"
    what = str(error.problem).partition(" with value ")[0]  # the value of a repeated key may be half the file
    return line, column, f"not valid YAML: {what}", fix


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


def _unwritable(value: Any, sizes: dict[int, int], place: Place = ()) -> Iterator[tuple[Place, str, str]]:
    """YAML has values that JSON and UTF-8 have not, and everything here is written as those.

    `sizes` takes how many values each mapping and list stands for: aliases may make few lines stand for millions.
    """
    if id(value) in sizes:
        return
    if isinstance(value, Mapping) and not isinstance(value, CommentedOrderedMap):
        for key, part in value.items():
            if isinstance(key, str):
                yield from _unwritable(key, {}, (*place, key))
                yield from _unwritable(part, sizes, (*place, key))
            elif isinstance(key, (Mapping, Sequence)):
                kind = "mapping" if isinstance(key, Mapping) else "list"
                yield place, f"has a {kind} as a key, must be text", "write text before the colon"
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
        elif (size := len(value.encode())) > MOST_TEXT:
            what = f"is a text of {size} bytes, must have {MOST_TEXT} or fewer"
            yield place, what, "put it into a file, and name that"
    elif isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            what = f"is a whole number of {value.bit_length()} bits, must have {MOST_BITS} or fewer"
            yield place, what, "write the number that is meant"
    elif value is not None:
        kind = "a date" if isinstance(value, date) else "of a type that YAML alone has"
        yield (
            place,
            f"is {kind}, must be text, a number, true or false, a list or a mapping",
            "write it in quotes, without a tag",
        )
    if isinstance(value, (Mapping, CommentedSeq)):
        sizes[id(value)] = 1 + sum(sizes.get(id(part), 1) for part in _parts(value).values())


def _parts(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else dict(enumerate(value))


def _largest(document: Any, sizes: dict[int, int]) -> Place:
    """The place of the innermost value that stands for too many."""
    for key, part in _parts(document).items():
        if sizes.get(id(part), 1) > MOST_VALUES:
            return (key, *_largest(part, sizes))
    return ()


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
