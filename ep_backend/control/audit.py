"""Who asked for which change, and what came of it: one JSON line each, kept beside the logs."""

from collections import deque
from datetime import UTC, datetime
from pathlib import Path

from ep_backend.control.models import AuditEntry

SHOWN = 100


class Audit:
    def __init__(self, file: Path) -> None:
        self._file = file

    def note(self, client: str, action: str, what: str, outcome: str) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        entry = AuditEntry(time=time, client=client, action=action, what=what, outcome=outcome)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch(mode=0o600)
        with self._file.open("a", encoding="utf-8") as log:
            log.write(entry.model_dump_json() + "\n")

    def entries(self) -> list[AuditEntry]:
        """The latest ones, oldest first."""
        try:
            with self._file.open(encoding="utf-8") as log:
                return [AuditEntry.model_validate_json(line) for line in deque(log, SHOWN)]
        except FileNotFoundError:
            return []
