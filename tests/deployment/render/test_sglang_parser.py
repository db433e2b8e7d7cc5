"""Rendered commands, read by SGLang's own parser with the plug-in loaded."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from .conftest import GOLDEN, Launcher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is in an environment of its own: ./ep test sglang"),
]

PARSER = """
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


def read(commands: list[list[str]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", PARSER], input=json.dumps(commands), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    parsed: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return parsed


def test_every_command(launcher: Launcher, rendered: Callable[..., Path]) -> None:
    folder = rendered("sglang")
    nodes = (("prefill", 0), ("prefill", 1), ("decode", 0))
    calls = [launcher.node(folder / role / "launch.sh", node) for role, node in nodes]
    assert {tuple(call.arguments[:2]) for call in calls} == {("-m", "sglang.launch_server")}
    for (role, node), arguments in zip(nodes, read([call.arguments[2:] for call in calls]), strict=True):
        ranks = 16 if role == "prefill" else 8
        expected = {"model_path": "deepseek-ai/DeepSeek-V2-Lite", "moe_a2a_backend": "ep_backend", "disaggregation_mode": role}
        expected |= {"tp_size": ranks, "attn_dp_size": ranks, "node_rank": node, "host": "0.0.0.0"}
        assert expected.items() <= arguments.items()
        assert arguments["enable_two_batch_overlap"] == (role == "prefill")
    assert arguments["cuda_graph_bs_decode"] == [1, 8, 64, 128]


def test_the_published_setup(launcher: Launcher, rendered: Callable[..., Path]) -> None:
    """deploy/deepseek-v3-h100-sglang.yaml, whose six source commands this version's parser refuses."""
    text = (GOLDEN.parents[3] / "deploy" / "deepseek-v3-h100-sglang.yaml").read_text()
    folder = rendered("sglang", ((GOLDEN / "sglang.yaml").read_text(), text))
    calls = [launcher.node(folder / "decode" / "launch.sh", node) for node in (0, 8)]
    leader, last = read([call.arguments[2:] for call in calls])
    assert {key for key in leader if leader[key] != last[key]} == {"node_rank"}
    assert (leader["tp_size"], leader["max_running_requests"], leader["cuda_graph_max_bs_decode"]) == (72, 18432, 256)
