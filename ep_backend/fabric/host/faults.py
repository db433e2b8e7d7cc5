"""Deliberate faults of the host fabric: delays at the points where order matters, and a combine that is wrong."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field

POINTS = ("before_data", "before_count", "before_signal", "after_wait", "before_credit", "before_return")


@dataclass
class Faults:
    """Sleep up to ``max_delay_s`` at every one of ``points``; ``corrupt_combine`` spoils results, to test a checker."""

    seed: int = 0
    max_delay_s: float = 0.0
    points: tuple[str, ...] = POINTS
    corrupt_combine: bool = False
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        unknown = [p for p in self.points if p not in POINTS]
        if unknown:
            raise ValueError(f"fault points {unknown} are unknown; choose from {', '.join(POINTS)}")
        self._random = random.Random(self.seed)

    @classmethod
    def from_env(cls) -> Faults:
        """EP_BACKEND_FAULT=combine spoils combine; unset means no fault."""
        fault = os.environ.get("EP_BACKEND_FAULT", "")
        if fault not in ("", "combine"):
            raise ValueError(f"EP_BACKEND_FAULT={fault!r} is unknown; set it to combine, or unset it")
        return cls(corrupt_combine=fault == "combine")

    def at(self, point: str) -> None:
        if self.max_delay_s and point in self.points:
            time.sleep(self._random.random() * self.max_delay_s)
