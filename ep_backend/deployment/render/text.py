"""How rendered files are spelled."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

HEADER = "# Written by `ep-backend render`; change the deployment file instead.\n"


def script(lines: Iterable[str]) -> str:
    """A bash script that ends at the first failure."""
    body = "\n".join(line.rstrip() for line in lines)
    return f"#!/bin/bash\n{HEADER}set -euo pipefail\n{body}\n"


def array(name: str, words: Sequence[str]) -> list[str]:
    """A bash array, an option a line."""
    return [f"{name}=(", *(f"    {word}" for word in words), ")"]


def as_yaml(*documents: Mapping[str, Any]) -> str:
    """The documents, keys in their order, texts of several lines as blocks."""
    yaml = YAML()
    yaml.width = 1 << 16
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = io.StringIO()
    yaml.dump_all([_blocks(document) for document in documents], out)
    return out.getvalue()


def _blocks(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _blocks(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_blocks(each) for each in value]
    return LiteralScalarString(value) if isinstance(value, str) and "\n" in value else value
