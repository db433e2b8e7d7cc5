"""Faults of a file's form, in the words of the file: what pydantic finds, and what follows from it."""

import typing
from collections.abc import Sequence

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from ep_backend.deployment.changes import HIDDEN, SECRET
from ep_backend.deployment.document import Place
from ep_backend.deployment.problems import Problem
from ep_backend.deployment.schema import PATTERNS, Deployment
from ep_backend.deployment.spelling import in_yaml, one_of
from ep_backend.errors import did_you_mean

# What a value must be, by pydantic's type of error; bounds, choices and patterns are filled in.
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "list": "a list",
    "dict": "a mapping",
    "mapping": "a mapping",
    "model": "a mapping",
}
BOUNDS = {"greater_than": ("above", "gt"), "greater_than_equal": ("at least", "ge")}
BOUNDS |= {"less_than": ("below", "lt"), "less_than_equal": ("at most", "le")}
RULES = {*BOUNDS, "literal_error", "string_pattern_mismatch", "string_too_short", "size", "bytes"}
# YAML 1.2 reads them as words.
BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
# Parts of a deployment that no rule on roles reads.
APART = ("name", "router", "control")


def problems_of(faults: Sequence[ErrorDetails]) -> list[Problem]:
    """One problem a mistake: a misspelt key is not told again as a missing one."""
    unknown = [place_of(fault) for fault in faults if fault["type"] == "extra_forbidden"]
    missing = {place_of(fault) for fault in faults if fault["type"] == "missing"}
    replaced = {place: lacking for place in unknown if (lacking := _lacking(place, unknown, missing))}
    return [
        Problem(place, "unknown key", f"did you mean `{replaced[place][-1]}`, which is missing?", "EP002")
        if (place := place_of(fault)) in replaced
        else _problem(fault)
        for fault in faults
        if place_of(fault) not in replaced.values()
    ]


def _lacking(place: Place, unknown: Sequence[Place], missing: set[Place]) -> Place | None:
    """The missing key that an unknown one stands for: the one it resembles, or the only one beside the only one."""
    beside = [lacking for lacking in missing if lacking[:-1] == place[:-1]]
    alone = sum(other[:-1] == place[:-1] for other in unknown) == len(beside) == 1
    return next((lacking for lacking in beside if alone or lacking == meant(place)), None)


def apart_from(faults: Sequence[Problem], found: Sequence[Problem]) -> list[Problem]:
    """The problems that cannot come of values left out because they were at fault."""
    return [problem for problem in found if not any(_may_follow(problem.place, meant(fault.place)) for fault in faults)]


def meant(place: Place) -> Place:
    """The place of a key, as it is probably spelt; an unknown key that resembles none stays."""
    known = fields_at(place[:-1])
    if not place or not known or str(place[-1]) in known:
        return place
    near = did_you_mean(str(place[-1]), known, "").split("`")
    return (*place[:-1], near[1]) if len(near) > 1 else place


def fields_at(place: Sequence[int | str]) -> list[str]:
    """The keys that the schema knows at a place."""
    model = _model_at(place)
    return [] if model is None else list(model.model_fields)


def _may_follow(place: Place, fault: Place) -> bool:
    if not fault or str(fault[0]) not in Deployment.model_fields:
        return False
    if fault[0] in APART:
        return place[:1] == fault[:1]
    if place[:1] and place[0] in APART:
        return False
    of_one_role = fault[0] == "roles" and len(fault) > 2 and fault[2] != "engine"
    return not of_one_role or place[:2] == fault[:2] or place[:1] != ("roles",) or len(place) < 2


