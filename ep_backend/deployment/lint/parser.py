"""Lets the engine installed here parse a role's flags with its own parser, in a process of its own: it imports torch."""

import json
import subprocess
import sys
from collections.abc import Iterator

from ep_backend.deployment import interpreters
from ep_backend.deployment.engines import installed
from ep_backend.deployment.engines.traits import Engine
from ep_backend.deployment.lint.view import RoleView, problem, views
from ep_backend.deployment.problems import Problem
from ep_backend.deployment.schema import Deployment
from ep_backend.deployment.words import flag_words

# Reads words from stdin and ends as the engine's own command line would.
PROGRAMS = {
    "vllm": """
import json, sys
from importlib import import_module
from vllm.utils.argparse_utils import FlexibleArgumentParser
for name in ("launchers", "common", "openai"):
    try:
        make = import_module(f"vllm.entrypoints.{name}.cli_args").make_arg_parser
    except ImportError:
        continue
    make(FlexibleArgumentParser(prog="vllm serve")).parse_args(json.load(sys.stdin))
    break
else:
    sys.exit("this version of vLLM keeps its parser elsewhere")
""",
    "sglang": """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang serve")
ServerArgs.add_cli_args(parser)
parser.parse_args(["--model-path", "model", *json.load(sys.stdin)])
""",
}
TIMEOUT_S = 300


def check_with_engine(deployment: Deployment) -> Iterator[Problem]:
    """What the parser says of each role whose engine is installed here."""
    for view in views(deployment):
        found = _python_of(view.role.engine)
        if found is not None and (complaint := _complaint(view, *found)):
            yield problem("EP306", (*view.place, "args"), *complaint)


def _python_of(engine: Engine) -> tuple[str, str] | None:
    """The Python that has the engine, and the engine's version."""
    if engine == "vllm":
        version = installed(engine)
        return (sys.executable, version) if version is not None else None
    try:
        return interpreters.sglang()
    except interpreters.NoInterpreter:
        return None


def _complaint(view: RoleView, python: str, version: str) -> tuple[str, str] | None:
    """What is wrong, and the fix."""
    engine = view.role.engine
    try:
        done = subprocess.run(
            [python, "-P", "-c", PROGRAMS[engine]],
            input=json.dumps(flag_words(view.role.flags)),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"{engine} {version} has not parsed them in {TIMEOUT_S:g} s", "find out why, or leave out --engine"
    last = done.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
    return (f"{engine} {version} refuses: {last[0]}", "correct the flag") if done.returncode else None
