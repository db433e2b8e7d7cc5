"""Ends a worker whose buffer failed where no Python call would tell: a replayed CUDA graph raises nothing."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

EXIT_CODE = 70


class Watchdog(threading.Thread):
    """Polls ``failure`` and ends the process when it returns a reason.

    Args:
        failure: returns why the process must end, or None.
        grace_s: time left for an exception that the engine may be handling already, so that it can report it.
        poll_s: seconds between two looks.
        end: ends the process.
    """

    def __init__(
        self,
        failure: Callable[[], str | None],
        *,
        grace_s: float = 0.0,
        poll_s: float = 0.5,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        super().__init__(name="ep-backend-watchdog", daemon=True)
        self._failure = failure
        self._grace_s = grace_s
        self._poll_s = poll_s
        self._end = end
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self._poll_s):
            reason = self._failure()
            if reason is None:
                continue
            log.critical("the buffer is failed, so this worker (pid %d) ends: %s", os.getpid(), reason)
            if not self._stopped.wait(self._grace_s):
                for handler in logging.getLogger().handlers:
                    handler.flush()
                self._end(EXIT_CODE)
            return

    def stop(self) -> None:
        self._stopped.set()
