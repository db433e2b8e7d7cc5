"""Compiles the CUDA images of this folder: `python kernels/build.py OUT_DIR`, or `build(out_dir)`.

Each image is one kernel file for one architecture. Images of the tuned architecture may neither spill nor use a stack:
that is an error. The others are compiled and reported only.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TUNED = "sm_90a"
ARCHITECTURES = (TUNED, "sm_100a")
HOT = ("dispatch", "combine", "per_expert", "hybrid", "rings")
FLAGS = ("-std=c++17", "-O3", "-Xptxas=-v", "-Werror=all-warnings")


class BuildError(RuntimeError):
    """An image does not compile, or is not fit to be hot."""


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
    """Compile every image into ``out_dir`` and print the resource report; ``extra`` are more flags for nvcc."""
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(name, arch) for name in HOT for arch in ARCHITECTURES]
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda job: _compile(*job, out, extra), jobs))
    kernels = [k for report in reports for k in report]
    for k in kernels:
        print(
            f"{k.image}: {k.kernel} {k.registers} registers, {k.shared_bytes} bytes shared, "
            f"{k.stack_bytes} bytes stack, {k.spill_bytes} bytes spilled"
        )
        if TUNED in k.image and (k.spill_bytes or k.stack_bytes):
            raise BuildError(f"{k.kernel} in {k.image} spills or uses a stack: give it fewer live values or fewer threads")
    (out / "images.json").write_text(json.dumps({"kernels": [asdict(k) for k in kernels]}, indent=1) + "\n")
    return [out / f"{name}.{arch}.cubin" for name, arch in jobs] + [out / "images.json"]


def _compile(name: str, arch: str, out: Path, extra: tuple[str, ...]) -> list[Resources]:
    image = out / f"{name}.{arch}.cubin"
    target = f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}"
    command = ["nvcc", "-cubin", target, *FLAGS, *extra, f"-I{HERE / 'include'}", "-o", str(image), str(HERE / f"{name}.cu")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"nvcc failed on {name}.cu for {arch}:\n{done.stdout}{done.stderr}")
    return report(done.stderr, image.name)


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
    for path in build(sys.argv[1] if len(sys.argv) > 1 else HERE.parent / "ep_backend" / "images"):
        print(path)
