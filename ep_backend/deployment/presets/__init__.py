"""Topologies and models by name."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

ALIASES = {"deepseek-r1": "deepseek-v3"}


@cache
def topologies() -> dict[str, dict[str, Any]]:
    return _read("topologies.toml")


@cache
def models() -> dict[str, dict[str, Any]]:
    """config.json-shaped tables; DeepSeek-R1 has V3's shape."""
    tables = _read("models.toml")
    return tables | {alias: tables[name] for alias, name in ALIASES.items()}


def _read(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("ep_backend.deployment.presets").joinpath(name).read_text(encoding="utf-8"))