def _problem(fault: ErrorDetails) -> Problem:
    place, kind, given = place_of(fault), fault["type"], fault["input"]
    if given and place and SECRET.search(str(place[-1])):
        given = HIDDEN
    context = fault.get("ctx", {})
    if kind == "extra_forbidden":
        return Problem(place, "unknown key", _known_here(place), "EP002")
    if kind == "missing":
        return Problem(place, "is missing", "add it", "EP003")
    if kind == "preset":
        names: list[str] = context["names"]
        hint = did_you_mean(str(given), names, f"choose one of {', '.join(names)}")
        return Problem(place, f"is {in_yaml(given)}, which is no {context['kind']} preset", hint, "EP012")
    if kind.split("_")[0] not in KINDS and kind not in RULES:
        message = fault["msg"]
        return Problem(place, f"{message[0].lower()}{message[1:]}", "correct it", "EP004")
    rule, fix = _rule(kind, context, given, place)
    if given is None and place[-1:] != ("roles",):
        fix = "give it a value" if _is_required(place) else "give it a value, or remove the key"
    subject = "as a key," if fault["loc"][-1:] == ("[key]",) else f"is {in_yaml(given)},"
    return Problem(place, f"{subject} {rule}", fix, "EP004")


def _rule(kind: str, context: dict[str, typing.Any], given: object, place: Place) -> tuple[str, str]:
    """What the value must be, and the fix."""
    if kind in BOUNDS:
        word, key = BOUNDS[kind]
        limit = f"{context[key]:g}" if isinstance(context[key], float) else str(context[key])
        fix = {"at least": f"{limit} or more", "at most": f"{limit} or less"}.get(word, f"a number {word} {limit}")
        return f"must be {word} {limit}", f"write {fix}"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return f"must be {one_of(choices)}", did_you_mean(str(given), choices, "write one of them")
    if kind == "string_pattern_mismatch":
        words = PATTERNS.get(context["pattern"], f"of the form {context['pattern']}")
        return f"must be {words}", "choose such a name" if len(place) < 2 or place[-2] == "env" else "write it so"
    if kind == "string_too_short":
        return "must not be empty", "give it a value, or remove the key"
    if kind == "size":
        return f"must be a size such as 64GiB ({context['choices']})", "write a number and a unit"
    if kind == "bytes":
        return "which is bytes, must be at least 1 MiB", f"write {in_yaml(given)}GiB if GiB are meant"
    what = KINDS[kind.split("_")[0]]
    return f"must be {what}", _fix(what, given, place)


def _fix(what: str, given: object, place: Place) -> str:
    if what == "text" and not isinstance(given, (list, dict)):
        return f'write "{in_yaml(given)}" in quotes'
    if what == "true or false":
        return f"write {BOOLEANS.get(str(given).lower(), 'one of them')}"
    if what == "a whole number" and isinstance(given, float) and given.is_integer():
        return f"write {int(given)}"
    if what == "a list" and not isinstance(given, dict):
        return f"write [{in_yaml(given)}]"
    if what == "a mapping":
        known = fields_at(place)
        return f"write keys below it, of {', '.join(known)}" if known else "write `KEY: VALUE` lines below it"
    return f"write {what}"


def _known_here(place: Place) -> str:
    key, known = str(place[-1]), fields_at(place[:-1])
    below = [name for name in known if key in fields_at((*place[:-1], name))]
    hint = f"write it below `{below[0]}`" if below else did_you_mean(key, known, f"known here: {', '.join(known)}")
    of_a_role = len(place) == 3 and place[0] == "roles" and hint.startswith("known")
    return f"{hint}; flags of the engine belong below `args`" if of_a_role else hint


def _is_required(place: Place) -> bool:
    model = _model_at(place[:-1])
    field = model.model_fields.get(str(place[-1])) if model is not None else None
    return field is not None and field.is_required()


def place_of(fault: ErrorDetails) -> Place:
    """Where the file has it."""
    return tuple(part for part in fault["loc"] if part != "[key]")


def _model_at(place: Sequence[int | str]) -> type[BaseModel] | None:
    model: type[BaseModel] = Deployment
    for part in place:
        field = model.model_fields.get(str(part))
        if field is None:
            return None
        choices = [field.annotation, *typing.get_args(field.annotation)]
        nested = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)]
        if not nested:
            return None
        model = nested[0]
    return model
