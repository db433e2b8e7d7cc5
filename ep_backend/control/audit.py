"""Who asked for which change, and what came of it: one JSON line each, kept beside the logs."""

import logging
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from ep_backend.control.models import AuditEntry

log = logging.getLogger(__name__)

SHOWN = 100


class Audit:
    def __init__(self, file: Path) -> None:
        self._file = file

    def note(self, client: str, action: str, what: str, outcome: str) -> None:
        """A change is what it is also where its line cannot be written: the disk may be full."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = AuditEntry(time=time, client=client, action=action, what=what, outcome=outcome).model_dump_json()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch(mode=0o600)
            with self._file.open("ab+") as kept:
                kept.seek(max(0, kept.tell() - 1))
                before = b"" if kept.read() in (b"", b"\n") else b"\n"  # the last line may have been cut off
                kept.write(before + line.encode() + b"\n")
        except OSError as error:
            log.error("%s cannot be written (%s), so it lacks %s", self._file, error.strerror, line)

    def entries(self) -> list[AuditEntry]:
        """The latest ones, oldest first, without what is no entry."""
        try:
            with self._file.open("rb") as kept:
                lines = deque(kept, SHOWN)
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            with suppress(ValidationError):
                found.append(AuditEntry.model_validate_json(line))
        return found
