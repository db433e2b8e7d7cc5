"""A whole deployment's plan: the keys and figures that others rely on, memory, and what auto picks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_backend.deployment import instances
from ep_backend.deployment.load import load
from ep_backend.deployment.presets import models, topologies
from ep_backend.deployment.schema import Deployment
from ep_backend.layout import LINE_TOKENS
from ep_backend.modes import Mode
from ep_backend.plan.calibration import OPS, calibrations
from ep_backend.plan.memory import memory
from ep_backend.plan.model import GIB, model_shape
from ep_backend.plan.planner import plan
from ep_backend.plan.result import Plan
from ep_backend.policy import Forward, Role, Situation, decide
from ep_backend.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
EP128 = DEPLOY / "deepseek-v3-h800-ep128.yaml"


@pytest.fixture(scope="module")
def ep128() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(plan(load(EP128).deployment).as_dict()))
    return made


def unified(ranks: int = 16, tokens: int = 128, topology: str = "h100-nvl8-cx7", **ep: Any) -> Deployment:
    """A minimal deployment to plan with."""
    document = {
        "name": "test",
        "topology": {"preset": topology, "nodes": 64},
        "model": {"preset": "deepseek-v3"},
        "roles": {"unified": {"data_parallel": ranks, "nodes": max(1, ranks // 8), "ep": {"max_tokens": tokens, **ep}}},
        "target": {"kind": "slurm"},
    }
    return Deployment.model_validate(document)


def modes(deployment: Deployment) -> dict[str, Any]:
    return plan(deployment).as_dict()["roles"]["unified"]["modes"]  # type: ignore[no-any-return]


def test_the_figures_of_ep128(ep128: dict[str, Any]) -> None:
    decode = ep128["roles"]["decode"]
    low_latency, hybrid = decode["modes"]["low_latency"], decode["modes"]["hybrid"]
    assert low_latency["nic_bytes"] == pytest.approx(7.11e6, rel=5e-4)
    assert low_latency["dispatch_us"] == pytest.approx(189.6, abs=0.05)
    assert low_latency["copies"] == 7.5
    assert hybrid["copies"] == pytest.approx(6.116, abs=5e-4)
    assert hybrid["nic_bytes"] == pytest.approx(5.91e6, rel=5e-4)
    assert hybrid["record_bytes"] == 7552
    assert round(hybrid["bandwidth_us"]) == 129
    assert decode["gpus_per_token"] == pytest.approx(7.890, abs=5e-4)


def test_every_documented_key_is_there_and_no_other(ep128: dict[str, Any]) -> None:
    """docs/plan.md names each key of the JSON once, in backquotes at the start of a table row."""
    documented = {
        line.split("`")[1] for line in (DEPLOY.parent / "docs" / "plan.md").read_text().splitlines() if line.startswith("| `")
    }
    keys: set[str] = set()

    def collect(value: object) -> None:
        if isinstance(value, dict):
            for key, below in value.items():
                keys.add(key)
                if key != "buffer":
                    collect(below)

    collect(ep128)
    assert documented == keys - {"prefill", "decode", *(mode.value for mode in Mode)}


def test_auto_is_the_faster_mode_over_several_nodes(ep128: dict[str, Any]) -> None:
    for role in ep128["roles"].values():
        assert role["auto"] == "hybrid"
        assert "estimates" in role["auto_reason"]
    decode = ep128["roles"]["decode"]["modes"]
    assert decode["hybrid"]["layer_us"] < decode["low_latency"]["layer_us"]


def test_auto_takes_low_latency_where_hybrid_saves_too_little() -> None:
    """On two nodes a token has 4 remote experts on one remote node, but 2 tokens are bound by the fixed part."""
    role = plan(unified(16, 2, mode="low_latency")).roles["unified"]
    assert role.auto == "low_latency"
    assert plan(unified(16, 1024, mode="low_latency")).roles["unified"].auto == "hybrid"


@pytest.mark.parametrize(
    ("ranks", "ep", "beyond"),
    [
        (64, {"rail": "put"}, "the role has 64 ranks, and the kernels serve up to 32"),
        (16, {}, "the role spans 2 NVLink domains, between which only hybrid goes, with ep.rail: put"),
        (16, {"mode": "hybrid", "rail": "put"}, None),
        (8, {"gpus_per_node": 4}, None),
    ],
)
def test_what_engines_would_refuse_is_told(ranks: int, ep: dict[str, Any], beyond: str | None) -> None:
    """Virtual nodes of one host map each other's memory."""
    told = plan(unified(ranks, **ep)).roles["unified"].assumptions
    said = [line for line in told if line.startswith("a plan alone")]
    assert said == ([f"a plan alone, for engines would refuse to start: {beyond}"] if beyond else [])


