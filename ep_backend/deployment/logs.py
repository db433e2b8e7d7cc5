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
# Pydantic's errors go on with two lines each: the key at the margin, then the rule with the value; and with an address.
_PYDANTIC, _ADDRESS = re.compile(r"Error: (\d+) validation errors? for "), "For further information visit "
TAIL_BYTES = 200_000
CONTINUATION_LINES, MOST_CONTINUATION_LINES = 2, 4


def last_line(log: Path) -> str:
    lines = _tail(log)
    return lines[-1].strip() if lines else ""


def last_errors(log: Path, limit: int = 6) -> list[str]:
    """The distinct error lines at the end of a log, each with the lines after it that belong to it; else its last lines."""
    lines = [line for line in _tail(log) if not line.lstrip().startswith(_ADDRESS)]
    errors: dict[str, None] = {}
    follow, at_margin = 0, False
    for line in lines:
        if found := _PYDANTIC.search(line):
            follow, at_margin = min(CONTINUATION_LINES * int(found[1]), MOST_CONTINUATION_LINES), True
        elif _ERROR.search(line):
            follow, at_margin = CONTINUATION_LINES, False
        elif follow and (at_margin or line.startswith("  ")):
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
