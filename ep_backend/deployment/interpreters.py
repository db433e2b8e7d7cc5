"""The Python that runs an engine: this one, or for SGLang that of an environment of its own."""

import os
import re
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
    done = _ask(python, "-c", VERSIONS)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise NoInterpreter(f"{SGLANG_PYTHON}={python} has not all it needs ({reason[0]})")
    try:
        return python, version_in(done.stdout)
    except ValueError as error:
        raise NoInterpreter(f"{SGLANG_PYTHON}={python} is no Python ({error})") from None


def version_in(answer: str) -> str:
    """SGLang's version, without its build, in what VERSIONS printed. Raises ValueError."""
    found = re.fullmatch(r"(\d[^\s+]*)(\+\S+)? \d\S*\n", answer)
    if found is None:
        raise ValueError(f"asked for two versions, it printed {answer[:40]!r}")
    return found[1]


def has_sglang_router(python: str) -> bool:
    """Raises NoInterpreter."""
    return _ask(python, "-P", "-c", ROUTER).returncode == 0


def _ask(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    named = f"{SGLANG_PYTHON}={python}" if SGLANG_PYTHON in os.environ else python
    try:
        return subprocess.run(
            [python, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise NoInterpreter(f"{named} did not answer in {TIMEOUT_S} s") from None
    except OSError as error:
        raise NoInterpreter(f"{named} cannot be run ({error})") from None
