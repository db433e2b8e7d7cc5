"""What checks read of a machine: files below a root, the environment, commands. Nothing waits without bound."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path

from ep_backend.deployment.engines import installed
from ep_backend.deployment.node import visible
from ep_backend.fabric.nvshmem.images import IMAGES

COMMAND_S = 10.0
MAX_BYTES = 1 << 20
GPU_FIELDS = (
    *("index", "name", "uuid", "pci.bus_id", "compute_cap", "driver_version", "memory.total", "memory.free"),
    *("mig.mode.current", "persistence_mode", "compute_mode", "ecc.errors.uncorrected.volatile.total"),
)
ABSENT = ("", "[N/A]", "N/A", "[Not Supported]", "[Unknown Error]")

Runner = Callable[[Sequence[str]], str]


class Unknown(Exception):
    """Something cannot be read here, or says what nobody understands; the text names it."""


def run(command: Sequence[str]) -> str:
    """A command's output. Raises Unknown if it is not there, fails, or does not answer in time."""
    name = command[0]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise Unknown(f"{name} cannot be run ({error.strerror})") from None
    try:
        output, _ = child.communicate(timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        # A process that hangs inside a driver cannot be reaped, so nobody waits for it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        raise Unknown(f"{name} did not answer in {COMMAND_S:g} s") from None
    if child.returncode:
        raise Unknown(f"{name} ended with status {child.returncode}: {(output.strip().splitlines() or ['no output'])[-1]}")
    return output


def entry_points(group: str) -> list[str]:
    """The names of a group's entry points in this environment."""
    return [point.name for point in metadata.entry_points(group=group)]


@dataclass(frozen=True)
class Gpu:
    """A line of nvidia-smi. Memory in bytes; None where the GPU has no such thing."""

    index: int
    name: str
    uuid: str
    bus: str
    """As sysfs spells it: 0000:1b:00.0"""
    capability: tuple[int, int]
    driver: str
    total: int
    free: int
    mig: str | None
    persistence: str | None
    compute_mode: str | None
    uncorrected: int | None


@dataclass
class Host:
    """This machine, or a folder that looks like one."""

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    runner: Runner = run
    version: Callable[[str], str | None] = installed
    entry_points: Callable[[str], Collection[str]] = entry_points
    images: Path = IMAGES
    _said: dict[tuple[str, ...], str | Unknown] = field(default_factory=dict)

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.root / path.lstrip("/"))

    def read(self, path: str) -> str:
        """A file's text. Raises Unknown."""
        return self.read_bytes(path).decode("utf-8", "replace").strip()

    def read_bytes(self, path: str) -> bytes:
        try:
            with (self.root / path.lstrip("/")).open("rb") as file:
                return file.read(MAX_BYTES)
        except OSError as error:
            raise Unknown(f"{path} cannot be read ({error.strerror})") from None

    def read_if(self, path: str) -> str | None:
        """A file's text; None where there is no such file. Raises Unknown if it is there and cannot be read."""
        return self.read(path) if self.exists(path) else None

    def number(self, path: str) -> int:
        """A file that holds one whole number. Raises Unknown."""
        text = self.read(path)
        try:
            return int(text.split()[0], 0)
        except (ValueError, IndexError):
            raise Unknown(f"{path} says {text[:40]!r}, no number") from None

    def names(self, folder: str) -> list[str]:
        """What a folder holds, sorted; nothing where it does not exist. Raises Unknown."""
        try:
            return sorted(os.listdir(self.root / folder.lstrip("/")))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Unknown(f"{folder} cannot be read ({error.strerror})") from None

    def real(self, path: str) -> str:
        """Where a path leads through symbolic links, below the root."""
        return "/" + str(Path(os.path.realpath(self.root / path.lstrip("/"))).relative_to(self.root.resolve()))

    def usable(self, path: str) -> bool:
        """May this user read and write it?"""
        return os.access(self.root / path.lstrip("/"), os.R_OK | os.W_OK)

    def field(self, path: str, name: str) -> str:
        """The rest of the line of a file that starts with `name:`. Raises Unknown."""
        for line in self.read(path).splitlines():
            key, colon, value = line.partition(":")
            if colon and key.strip() == name:
                return value.strip()
        raise Unknown(f"{path} has no {name}")

    def say(self, *command: str) -> str:
        """A command's output, asked once: what hung is not asked again. Raises Unknown."""
        if command not in self._said:
            try:
                self._said[command] = self.runner(command)
            except Unknown as error:
                self._said[command] = error
        said = self._said[command]
        if isinstance(said, Unknown):
            raise said
        return said

    @cached_property
    def has_driver(self) -> bool:
        return self.exists("/proc/driver/nvidia/version") or self.exists("/dev/nvidiactl")

    def all_gpus(self) -> list[Gpu]:
        """The GPUs that nvidia-smi lists. Raises Unknown."""
        text = self.say("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
        return list(_gpus(text))

    def gpus(self) -> list[Gpu]:
        """Those of them that CUDA_VISIBLE_DEVICES lets a process see, in its order. Raises Unknown."""
        every = self.all_gpus()
        return [every[index] for index in visible(self.env.get("CUDA_VISIBLE_DEVICES"), [[gpu.uuid] for gpu in every])]


def matrix(text: str) -> dict[tuple[str, str], str]:
    """The cells of a table that `nvidia-smi topo` prints, by row and column."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    cells: dict[tuple[str, str], str] = {}
    columns: list[str] = []
    for line in plain.splitlines():
        words = line.split()
        if not columns and words[:1] == ["GPU0"]:
            columns = [word for word in words if re.fullmatch(r"(GPU|NIC)\d+", word)]
        elif words and words[0] in columns:
            cells |= {(words[0], column): cell for column, cell in zip(columns, words[1:], strict=False)}
    return cells


def _gpus(text: str) -> Iterator[Gpu]:
    for line in text.splitlines():
        words = [None if word.strip() in ABSENT else word.strip() for word in line.split(",")]
        if len(words) != len(GPU_FIELDS):
            raise Unknown(f"nvidia-smi says {line[:60]!r}, not {len(GPU_FIELDS)} fields")
        index, name, uuid, bus, capability, driver, total, free, mig, persistence, mode, uncorrected = words
        try:
            major, minor = (capability or "").split(".")
            domain, rest = (bus or "").split(":", 1)
            yield Gpu(
                index=int(index or ""),
                name=name or "",
                uuid=uuid or "",
                bus=f"{int(domain, 16):04x}:{rest}".lower(),
                capability=(int(major), int(minor)),
                driver=driver or "",
                total=int(total or "") << 20,
                free=int(free or "") << 20,
                mig=mig,
                persistence=persistence,
                compute_mode=mode,
                uncorrected=None if uncorrected is None else int(uncorrected),
            )
        except ValueError:
            raise Unknown(f"nvidia-smi says {line[:60]!r}, which is not understood") from None
