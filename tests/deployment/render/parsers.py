"""The engines' own parsers, each in a process of its own, with this package's plug-in loaded."""

import json
import subprocess
import sys
from typing import Any

VLLM = """
import json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parsed = []
for words in json.load(sys.stdin):
    parser = FlexibleArgumentParser()
    make_arg_parser(parser.add_subparsers(dest="command", parser_class=FlexibleArgumentParser).add_parser("serve"))
    arguments = parser.parse_args(words)
    validate_parsed_serve_args(arguments)
    parsed.append(vars(arguments))
print(json.dumps(parsed, default=str))
"""
SGLANG = """
import argparse, json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
parsed = []
for words in json.load(sys.stdin):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed.append(vars(parser.parse_args(ConfigArgumentMerger(parser).merge_config_with_args(words))))
print(json.dumps(parsed, default=str))
"""


def parsed(program: str, commands: list[list[str]]) -> list[dict[str, Any]]:
    """What the parser made of each command's words."""
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(commands), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found
