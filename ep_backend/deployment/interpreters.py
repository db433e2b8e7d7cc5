"""The Python that runs an engine: this one, or for SGLang that of an environment of its own."""

import os
import subprocess
import sys

from ep_backend.deployment.engines import installed

# vLLM and SGLang pin different versions of torch, so whoever has both has SGLang elsewhere.
SGLANG_PYTHON = "EP_SGLANG_PYTHON"
TIMEOUT_S = 60
VERSIONS = "from importlib.metadata import version; print(version('sglang'), version('ep-backend'))"
ROUTER = "from importlib.util import find_spec; raise SystemExit(find_spec('sglang_router') is None)"


class NoInterpreter(Exception):
    """SGLang cannot be run; the text says why, and `fix` what to do."""

    fix = f"use `./ep`, or install sglang and ep-backend in an environment and name its Python in {SGLANG_PYTHON}"


def sglang() -> tuple[str, str]:
    """The Python that has SGLang, and SGLang's version. Raises NoInterpreter."""
    python = os.environ.get(SGLANG_PYTHON)
    if python is None:
        version = installed("sglang")
        if version is None:
            raise NoInterpreter("this environment has no SGLang")
        return sys.executable, version
    try:
        done = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoInterpreter(f"{SGLANG_PYTHON}={python} cannot be run ({error})") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise NoInterpreter(f"{SGLANG_PYTHON}={python} has not all it needs ({reason[0]})")
    return python, done.stdout.split()[0].split("+")[0]


def has_sglang_router(python: str) -> bool:
    return subprocess.run([python, "-P", "-c", ROUTER], timeout=TIMEOUT_S, capture_output=True).returncode == 0
