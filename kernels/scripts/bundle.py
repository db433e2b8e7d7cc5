"""Makes an engine small enough to carry to a GPU host that reaches no package index: `kernels/scripts/bundle.py ENGINE`.

bundles.toml says what goes in: pinned wheels, what of them an H200 with Python 3.12 never reads, which libraries keep only
their code for sm_90, and what only a serving engine needs. Written are .bundle/ENGINE-layers.tar.xz and ENGINE-server.tar.xz,
each to be unpacked over the other by engine.sh; wheels stay in .bundle/wheels/ENGINE for the next time. Needs pip and an index.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / ".bundle"
PYTHON = "3.12"
GLIBC = (17, 24, 27, 28, 31, 34, 35, 39)
"""Minor versions of glibc whose wheels run there; pip matches each exactly."""
MOST_BYTES = 58 << 20
"""Of one part: what a command carries is at most 64 MiB, and the working tree travels too."""

FATBIN, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, ELF = 1, 2
ARCH, ARCH_AT = 90, 28


def keep_sm90(library: bytearray) -> int:
    """Zero every fat-binary payload that an sm_90 GPU cannot use, in place; the bytes left. Size and headers stay as they are.

    Kept of each fat binary: machine code for sm_90 or, where there is none, the newest PTX up to it. Layout of the records as
    read from nvcc 13.0's output and checked against cuobjdump: a header of 16 bytes with the size of the rest, then entries of
    kind, header size, payload size and, 28 bytes in, architecture.
    """
    kept = at = 0
    last = len(library) - FATBIN.size + len(MAGIC)
    while (at := library.find(MAGIC, at, last)) >= 0:
        _, version, header, size = FATBIN.unpack_from(library, at)
        if (version, header) != (1, FATBIN.size) or size > len(library) - at:  # the four bytes mean something else here
            at += 4
            continue
        entries = list(_entries(library, at + header, at + header + size))
        native = any(kind == ELF and arch == ARCH for kind, arch, _, _ in entries)
        newest = max((arch for kind, arch, _, _ in entries if kind == PTX and arch <= ARCH), default=None)
        for kind, arch, start, length in entries:
            if (kind == ELF and arch == ARCH) or (kind == PTX and not native and arch == newest):
                kept += length
            else:
                library[start : start + length] = bytes(length)
        at += header + size
    return kept


def _entries(library: bytearray, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Kind, architecture, offset and length of each payload."""
    while at + 64 <= end:
        kind, _, header, length = ENTRY.unpack_from(library, at)
        if header < 64 or at + header + length > end:
            return
        yield kind, int.from_bytes(library[at + ARCH_AT : at + ARCH_AT + 4], "little"), at + header, length
        at += header + length


def make(engine: str) -> None:
    known = tomllib.loads((HERE / "bundles.toml").read_text())
    if engine not in known:
        raise SystemExit(f"no engine {engine!r} in bundles.toml; it has {', '.join(known)}")
    what = known[engine]
    wheels, tree = OUT / "wheels" / engine, OUT / "tree" / engine
    shutil.rmtree(tree, ignore_errors=True)
    wheels.mkdir(parents=True, exist_ok=True)
    target = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    target += [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    target += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    _pip("download", "-d", str(wheels), *target, *what["wheels"])
    _pip("install", "--no-index", "--find-links", str(wheels), "--no-compile", "--target", str(tree), *target, *what["wheels"])
    for path, names in what.get("instead", {}).items():
        _refuse(tree / path, names)
    parts = _divided(tree, what)
    print(f"{engine}: {sum(map(os.path.getsize, (p for part in parts.values() for p in part)))} bytes of files left")
    for part, paths in parts.items():
        _pack(OUT / f"{engine}-{part}.tar.xz", tree, paths)
    shutil.rmtree(tree)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], check=True)


def _refuse(module: Path, names: list[str]) -> None:
    """A module with the names, as functions that only say that their package is not there."""
    refusal = f'raise NotImplementedError("this bundle has no {module.parent.name}")'
    module.parent.mkdir(exist_ok=True)
    module.write_text("".join(f"def {name}(*_, **__):\n    {refusal}\n" for name in names))


def _divided(tree: Path, what: dict[str, Any]) -> dict[str, list[Path]]:
    """The files that travel, stripped, by part."""
    parts: dict[str, list[Path]] = {"layers": [], "server": []}
    unused = {glob for key in ("drop", "strip", "server") for glob in what[key]}

    def matches(path: str, key: str) -> bool:
        found = [glob for glob in what[key] if fnmatch.fnmatch(path, glob)]
        unused.difference_update(found)
        return bool(found)

    for path in sorted(tree.rglob("*"), key=lambda p: (p.suffix, p)):  # likes beside likes compress better
        name = str(path.relative_to(tree))
        if not path.is_file() or matches(name, "drop"):
            continue
        if matches(name, "strip"):
            library = bytearray(path.read_bytes())
            print(f"{name}: {keep_sm90(library)} of {len(library)} bytes are code for sm_{ARCH}")
            path.write_bytes(library)
        parts["server" if matches(name, "server") else "layers"].append(path)
    if unused:
        raise SystemExit(f"bundles.toml names what no wheel has: {', '.join(sorted(unused))}")
    return parts


def _pack(archive: Path, tree: Path, paths: list[Path]) -> None:
    with tarfile.open(archive, "w:xz", preset=6) as out:
        for path in paths:
            out.add(path, path.relative_to(tree))
    size = archive.stat().st_size
    print(f"{archive.name}: {size} bytes ({size / (1 << 20):.1f} MiB)")
    if size > MOST_BYTES:
        raise SystemExit(f"{archive.name} exceeds {MOST_BYTES} bytes; drop more in bundles.toml, or move it to the other part")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    make(sys.argv[1])
