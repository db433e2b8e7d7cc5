"""A check's texts, its verdict, and the report of all."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from ep_backend.doctor.need import Word

Status = Literal["pass", "warn", "fail", "skip"]
Group = Literal["machine", "gpu", "network", "software", "deployment"]


@dataclass(frozen=True)
class Texts:
    """One entry of checks.toml: what is checked, for whom, why it matters, what to type, and where that is known from."""

    id: str
    group: Group
    title: str
    needs: tuple[Word, ...]
    why: str
    fix: str
    source: str


@dataclass(frozen=True)
class Verdict:
    """`evidence` says what was read. `fix` replaces the check's own where more is known."""

    status: Status
    evidence: str
    fix: str | None = None


@dataclass(frozen=True)
class Row:
    """One check's outcome; `fix` is empty unless it warns or fails."""

    texts: Texts
    status: Status
    evidence: str
    fix: str


@dataclass(frozen=True)
class Report:
    title: str
    rows: tuple[Row, ...]

    def count(self, status: Status) -> int:
        return sum(row.status == status for row in self.rows)

    @property
    def failed(self) -> bool:
        return self.count("fail") > 0


def passed(evidence: str) -> Verdict:
    return Verdict("pass", evidence)


def warn(evidence: str, fix: str | None = None) -> Verdict:
    return Verdict("warn", evidence, fix)


def fail(evidence: str, fix: str | None = None) -> Verdict:
    return Verdict("fail", evidence, fix)


def skip(evidence: str) -> Verdict:
    return Verdict("skip", evidence)


@cache
def texts() -> dict[str, Texts]:
    text = files("ep_backend.doctor").joinpath("checks.toml").read_text(encoding="utf-8")
    return {
        name: Texts(name, **entry | {"needs": tuple(entry.get("needs", ()))}) for name, entry in tomllib.loads(text).items()
    }
