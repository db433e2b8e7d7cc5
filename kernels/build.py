"""Compiles the CUDA images of this folder: `python kernels/build.py OUT_DIR [FLAG...]`, or `build(out_dir)`.

Each image is one kernel file for one architecture. Images of the tuned architecture may neither spill nor use a stack:
that is an error. The others are compiled and reported only. Images of remote puts hold NVSHMEM's device code and are made
where its library is: NVSHMEM_HOME names the folder with include/ and lib/, or the package nvidia-nvshmem-cu13 is installed.
images.json, written last, says of which sources the images are and how large each is; without it there are no images.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TUNED = "sm_90a"
ARCHITECTURES = (TUNED, "sm_100a")
IMAGES = ("dispatch", "combine", "per_expert", "hybrid", "rings", "refuse")
PUTS = ("hybrid", "refuse")
LIBRARY, VERSION = "lib/libnvshmem_device.a", "include/non_abi/nvshmem_version.h"  # of NVSHMEM
FLAGS = ("-std=c++17", "-O3", "-Xptxas=-v", "-Werror=all-warnings")


class BuildError(RuntimeError):
    """An image does not compile, or spills."""


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel."""

    kernel: str
    image: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def build(out_dir: Path | str, extra: tuple[str, ...] = ()) -> list[Path]:
    """Compile every image into ``out_dir`` and print the resource report; ``extra``: flags of images that may spill. What an
    earlier build left there goes first, and nothing stays if this one fails."""
    out = Path(out_dir)
    nvshmem = find_nvshmem()
    out.mkdir(parents=True, exist_ok=True)
    _clear(out)
    try:
        return _build(out, nvshmem, extra)
    except BaseException:
        _clear(out)
        raise


def digest() -> str:
    """Of the sources: names and contents, in order of the names."""
    headers = (p for p in (HERE / "include").rglob("*") if p.suffix in (".h", ".cuh"))
    found = hashlib.sha256()
    for name, path in sorted((p.relative_to(HERE).as_posix(), p) for p in (*HERE.glob("*.cu"), *headers)):
        content = path.read_bytes()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _build(out: Path, nvshmem: Path | None, extra: tuple[str, ...]) -> list[Path]:
    sources = digest()  # before the compiler reads them: what is edited meanwhile must not pass for compiled
    jobs = [(name, arch) for name in IMAGES for arch in ARCHITECTURES]
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda job: _compile(*job, out, extra), jobs))
    kernels = [k for report in reports for k in report]
    written = [out / f"{name}.{arch}.cubin" for name, arch in jobs]
    if nvshmem is None:
        print("no image of remote puts: NVSHMEM is not here (set NVSHMEM_HOME, or install nvidia-nvshmem-cu13)")
    else:
        written += [_compile_puts(name, arch, out, nvshmem, extra) for name in PUTS for arch in ARCHITECTURES]
    for k in kernels:
        print(
            f"{k.image}: {k.kernel} {k.registers} registers, {k.shared_bytes} bytes shared, "
            f"{k.stack_bytes} bytes stack, {k.spill_bytes} bytes spilled"
        )
        if TUNED in k.image and (k.spill_bytes or k.stack_bytes) and not extra:
            raise BuildError(f"{k.kernel} in {k.image} spills or uses a stack: give it fewer live values or fewer threads")
    facts = {
        "sources": sources,
        "nvshmem": nvshmem_version(nvshmem) if nvshmem else None,
        "images": {p.name: p.stat().st_size for p in written},
        "kernels": [asdict(k) for k in kernels],
    }
    (out / "images.json").write_text(json.dumps(facts, indent=1) + "\n")
    return [*written, out / "images.json"]


def _clear(out: Path) -> None:
    """Remove what a build writes, first that which says that there is one."""
    files = [f"{name}.{arch}.cubin" for name in (*IMAGES, *(f"{put}_put" for put in PUTS)) for arch in ARCHITECTURES]
    parts = [f"{name}_put.{arch}.o" for name in PUTS for arch in ARCHITECTURES]
    for name in ("images.json", *files, *parts):
        (out / name).unlink(missing_ok=True)


