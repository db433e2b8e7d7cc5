"""Is a value one that an engine's flag takes? By the tables, so the engine need not be installed."""

import re

from pydantic import JsonValue

from ep_backend.deployment.engines.values import BOOLEAN, FLOAT, INTEGER, INTEGERS, SIZE, SIZE_OR_AUTO, SWITCH, TEXT, Takes
from ep_backend.deployment.schema import decimal
from ep_backend.deployment.spelling import in_yaml, one_of
from ep_backend.errors import did_you_mean

# Both engines' parsers; which letters mean what is theirs.
IN_WORDS = r"\d+(\.\d+)?([kKmMgGtT]i?)?"

# pydantic's, of a switch in JSON.
BOOLEAN_WORDS = ("true", "false", "t", "f", "yes", "no", "y", "n", "on", "off", "1", "0")


def refused(takes: Takes, value: JsonValue) -> tuple[str, str] | None:
    """What the flag takes instead of a value, and the fix; None if it takes it."""
    if value is None:
        return "a value", "leave the flag out to have its default, or give it a value"
    if isinstance(takes, list):
        if not isinstance(value, (bool, list, dict)) and str(value) in takes:
            return None
        return one_of(takes), did_you_mean(str(value), takes, "write one of them")
    if takes is None:
        return None
    fits, kind, fix = {
        SWITCH: (isinstance(value, bool), "true or false", _instead_of_boolean(value)),
        BOOLEAN: (isinstance(value, bool), "true or false", _instead_of_boolean(value)),
        INTEGER: (_is_integer(value), "a whole number", _instead_of_number(value)),
        SIZE: (_is_size(value), "a whole number, or one such as 8k", _instead_of_number(value)),
        SIZE_OR_AUTO: (
            _is_size(value) or value == "auto",
            "a whole number, one such as 8k, or auto",
            _instead_of_number(value),
        ),
        FLOAT: (decimal(value) is not None, "a number", "write a number"),
        INTEGERS: (
            all(map(_is_integer, value)) and bool(value) if isinstance(value, list) else _is_integer(value),
            "whole numbers",
            "write [8, 16], with yours",
        ),
        TEXT: (not isinstance(value, (bool, list)), "one text", "write one text"),
    }[takes]
    return None if fits else (kind, fix)


def refused_inside(takes: Takes, value: JsonValue) -> tuple[str, str] | None:
    """The same of a key of a JSON flag: pydantic reads it, and takes a switch as text, 2.0 and true as numbers, null where the
    engine's default is null (which the tables do not hold)."""
    if (
        value is None
        or (takes == BOOLEAN and str(value).lower() in BOOLEAN_WORDS)
        or (takes in (INTEGER, FLOAT) and (isinstance(value, bool) or (isinstance(value, float) and value.is_integer())))
    ):
        return None
    return refused(takes, value)


def _is_integer(value: JsonValue) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"[+-]?\d+", value) is not None
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: JsonValue) -> bool:
    return _is_integer(value) or (isinstance(value, str) and re.fullmatch(IN_WORDS, value) is not None)


def _instead_of_boolean(value: JsonValue) -> str:
    """YAML 1.2 reads yes and on as words."""
    words = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
    meant = words.get(str(value).lower())
    return f"write {meant}" if meant else "write true, or false"


def _instead_of_number(value: JsonValue) -> str:
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, list) and len(value) == 1 and _is_integer(value[0]):
        return f"write {in_yaml(value[0])} without brackets"
    return "write a whole number"
