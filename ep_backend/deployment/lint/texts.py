"""The rules' texts: what each code means, why it matters and where that is known from."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Rule:
    """One entry of rules.toml."""

    code: str
    severity: Severity
    title: str
    why: str
    fix: str
    source: str


@cache
def rules() -> dict[str, Rule]:
    text = files("ep_backend.deployment.lint").joinpath("rules.toml").read_text(encoding="utf-8")
    return {code: Rule(code, **entry) for code, entry in tomllib.loads(text).items()}
