"""What a migration did to each word that it was given."""

import json
from dataclasses import dataclass
from typing import Literal

Kind = Literal["changed", "added", "left out"]


@dataclass(frozen=True)
class Note:
    """One thing that is not in the file as it was in the command, and why."""

    kind: Kind
    role: str
    what: str
    became: str
    why: str


LONGEST = 120
Said = tuple[Kind, str, str, str]
"""A note before its role is known: kind, what, became, why."""


def shown(value: object) -> str:
    """On one line that is not too long."""
    text = json.dumps(value, default=str) if isinstance(value, (dict, list)) else " ".join(str(value).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


class Unmovable(Exception):
    """What was given cannot become a deployment; names the value, the rule and the fix."""
