"""Rendered commands, read by vLLM's own parser with the plug-in loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ep_backend.deployment.engines import installed
from ep_backend.deployment.migrate import migrate
from ep_backend.deployment.render import render, write

from ..migrate.cases import CASES
from .conftest import Launcher
from .parsers import VLLM, parsed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed("vllm") is None, reason="vllm is in an environment of its own: ./ep test"),
]


def test_every_command(
    launcher: Launcher, rendered: Callable[..., Path], rendered_case: Callable[..., Path], tmp_path: Path
) -> None:
    """The golden pair, and what migrated vLLM setups become: one process, for the parser takes long to load."""
    folder = rendered("vllm")
    nodes = [(role, node) for role in ("prefill", "decode") for node in (0, 1)]
    commands = [launcher.node(folder / role / "launch.sh", node).arguments for role, node in nodes]
    for name in ("vllm-two-nodes", "vllm-dep16", "vllm-disaggregatedset"):
        folder = rendered_case(name)
        for role, (count, *_) in CASES[name].roles.items():
            commands += [launcher.node(folder / role / "launch.sh", node).arguments for node in range(count)]
    command = "vllm serve deepseek-ai/DeepSeek-V3 -ep -dp 16 -dpl 8 -O3 -cc.max_cudagraph_capture_size 128"
    file = tmp_path / "spellings.yaml"
    file.write_text(migrate([("here.sh", f"{command} --middleware a.B --middleware c.D")]).text)
    write(render(file), tmp_path / "spellings")
    commands += [launcher.node(tmp_path / "spellings" / "unified" / "launch.sh", node).arguments for node in (1, 0)]
    found = parsed(VLLM, commands)
    assert (found[-1]["middleware"], found[-1]["optimization_level"]) == (["a.B", "c.D"], "3")
    assert "max_cudagraph_capture_size" in found[-1]["compilation_config"]
    for arguments in found:
        assert (arguments["data_parallel_size"], arguments["data_parallel_size_local"]) == (16, 8)
        assert (arguments["all2all_backend"], arguments["enable_expert_parallel"]) == ("ep_backend", True)
        assert arguments["data_parallel_start_rank"] == (8 if arguments["headless"] else None)
    for arguments, (role, node) in zip(found[: len(nodes)], nodes, strict=True):
        assert arguments["model_tag"] == "/models/DeepSeek-V3"
        assert arguments["data_parallel_address"] == "127.0.0.1"
        assert (arguments["enable_dbo"], arguments["headless"]) == (role == "decode", node == 1)


def test_the_router(launcher: Launcher, rendered: Callable[..., Path]) -> None:
    launch_router = pytest.importorskip("vllm_router.launch_router", reason="vllm-router is not installed")
    code, error, (call,) = launcher.run(rendered("vllm") / "router.sh", PREFILL="a", DECODE="b")
    assert code == 0, error
    arguments = launch_router.parse_router_args(call.arguments)
    assert (arguments.prefill_urls, arguments.decode_urls) == ([("http://a:20000", None)], ["http://b:22000"])
    assert (arguments.host, arguments.port, arguments.kv_connector) == ("0.0.0.0", 8000, "nixl")
