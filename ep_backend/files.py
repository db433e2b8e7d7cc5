"""Files that a user names: read whole, if they are files, and of a size that such a file may have."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 4 << 20


def read_text(file: Path, most: int = MOST_BYTES) -> str:
    """The text of a regular file. OSError; UnicodeDecodeError if it is not UTF-8."""
    # A pipe without a writer would block the open, a device the read.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            code, what = (errno.EISDIR, "Is a directory") if stat.S_ISDIR(kind) else (errno.EINVAL, "not a regular file")
            raise OSError(code, what, str(file))
        data = opened.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(file))
    return data.decode()
