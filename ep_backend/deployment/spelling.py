"""Values in messages, as a deployment file spells them."""

import io
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from ruamel.yaml import YAML

LONGEST = 80


def in_yaml(value: object) -> str:
    """A value on one line; the end of a long one is left out."""
    plain = json.loads(json.dumps(value, default=str, skipkeys=True))
    yaml, out = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style, yaml.width, yaml.allow_unicode = True, 1 << 16, True
    yaml.dump(plain, out)
    text = out.getvalue().removesuffix("...\n").rstrip("\n")
    if "\n" in text:
        text = json.dumps(plain, ensure_ascii=False)
    return shortened(text)


def shortened(text: str) -> str:
    text = visible(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def visible(text: str) -> str:
    """The text with escapes for what a terminal would not show, or would obey: control characters, changes of direction."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def call(command: str, file: Path) -> str:
    """A command on a deployment, as it is typed into a shell."""
    end_of_options = ["--"] if str(file).startswith("-") else []
    return shlex.join(["ep-backend", command, *end_of_options, str(file)])


def one_of(words: Sequence[str]) -> str:
    """Words to choose from: a, b or c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
