"""Engine flags as the words of a command line."""

import json
from collections.abc import Mapping

from pydantic import JsonValue

# Flags that are given once for each value; all others take a list's words after one name.
REPEATED = ("middleware",)


def flag_words(flags: Mapping[str, JsonValue]) -> list[str]:
    """`--flag value` for each; true and false become `--flag` and `--no-flag`."""
    words: list[str] = []
    for flag, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            words += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list) and flag in REPEATED:
            words += [word for each in value for word in (f"--{flag}", str(each))]
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return words
