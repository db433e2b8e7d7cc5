"""The command lines, environments and settings that a deployment file turns into."""

import json
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from ep_backend.deployment import instances, processes
from ep_backend.deployment.instances import engine_instances, router_instance
from ep_backend.deployment.load import load


@pytest.fixture(autouse=True)
def _any_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_program", lambda name: name)


def test_a_pair_and_its_router(write_file: Callable[..., Path], tmp_path: Path) -> None:
    deployment = load(write_file(("max-num-seqs: 8", "enforce-eager: true, compilation_config: {level: 0}"))).deployment
    prefill, decode = engine_instances(deployment, tmp_path / "run")
    assert prefill.command[6:8] == ["--all2all-backend", "ep_backend"]
    assert "--enforce-eager" in prefill.command
    assert prefill.command[prefill.command.index("--compilation-config") + 1] == '{"level": 0}'
    kv = json.loads(prefill.command[prefill.command.index("--kv-transfer-config") + 1])
    assert kv.pop("kv_connector_extra_config") == {"kv_lease_duration": 30 + 300 + 60}, "longer than any pause of decode"
    assert kv == {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cuda"}
    settings = json.loads(Path(decode.env["EP_BACKEND_SETTINGS"]).read_text())
    assert settings["role"] == "decode"
    assert settings["mode"] == "low_latency"
    assert settings["max_tokens"] == {"low_latency": 256, "hybrid": 256}
    assert decode.agents == [f"http://127.0.0.1:{settings['agent_port'] + rank}" for rank in range(2)]
    router = router_instance(deployment, [prefill, decode])
    assert router is not None
    assert router.command[router.command.index("--prefill") + 1] + "/health" == prefill.health


def test_no_port_is_given_twice_before_anybody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([20000, 20001, 19999, 20002])
    monkeypatch.setattr(processes, "randrange", lambda first, last: next(draws))
    monkeypatch.setattr(processes, "_is_free", lambda port: True)
    monkeypatch.setattr(processes, "_given", deque())
    assert processes.free_ports(2) == 20000
    assert processes.free_ports(2) == 20002


def test_vllm_that_is_only_on_pythons_path_runs_as_a_module(
    write_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise FileNotFoundError(name)

    monkeypatch.setattr(instances, "_program", missing)
    deployment = load(write_file()).deployment
    monkeypatch.setattr(instances, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="vllm"):
        engine_instances(deployment, tmp_path / "run")
    monkeypatch.setattr(instances, "find_spec", lambda name: name)
    command = engine_instances(deployment, tmp_path / "run")[0].command
    assert command[:4] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def test_admin_routes_where_graphs_hold_the_mode_and_only_this_machine_reaches_them(
    write_file: Callable[..., Path], tmp_path: Path
) -> None:
    def open_roles(*replacements: tuple[str, str]) -> list[str]:
        engines = engine_instances(load(write_file(*replacements)).deployment, tmp_path / "run")
        return [engine.name for engine in engines if engine.env.get("VLLM_SERVER_DEV_MODE") == "1"]

    assert open_roles() == ["decode"]  # prefill's all-to-all runs outside graphs
    assert open_roles(("args: {max-num-batched-tokens: 256", "args: {enforce-eager: true, max-num-batched-tokens: 256")) == []
    text = write_file().read_text()
    unified = text[: text.index("  prefill:")] + text[text.index("  decode:") :].replace("decode:", "unified:")
    (tmp_path / "deployment.yaml").write_text(unified)
    (engine,) = engine_instances(load(tmp_path / "deployment.yaml").deployment, tmp_path / "run")
    assert engine.env["VLLM_SERVER_DEV_MODE"] == "1"
    (tmp_path / "deployment.yaml").write_text(unified.replace("router: {", "router: {host: 0.0.0.0, "))
    (engine,) = engine_instances(load(tmp_path / "deployment.yaml").deployment, tmp_path / "run")
    assert "VLLM_SERVER_DEV_MODE" not in engine.env


def test_a_role_on_two_nodes_is_two_launches(write_file: Callable[..., Path], tmp_path: Path) -> None:
    replacements = ("{device: cuda}", "{device: cuda, nodes: 2}"), ("data_parallel: 2", "data_parallel: 4\n    nodes: 2")
    deployment = load(write_file(*replacements)).deployment
    head, second, _ = engine_instances(deployment, tmp_path / "run")
    assert head.health is not None and second.health is None
    assert second.command[-3:] == ["--headless", "--data-parallel-start-rank", "2"]
    settings = [json.loads(Path(launch.env["EP_BACKEND_SETTINGS"]).read_text()) for launch in (head, second)]
    assert [each["gpus_per_node"] for each in settings] == [2, 2]
    # Each launch has an address of its own, as a node has.
    assert [each["agent_host"] for each in settings] == ["127.0.0.1", "127.0.0.2"]
    hosts = [agent.removeprefix("http://").partition(":")[0] for agent in head.agents]
    assert hosts == ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2"]


def test_a_unified_instance_is_its_own_address(write_file: Callable[..., Path], tmp_path: Path) -> None:
    text = write_file().read_text()
    start = text.index("  decode:")
    unified = text[:start].replace("prefill", "unified") + text[text.index("router:") :]
    (tmp_path / "deployment.yaml").write_text(unified)
    deployment = load(tmp_path / "deployment.yaml").deployment
    (engine,) = engine_instances(deployment, tmp_path / "run")
    assert engine.health == f"http://127.0.0.1:{deployment.router.port}/health"
    assert "--kv-transfer-config" not in engine.command
    assert router_instance(deployment, [engine]) is None
