"""Who runs a deployment: at most one process, and none once that has ended, however it ended."""

import errno
import hashlib
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ep_backend.deployment.problems import DeploymentError
from ep_backend.deployment.processes import session_of, start_ticks

CREDENTIALS = struct.Struct("3i")
QUESTIONS = 4096  # to a claimant; nobody reads them, for the kernel itself says who it is
ANSWER_S = 1.0  # beyond those, and beyond what the kernel allows, a question would wait for ever


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Claims the deployment of this folder for this process until the block ends; False where another one has it.

    The claim is a name in Linux's table of sockets: taking it is atomic, and the kernel drops it with its process.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(_address(folder))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            yield False
        else:
            claim.listen(QUESTIONS)
            yield True


def claimant(folder: Path) -> int | None:
    """The process that claims the deployment of this folder. DeploymentError if it was asked too often to be known."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(ANSWER_S)
        try:
            asking.connect(_address(folder))
        except ConnectionRefusedError:
            return None
        except (BlockingIOError, TimeoutError):
            what = f"an `ep-backend up` holds {folder}, and was asked too often to be named"
            raise DeploymentError([f"{what}; end it by hand (`pgrep -af ep_backend`)"]) from None
        pid: int = CREDENTIALS.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[0]
        return pid


def launches_in(folder: Path) -> set[int]:
    """The leaders of the sessions that write to a log in this folder, for when its state does not name them."""
    writers = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                output = Path(os.readlink(entry / "fd" / "1").removesuffix(" (deleted)"))
            except OSError:  # gone, or another user's
                continue
            if output.parent == folder and output.suffix == ".log":
                writers.add(int(entry.name))
    leaders = {session_of(pid) for pid in writers} - {None}
    # The session of somebody who only sent the output of one command there is not a launch.
    return {pid for pid in leaders if pid is not None and (pid in writers or start_ticks(pid) is None)}


def _address(folder: Path) -> str:
    return f"\0ep_backend {hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()}"
