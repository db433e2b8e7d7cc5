"""Reads engine logs: what an instance is doing, and why it died."""

import re
from pathlib import Path

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# vLLM's `(EngineCore pid=1) INFO 11-29 10:00:00 [core.py:1] `, SGLang's `[2026-11-29 10:00:00 DP0 TP0 EP0] `.
_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d [^]]*\] |^(\([^)]*\) )?([A-Z]+ \d\d-\d\d [\d:]+ )?(\[[\w.]+:\d+\] )?")
_ERROR = re.compile(
    r"^[\w.]*(Error|Exception|Mismatch|Timeout)\b\S*: \S|^(Segmentation fault|Fatal|error:)|: error: "
    r"|\bdied (unexpectedly|with exit code)"
)
TAIL_BYTES = 200_000


CONTINUATION_LINES = 2


def last_line(log: Path) -> str:
    lines = _tail(log)
    return lines[-1].strip() if lines else ""


def last_errors(log: Path, limit: int = 6) -> list[str]:
    """The distinct error lines at the end of a log, each with the indented lines after it; else its last lines."""
    lines = _tail(log)
    errors: dict[str, None] = {}
    follow = 0
    for line in lines:
        if _ERROR.search(line):
            follow = CONTINUATION_LINES
        elif follow and line.startswith("  "):
            follow -= 1
        else:
            follow = 0
            continue
        errors[line] = None
    return (list(errors) or lines)[-limit:]


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = (_PREFIX.sub("", _ANSI.sub("", line)).rstrip() for line in text.splitlines())
    return [line for line in lines if line]
