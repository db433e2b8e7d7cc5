"""Process sessions and the shared memory they map, from /proc, so that stopping a deployment leaves nothing behind.

Each instance is started in a session of its own: whatever it spawns stays in that session, also after its parent died.
"""

import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from random import randrange

SHARED_MEMORY = "/dev/shm/"
POLL_S = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_given: deque[int] = deque(maxlen=1000)  # ports that were found free lately: whoever got them may not listen yet


def start_ticks(pid: int) -> int | None:
    """When the process started, in kernel ticks: tells a process from a later one of the same id. None if it is gone."""
    fields = _stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def session_of(pid: int) -> int | None:
    """The leader of a process's session; None if it is gone."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[3])


def ending(pid: int) -> str:
    """How a process that no longer runs ended, as long as its parent has not asked; then only that it is gone."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] not in "ZX":
        return "is gone"
    status = int(fields[49])
    return ended_as(-(status & 0x7F) or status >> 8)


def ended_as(code: int) -> str:
    """An exit status in words; below zero it is a signal."""
    return f"was ended by {signal_name(-code)}" if code < 0 else f"exited with status {code}"


def signal_name(number: int) -> str:
    """Python names only the first and the last of the real-time signals."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


@contextlib.contextmanager
def signals_noted(note: Callable[[int], object]) -> Iterator[None]:
    """A signal to stop only leaves a note, so that it never interrupts between starting a process and noting it. The next
    signal may interrupt ``note``: no lock that is taken once, as an Event has it."""
    before = {number: signal.signal(number, lambda number, _: note(number)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def session_members(leaders: Collection[int]) -> list[int]:
    """The living processes of the sessions with these leaders."""
    members = []
    for pid in _processes():
        fields = _stat_fields(pid)
        if fields is not None and fields[0] not in "ZX" and int(fields[3]) in leaders:
            members.append(pid)
    return members


def shared_memory_of(pids: Collection[int]) -> set[Path]:
    """The files in shared memory that these processes map."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, slash, name = line.partition(SHARED_MEMORY)
                if slash and not name.endswith(" (deleted)"):
                    found.add(Path(SHARED_MEMORY + name))
    return found


def stop_sessions(leaders: Collection[int], shared: set[Path], grace_s: float) -> None:
    """Asks the leaders to stop, kills after `grace_s` what is left, then removes shared memory that outlived all its users."""
    shared = shared | shared_memory_of(session_members(leaders))
    _signal(leaders, signal.SIGTERM)
    if not _wait_gone(leaders, grace_s):
        _signal(session_members(leaders), signal.SIGKILL)
        _wait_gone(leaders, 10.0)
    for file in shared - shared_memory_of(_processes()):
        with contextlib.suppress(OSError):  # gone, or another user's
            file.unlink()


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports, below the range from which the system serves outgoing connections."""
    for _ in range(100):
        base = randrange(12000, 32000 - count)
        ports = range(base, base + count)
        if all(port not in _given and _is_free(port) for port in ports):
            _given.extend(ports)
            return base
    raise OSError(f"no {count} consecutive free ports between 12000 and 32000 in 100 tries")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _signal(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait_gone(leaders: Collection[int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    orphans_asked = False
    while members := session_members(leaders):
        if time.monotonic() > deadline:
            return False
        if not orphans_asked and not set(members) & set(leaders):
            _signal(members, signal.SIGTERM)
            orphans_asked = True
        time.sleep(POLL_S)
    return True