def find_nvshmem() -> Path | None:
    """The folder with NVSHMEM's include/ and lib/. BuildError if NVSHMEM_HOME names another."""
    if named := os.environ.get("NVSHMEM_HOME"):
        home = Path(named)
        if missing := [name for name in (LIBRARY, VERSION) if not (home / name).exists()]:
            raise BuildError(
                f"NVSHMEM_HOME={named} has no {' and no '.join(missing)}: it must be the folder with NVSHMEM's include/ and "
                "lib/ (nvidia/nvshmem of the package nvidia-nvshmem-cu13); correct it, or unset it"
            )
        return home
    # pip builds where the environment's packages cannot be imported, but with its interpreter.
    places = [Path(sysconfig.get_path("purelib")) / "nvidia" / "nvshmem"]
    if importlib.util.find_spec("nvidia") is not None:
        spec = importlib.util.find_spec("nvidia.nvshmem")
        places = [*map(Path, spec.submodule_search_locations or []), *places] if spec else places
    return next((p for p in places if (p / LIBRARY).exists() and (p / VERSION).exists()), None)


def nvshmem_version(home: Path) -> str:
    """As the headers state it: the device code of an image must be of the library that runs with it."""
    text = (home / VERSION).read_text()
    return ".".join(re.findall(r"#define NVSHMEM_VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION (\d+)", text))


def _compile_puts(name: str, arch: str, out: Path, nvshmem: Path, extra: tuple[str, ...]) -> Path:
    image, part = out / f"{name}_put.{arch}.cubin", out / f"{name}_put.{arch}.o"
    target = f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}"
    includes = (f"-I{HERE / 'include'}", f"-I{nvshmem / 'include'}")
    # NVSHMEM's functions are called, not inlined: callees must fit the registers of a block of 1024 threads, too.
    flags = (*FLAGS[:2], "-DEP_RAIL_PUT", "-maxrregcount=64", "-rdc=true", *extra)
    _nvcc(name, arch, "-c", target, *flags, *includes, "-o", str(part), str(HERE / f"{name}.cu"))
    _nvcc(name, arch, "-dlink", "-cubin", target, str(part), f"-L{nvshmem / 'lib'}", "-lnvshmem_device", "-o", str(image))
    part.unlink()
    return image


def _nvcc(name: str, arch: str, *arguments: str) -> str:
    done = subprocess.run(["nvcc", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"nvcc failed on {name}.cu for {arch}:\n{done.stdout}{done.stderr}")
    return done.stderr


def _compile(name: str, arch: str, out: Path, extra: tuple[str, ...]) -> list[Resources]:
    image = out / f"{name}.{arch}.cubin"
    target = f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}"
    flags = ("-cubin", target, *FLAGS, *extra, f"-I{HERE / 'include'}")
    return report(_nvcc(name, arch, *flags, "-o", str(image), str(HERE / f"{name}.cu")), image.name)


def report(text: str, image: str) -> list[Resources]:
    """Read ptxas's report of the entry functions; a device function that was not inlined counts towards its caller."""
    found = []
    for block in re.split(r"Compiling entry function ", text)[1:]:
        kernel = re.match(r"'(\w+)'", block)
        stack = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block)
        used = re.search(r"Used (\d+) registers", block)
        if kernel is None or used is None or not stack:
            raise BuildError(f"{image}: ptxas's report cannot be read:\n{block}")
        smem = re.search(r"(\d+) bytes smem", block)
        found.append(
            Resources(
                kernel[1],
                image,
                int(used[1]),
                int(smem[1]) if smem else 0,
                sum(int(s[0]) for s in stack),
                sum(int(s[1]) + int(s[2]) for s in stack),
            )
        )
    return found


if __name__ == "__main__":
    for path in build(sys.argv[1] if len(sys.argv) > 1 else HERE.parent / "ep_backend" / "images", tuple(sys.argv[2:])):
        print(path)
