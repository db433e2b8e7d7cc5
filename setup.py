"""Compiles the CUDA images into the package when nvcc is there. EP_CUDA=1 demands it, EP_CUDA=0 forbids it. A wheel has all
images of this build or none, whatever an earlier one left in the tree."""

import os
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
BUILDER = ROOT / "kernels" / "build.py"
IMAGES = Path("ep_backend", "images")


def compile_images(out_dir: Path) -> list[Path]:
    """The files of this build."""
    choice = os.environ.get("EP_CUDA", "auto")
    if choice not in ("0", "1", "auto"):
        raise SystemExit(f"EP_CUDA={choice!r}: must be 0 (never compile), 1 (compile or fail) or unset (compile if nvcc is)")
    if choice == "0":
        return []
    if not BUILDER.exists():
        if choice == "1":
            raise SystemExit(f"EP_CUDA=1 but {BUILDER} is not there: build from the source tree, or set EP_CUDA=0")
        return []
    if shutil.which("nvcc") is None:
        if choice == "1":
            raise SystemExit("EP_CUDA=1 but nvcc is not on PATH: add the CUDA toolkit's bin folder to PATH, or set EP_CUDA=0")
        return []
    builder = runpy.run_path(str(BUILDER))
    builder["find_nvshmem"]()  # a wrong NVSHMEM_HOME is an error whatever EP_CUDA says
    try:
        return list(builder["build"](out_dir))
    except Exception as error:
        if choice == "1":
            raise
        print(f"ep-backend: CUDA images left out, compiling failed: {error} (EP_CUDA=1 makes this fatal)", file=sys.stderr)
        return []


class BuildWithImages(build_py):
    def run(self) -> None:
        made = compile_images(ROOT / IMAGES)
        super().run()
        if self.editable_mode:
            return
        packed = Path(self.build_lib, IMAGES)
        shutil.rmtree(packed, ignore_errors=True)
        for path in made:
            packed.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, packed)


setup(cmdclass={"build_py": BuildWithImages})
