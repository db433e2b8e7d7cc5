"""What flags of an engine take by our tables, against the engine's own parser."""

import argparse
from collections.abc import Callable, Mapping

from ep_backend.deployment.engines.values import BOOLEAN, FLOAT, INTEGER, INTEGERS, SIZE, SIZE_OR_AUTO, SWITCH, TEXT, Takes

# A word that each kind takes, and one that it refuses.
WORDS: dict[str, tuple[str, str | None]] = {
    INTEGER: ("7", "1.5"),
    FLOAT: ("0.5", "half"),
    SIZE: ("8k", "auto"),
    SIZE_OR_AUTO: ("auto", "8 tokens"),
    INTEGERS: ("7", "x"),
    TEXT: ("a word", None),
}


def disagreements(parser: argparse.ArgumentParser, table: Mapping[str, Takes]) -> list[str]:
    """The flags whose parser does something else than the table says."""
    actions = parser._option_string_actions
    return [flag for flag, takes in table.items() if (action := actions.get(f"--{flag}")) and not _is(takes, action, flag)]


def _is(takes: Takes, action: argparse.Action, flag: str) -> bool:
    boolean = isinstance(action, argparse.BooleanOptionalAction)
    if takes is None:
        return True
    if isinstance(takes, list):
        # Where the plug-in is loaded, its own name is a choice too.
        choices = {str(word) for word in action.choices or () if word not in (None, "ep_backend")}
        return action.nargs is None and choices == set(takes)
    if takes == BOOLEAN:
        return boolean
    if takes == SWITCH:
        return action.nargs == 0 and boolean == flag.startswith("no-")
    good, bad = WORDS[takes]
    several = action.nargs == "+" if takes == INTEGERS else action.nargs is None
    return several and action.choices is None and _takes(action.type, good) and (bad is None or not _takes(action.type, bad))


def _takes(parse: object, word: str) -> bool:
    if not isinstance(parse, Callable):  # type: ignore[arg-type]
        return parse is None
    try:
        parse(word)
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        return False
    return True
