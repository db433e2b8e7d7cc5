"""How a deployment's faults are reported."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ep_backend.deployment.spelling import visible


@dataclass(frozen=True)
class Problem:
    """One fault: its place in the file, the value and the rule it breaks, what to do, and the rule's stable code."""

    place: tuple[int | str, ...]
    what: str
    fix: str
    code: str


@dataclass(frozen=True)
class Finding:
    """A problem at its line and column, both from 1."""

    file: str
    line: int
    column: int
    problem: Problem

    @property
    def name(self) -> str:
        return ".".join(str(part) for part in self.problem.place)

    @property
    def subject(self) -> str:
        return visible(f"{self.name}: {self.problem.what}" if self.name else self.problem.what)

    @property
    def fix(self) -> str:
        return visible(self.problem.fix)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.subject}; {self.fix} [{self.problem.code}]"


class DeploymentError(Exception):
    """All faults found at once, one line each."""

    def __init__(self, lines: list[str], findings: Sequence[Finding] = ()) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
        self.findings = findings

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> Self:
        return cls([str(finding) for finding in findings], findings)