def test_auto_leaves_out_what_does_not_fit() -> None:
    """Slots for 500 000 tokens exceed the GPU, rings do not."""
    role = plan(unified(8, 500_000, "h200-nvl8-cx7")).roles["unified"]
    assert (role.auto, role.modes["direct"].fits, role.modes["normal"].fits) == ("normal", False, True)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([2, 4, 8, 16, 32, 64]))
def test_times_and_bytes_grow_with_the_batch(one: int, other: int, ranks: int) -> None:
    fewer, more = (modes(unified(ranks, tokens)) for tokens in sorted((one, other)))
    for mode in fewer:
        for key in ("nic_bytes", "nvlink_bytes", "dispatch_us", "combine_us", "step_ms"):
            assert fewer[mode][key] <= more[mode][key]
        if min(one, other) > LINE_TOKENS or max(one, other) <= LINE_TOKENS:  # larger batches have no lines of sums
            assert fewer[mode]["buffer_bytes"] <= more[mode]["buffer_bytes"]
        assert more[mode]["dispatch_us_low"] <= more[mode]["dispatch_us"] <= more[mode]["dispatch_us_high"]


def test_fewer_sms_never_make_it_faster() -> None:
    free, few = modes(unified(16, 4096)), modes(unified(16, 4096, sms=4))
    assert few["normal"]["bottleneck"] == "sms"
    assert few["normal"]["dispatch_us"] > free["normal"]["dispatch_us"]
    assert few["low_latency"]["dispatch_us"] == free["low_latency"]["dispatch_us"]


def test_one_domain_sends_nothing_over_the_nic() -> None:
    for numbers in modes(unified(8)).values():
        assert numbers["nic_bytes"] == 0
        assert numbers["copies"] == numbers["nvlink_copies"] > 0


def test_virtual_nodes_send_everything_over_nvlink() -> None:
    """4 GPUs of one host as 2 x 2: the rail is NVLink too, so its bytes share the port."""
    document = unified(4, 128, "h200-nvl4").model_dump()
    document["roles"]["unified"]["ep"]["gpus_per_node"] = 2
    found = plan(Deployment.model_validate(document)).roles["unified"].modes["hybrid"]
    assert (found.bottleneck, found.nic_copies > 0) == ("nvlink", True)
    assert found.bandwidth_us == pytest.approx((found.nic_bytes + found.nvlink_bytes) / 345e3)


def test_nvl72_is_one_domain() -> None:
    role = plan(unified(32, 128, "gb200-nvl72")).roles["unified"]
    assert (role.nodes, role.gpus_per_node) == (1, 32)


def test_buffer_bytes_are_those_that_the_buffer_allocates() -> None:
    pytest.importorskip("torch")
    from ep_backend.buffer import EpBuffer

    deployment = load(EP128).deployment
    for name, tokens, lanes, ranks, made_for in (
        ("prefill", 4096, 1, 32, ("normal", "direct", "hybrid")),
        ("decode", 128, 2, 128, ("low_latency", "hybrid")),
    ):
        assert plan(deployment).roles[name].buffer == EpBuffer.size_hint(
            ranks,
            hidden=7168,
            num_experts=256,
            top_k=8,
            max_tokens=dict.fromkeys(made_for, tokens),
            lanes=lanes,
            payloads=("fp8",),
            gpus_per_node=8,
            fabric="nvshmem",
        )


def test_memory_adds_up_and_the_limits_are_the_limits() -> None:
    deployment = load(EP128).deployment
    role = deployment.roles.decode
    assert role is not None
    shape = model_shape(models()["deepseek-v3"])
    held = memory(deployment, "decode", role, shape, 128)
    parts = held.weight_bytes + held.buffer_bytes + held.reserve_bytes + held.kv_bytes
    assert parts == pytest.approx(0.92 * 80 * GIB)
    for tokens, fits in ((held.largest_capacity, True), (held.largest_capacity + 1, False)):
        assert (memory(deployment, "decode", role, shape, tokens).kv_bytes >= 0) is fits
    for batch, fits in ((held.largest_batch, True), (held.largest_batch + 1, False)):
        assert (memory(deployment, "decode", role, shape, batch).sequences >= batch) is fits


@pytest.mark.parametrize("share", [0.5, "0.5", ".5", "5e-1"])
def test_the_share_of_memory_is_read_however_it_is_spelt(share: float | str) -> None:
    deployment = unified()
    document = deployment.model_dump()
    document["roles"]["unified"]["args"] = {"gpu-memory-utilization": share}
    held = plan(Deployment.model_validate(document)).as_dict()["roles"]["unified"]["memory"]
    assert held["fraction"] == 0.5


@pytest.mark.parametrize("name", models())
def test_parameters_are_the_published_ones(name: str) -> None:
    assert model_shape(models()[name]).parameters == pytest.approx(models()[name]["published_parameters"], rel=0.01)


