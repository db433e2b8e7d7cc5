"""How a deployment's faults are reported."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One fault: its place in the file, the value and the rule it breaks, what to do, and the rule's stable code."""

    place: tuple[int | str, ...]
    what: str
    fix: str
    code: str


class DeploymentError(Exception):
    """All faults found at once, one line each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
