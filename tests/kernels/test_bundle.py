"""Packing an engine: what of a library's fat binaries is kept."""

from __future__ import annotations

import runpy
import struct
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "kernels" / "scripts" / "bundle.py"
PTX, ELF = 1, 2
MAGIC = struct.pack("<I", 0xBA55ED50)


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """Kind, architecture and payload of each."""
    body = b""
    for kind, arch, payload in entries:
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)).ljust(28, b"h") + struct.pack("<I", arch)
        body += header.ljust(64, b"h") + payload
    return struct.pack("<4sHHQ", MAGIC, 1, 16, len(body)) + body


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ([(ELF, 80), (ELF, 90), (ELF, 100), (PTX, 90)], [1]),
        ([(ELF, 80), (PTX, 75), (PTX, 80), (PTX, 100)], [2]),
        ([(ELF, 100), (PTX, 120)], []),
    ],
)
def test_only_code_for_sm_90_is_kept(entries, kept):
    payloads = [bytes([n + 1]) * (100 + n) for n in range(len(entries))]
    whole = fatbin(*((kind, arch, p) for (kind, arch), p in zip(entries, payloads, strict=True)))
    wanted = fatbin(
        *((k, a, p if n in kept else bytes(len(p))) for n, ((k, a), p) in enumerate(zip(entries, payloads, strict=True)))
    )
    # Around it: other data, the magic number by chance, and one more fat binary.
    chance, other = MAGIC + b"\x07\x00\x10\x00" + b"x" * 40, fatbin((ELF, 90, b"sm_90"))
    library = bytearray(b"elf" + chance + whole + b"data" + other + MAGIC)
    left = runpy.run_path(str(SCRIPT))["keep_sm90"](library)
    assert bytes(library) == b"elf" + chance + wanted + b"data" + other + MAGIC
    assert left == sum(len(payloads[n]) for n in kept) + len(b"sm_90")
