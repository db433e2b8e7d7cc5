"""Rendered commands, read by SGLang's own parser with the plug-in loaded."""

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from ep_backend.deployment import engines

from ..migrate.cases import CASES
from ..parser_values import disagreements
from .conftest import GOLDEN, Launcher
from .parsers import SGLANG, parsed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is in an environment of its own: ./ep test sglang"),
]


def test_what_the_table_says_of_values_is_what_the_parser_does() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    table = engines.table("sglang", engines.installed("sglang"))
    assert disagreements(parser, table.flags) == []
    assert set(table.flags) <= {name[2:] for name in parser._option_string_actions}


def test_every_command(launcher: Launcher, rendered: Callable[..., Path]) -> None:
    folder = rendered("sglang")
    nodes = (("prefill", 0), ("prefill", 1), ("decode", 0))
    calls = [launcher.node(folder / role / "launch.sh", node) for role, node in nodes]
    assert {tuple(call.arguments[:2]) for call in calls} == {("-m", "sglang.launch_server")}
    for (role, node), arguments in zip(nodes, parsed(SGLANG, [call.arguments[2:] for call in calls]), strict=True):
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
    leader, last = parsed(SGLANG, [call.arguments[2:] for call in calls])
    assert {key for key in leader if leader[key] != last[key]} == {"node_rank"}
    assert (leader["tp_size"], leader["max_running_requests"], leader["cuda_graph_max_bs_decode"]) == (72, 18432, 256)


def test_migrated_commands(launcher: Launcher, rendered_case: Callable[..., Path]) -> None:
    """Public setups, most of which this version's parser refuses as they were published."""
    commands, ranks = [], []
    for name, case in CASES.items():
        if name.startswith("sglang"):
            folder = rendered_case(name)
            for role, (nodes, data_parallel, *_) in case.roles.items():
                commands.append(launcher.node(folder / role / "launch.sh", nodes - 1).arguments[2:])
                ranks.append((data_parallel, data_parallel, role))
    found = parsed(SGLANG, commands)
    assert [(each["tp_size"], each["attn_dp_size"], each["disaggregation_mode"]) for each in found] == ranks
    assert len(found) == 10
