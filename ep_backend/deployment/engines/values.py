"""What a flag takes, read from the annotation or the call that declares it; nothing of the engine is imported.

Only what is certain: a flag whose parser, type or choices are computed elsewhere takes anything as far as is known here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

SWITCH, BOOLEAN, INTEGER, INTEGERS, FLOAT, TEXT = "switch", "boolean", "integer", "integers", "float", "text"
SIZE, SIZE_OR_AUTO = "size", "size or auto"
Takes = str | list[str] | None
"""One of the words above, the words to choose from, or None: anything.

switch: nothing, it is there or not; boolean: nothing, with a `--no-` form; size: a whole number, also as 8k; integers: one or
more; text: any one word.
"""
BUILT_IN = {"bool": BOOLEAN, "int": INTEGER, "float": FLOAT, "str": TEXT}
# How the engines' parsers call what reads 8k.
SIZE_PARSERS = {"human_readable_int": SIZE, "human_readable_int_or_auto": SIZE_OR_AUTO}
PARSING = {"type", "choices", "action", "nargs"}


@dataclass
class Declared:
    """Names that modules give to types and lists of choices, and the annotated fields of their classes."""

    names: dict[str, ast.expr] = field(default_factory=dict)
    fields: dict[str, dict[str, ast.expr]] = field(default_factory=dict)

    @classmethod
    def of(cls, trees: Iterable[ast.Module]) -> Declared:
        found, twice = cls(), set[str]()
        for node in (node for tree in trees for node in tree.body):
            if isinstance(node, ast.ClassDef):
                found.fields[node.name] = dict(fields_of(node))
            for name, value in _assigned(node):
                if name in found.names and ast.dump(found.names[name]) != ast.dump(value):
                    twice.add(name)
                found.names[name] = value
        for name in twice:
            del found.names[name]
        return found

    def members(self, annotation: ast.expr) -> Iterator[ast.expr]:
        """Of a union, without None; other annotations are their only member."""
        match annotation:
            case ast.Constant(value=None):
                pass
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                yield from self.members(left)
                yield from self.members(right)
            case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
                yield from self.members(inner)
            case ast.Name(id=name) if name in self.names:
                yield from self.members(self.names[name])
            case _:
                yield annotation

    def words(self, choices: ast.expr) -> list[str] | None:
        """The constants of a list of choices or a Literal, as they are typed; None if it is not made of them alone."""
        match choices:
            case ast.Constant(value=str() | int() as value):
                return [str(value)]
            case ast.Name(id=name) if name in self.names:
                return self.words(self.names[name])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                parts = [self.words(left), self.words(right)]
            case (
                ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=each))
                | ast.List(elts=each)
                | ast.Tuple(elts=each)
            ):
                parts = [self.words(part) for part in each]
            case ast.Subscript(value=ast.Name(id="Literal"), slice=only):
                return self.words(only)
            case _:
                return None
        return None if None in parts else [word for part in parts if part is not None for word in part]

    def takes(self, annotation: ast.expr) -> Takes:
        """Of an annotation, where the parser that is made of it follows it."""
        members = list(self.members(annotation))
        plain = {member.id for member in members if isinstance(member, ast.Name)}
        # vLLM's parser offers the words of a union with torch.dtype alone.
        others = [m for m in members if not isinstance(m, ast.Name) and ast.unparse(m) != "torch.dtype"]
        if plain - BUILT_IN.keys() or len(plain) + len(others) > 2 or {"bool", "str"} <= plain:
            return None
        if "bool" in plain:
            return BOOLEAN
        if others:
            return INTEGERS if _is_integers(others[0]) else self.words(others[0]) if not plain and len(others) == 1 else None
        return next((BUILT_IN[name] for name in ("int", "float", "str") if name in plain), None)


def of_call(call: ast.Call, declared: Declared, given: Takes = None) -> Takes:
    """What the flag of an `add_argument` takes; `given` by the keywords that are not written out."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in keywords:
        return given
    if "action" in keywords:
        return of_action(keywords["action"])
    if "choices" in keywords:
        return None if "nargs" in keywords else declared.words(keywords["choices"])
    match keywords.get("type"):
        case ast.Name(id="int" | "float" | "str" as name):
            return None if "nargs" in keywords else BUILT_IN[name]
        case ast.Name(id=name) if name in SIZE_PARSERS:
            return SIZE_PARSERS[name]
    return None


def spread(call: ast.Call) -> tuple[str, str] | None:
    """KWARGS and FIELD of `**kwargs["field"]` or `**{**kwargs["field"], "default": ...}`, the form of flags made of fields."""
    if PARSING & {keyword.arg for keyword in call.keywords}:
        return None
    node = next((keyword.value for keyword in call.keywords if keyword.arg is None), None)
    match node:
        case ast.Dict(keys=[None, *others], values=[inner, *_]):
            if PARSING & {key.value for key in others if isinstance(key, ast.Constant)}:
                return None
            node = inner
    match node:
        case ast.Subscript(value=ast.Name(id=kwargs), slice=ast.Constant(value=str() as name)):
            return kwargs, name
    return None


def of_action(action: ast.expr) -> Takes:
    if is_boolean(action):
        return BOOLEAN
    return SWITCH if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false") else None


def is_boolean(action: ast.expr | None) -> bool:
    """Is it argparse's action with a `--no-` form?"""
    return action is not None and "BooleanOptionalAction" in ast.dump(action)


def reworked(tree: ast.AST) -> set[str]:
    """The fields whose keywords are changed before they reach the parser: `some_kwargs["field"]["type"] = ...`."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Subscript(slice=ast.Constant(value=str() as name)), slice=ast.Constant(value=keyword)):
                if keyword in PARSING:
                    found.add(name)
    return found


def in_words(tree: ast.AST) -> dict[str, Takes]:
    """The fields that vLLM's parser reads as 8k, too: a set of that name, and the one that may be auto."""
    found: dict[str, Takes] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="human_readable_int_args")], value=ast.Set(elts=each)):
                found |= {str(constant.value): SIZE for constant in each if isinstance(constant, ast.Constant)}
            case ast.Compare(left=ast.Name(id="name"), comparators=[ast.Constant(value="max_model_len" as name)]):
                found[name] = SIZE_OR_AUTO
    return found


def before_validation(tree: ast.AST) -> set[str]:
    """The fields whose values are rewritten before their type is looked at: `@field_validator("field", mode="before")`."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="field_validator"), args=names, keywords=[ast.keyword(arg="mode", value=mode)]):
                if ast.unparse(mode) == "'before'":
                    found |= {str(name.value) for name in names if isinstance(name, ast.Constant)}
    return found


def fields_of(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id, part.annotation


def _assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value


def _is_integers(annotation: ast.expr) -> bool:
    return ast.unparse(annotation) in ("list[int]", "List[int]")


def kwargs_of_classes(tree: ast.AST) -> Mapping[str, str]:
    """`x_kwargs = get_kwargs(XConfig)`: the class behind each name."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id="get_kwargs"), args=[ast.Name(id=config)]),
            ):
                found[name] = config
    return found