def test_kv_bytes_of_mla_and_of_grouped_queries() -> None:
    """DeepSeek-V3 caches 512 + 64 numbers a layer, Qwen3-235B 2 x 4 heads of 128."""
    assert model_shape(models()["deepseek-v3"]).kv_bytes(1, 2) == 61 * 576 * 2
    assert model_shape(models()["deepseek-v3"]).kv_bytes(8, 2) == 61 * 576 * 2
    assert model_shape(models()["qwen3-235b-a22b"]).kv_bytes(4, 2) == 94 * 2 * 128 * 2


def test_a_config_that_says_too_little_names_the_key() -> None:
    with pytest.raises(ValueError, match="it has no num_hidden_layers"):
        model_shape({"hidden_size": 7168})


@pytest.mark.parametrize("topology", topologies())
@pytest.mark.parametrize("model", models())
def test_every_preset_plans(topology: str, model: str) -> None:
    """gpt-oss has rows of 2880, for which there is no fp8 form: bf16 everywhere here."""
    deployment = Deployment.model_validate(
        {
            "name": "test",
            "topology": {"preset": topology, "nodes": 4},
            "model": {"preset": model},
            "roles": {"unified": {"data_parallel": 4, "ep": {"max_tokens": 64}}},
        }
    )
    made: Plan = plan(deployment)
    assert all(numbers.dispatch_us > 0 for numbers in made.roles["unified"].modes.values())


@pytest.mark.parametrize("name", calibrations())
def test_every_calibration_has_a_line_for_every_case(name: str) -> None:
    for mode in Mode:
        for op in OPS:
            assert [calibrations()[name].line(mode, op, nodes).nodes <= nodes for nodes in (1, 2, 3, 64)] == [True] * 4


def test_all_shipped_deployments_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [file for file in DEPLOY.glob("*.yaml") if "path:" not in file.read_text()]
    assert len(files) >= 4
    for file in files:
        assert file.read_text().startswith("# ")
        assert all(role.auto != "none" for role in plan(load(file).deployment).roles.values()), file


def test_what_the_plan_says_auto_picks_is_what_the_engine_will_pick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without estimates the policy compares 8 picks with 16 nodes, and would take low_latency."""
    (tmp_path / "config.json").write_text(json.dumps(models()["deepseek-v3"]))
    document = load(EP128).deployment.model_dump()
    document |= {"model": {"path": tmp_path}, "target": {"kind": "local"}}
    monkeypatch.setattr(instances, "_program", lambda name: name)
    engines = instances.engine_instances(Deployment.model_validate(document), tmp_path / "run")
    decode = next(engine for engine in engines if engine.role == "decode")
    settings = Settings.model_validate_json(Path(decode.env["EP_BACKEND_SETTINGS"]).read_text())
    capacity = dict.fromkeys((Mode.LOW_LATENCY, Mode.HYBRID), 128)
    situation = Situation(Role.DECODE, Forward.MIXED, 128, capacity, 8, 16)
    assert decide(situation).mode is Mode.LOW_LATENCY
    assert decide(replace(situation, estimates=settings.estimates)).mode is Mode.HYBRID
    prefill = next(engine for engine in engines if engine.role == "prefill")
    assert Settings.model_validate_json(Path(prefill.env["EP_BACKEND_SETTINGS"]).read_text()).estimates == {}


def routed(**routing: Any) -> dict[str, Any]:
    document = unified(64, 128, mode="low_latency").model_dump()
    document["model"]["routing"] = routing
    return modes(Deployment.model_validate(document))


def test_the_routing_of_the_file_decides_the_copies(tmp_path: Path) -> None:
    uniform, grouped = routed(), routed(kind="group_limited")
    four = routed(kind="measured", nodes_per_token=4)
    assert four["hybrid"]["copies"] == pytest.approx(4 * 7 / 8)
    assert grouped["hybrid"]["copies"] < four["hybrid"]["copies"] < uniform["hybrid"]["copies"]
    assert uniform["low_latency"]["copies"] == grouped["low_latency"]["copies"] == 7


def test_a_hot_expert_makes_the_port_of_its_gpu_the_slowest(tmp_path: Path) -> None:
    """The bytes that a rank sends hardly change, the time does."""
    counts = [1.0] * 256
    (tmp_path / "even.json").write_text(json.dumps({"expert_counts": counts}))
    (tmp_path / "hot.json").write_text(json.dumps({"expert_counts": [64.0, *counts[1:]]}))
    even, hot = (routed(kind="measured", expert_counts=tmp_path / name) for name in ("even.json", "hot.json"))
    assert hot["low_latency"]["nic_bytes"] == even["low_latency"]["nic_bytes"]
    assert hot["low_latency"]["bandwidth_us"] > 3 * even["low_latency"]["bandwidth_us"]
    assert hot["hybrid"]["bandwidth_us"] < hot["low_latency"]["bandwidth_us"]
