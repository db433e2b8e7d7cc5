"""Standard output that ends the command where nobody reads it any more, or it cannot be written."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ep_backend.errors import OutputLost

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


class _Descriptor(io.FileIO):
    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputLost(error) from error


@contextmanager
def guarded_output() -> Iterator[None]:
    """Ends the process as SIGPIPE does where the reader is gone (`| head`); else with status 1 and one line on stderr."""
    given = sys.stdout
    if given is None:  # closed by whoever started this
        yield
        return
    if isinstance(given, io.TextIOWrapper):
        raw = io.BufferedWriter(_Descriptor(given.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(
            raw,
            encoding=given.encoding,
            # What the terminal's encoding lacks is told as an escape.
            errors="backslashreplace" if given.errors == "strict" else given.errors,
            line_buffering=given.line_buffering,
            write_through=given.write_through,
        )
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputLost as lost:
        # What is still buffered goes nowhere, or the interpreter would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), given.fileno())
        if lost.error.errno == errno.EPIPE:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
        print(
            f"ep-backend: the output cannot be written: {lost.error.strerror}; free space, or send it elsewhere",
            file=sys.stderr,
        )
        sys.exit(1)
