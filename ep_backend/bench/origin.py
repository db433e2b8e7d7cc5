"""Where a result was taken: what programs of the host say, without which a result is still one."""

from __future__ import annotations

import subprocess
from pathlib import Path

WAIT_S = 30


def said(*command: str) -> str:
    """What a program prints; nothing where it is not there, fails, or does not end in time."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit() -> str | None:
    """Of the code that runs; None where git does not know it."""
    return said("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12") or None


def gpus(*facts: str) -> list[str]:
    """A line for each GPU, in nvidia-smi's words for these facts."""
    return said("nvidia-smi", f"--query-gpu={','.join(facts)}", "--format=csv,noheader").splitlines()
