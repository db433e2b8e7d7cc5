"""Compiles the CUDA images into the package when nvcc is there. EP_CUDA=1 demands it, EP_CUDA=0 forbids it."""

import os
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
BUILDER = ROOT / "kernels" / "build.py"


def compile_images(out_dir: Path) -> None:
    choice = os.environ.get("EP_CUDA", "auto")
    if choice not in ("0", "1", "auto"):
        raise SystemExit(f"EP_CUDA={choice!r}: must be 0 (never compile), 1 (compile or fail) or unset (compile if nvcc is)")
    if choice == "0" or not BUILDER.exists():
        return
    if shutil.which("nvcc") is None:
        if choice == "1":
            raise SystemExit("EP_CUDA=1 but nvcc is not on PATH: add the CUDA toolkit's bin folder to PATH, or set EP_CUDA=0")
        return
    try:
        runpy.run_path(str(BUILDER))["build"](out_dir)
    except Exception as error:
        if choice == "1":
            raise
        print(f"ep-backend: CUDA images left out, compiling failed: {error} (EP_CUDA=1 makes this fatal)", file=sys.stderr)


class BuildWithImages(build_py):
    def run(self) -> None:
        compile_images(ROOT / "ep_backend" / "images")
        super().run()


setup(cmdclass={"build_py": BuildWithImages})
