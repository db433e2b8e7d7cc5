"""The schema that ships for editors, and how sizes and presets are read."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from ep_backend.deployment.engines import replaced, table
from ep_backend.deployment.presets import models, topologies
from ep_backend.deployment.resolve import group_of, shape_of, topology
from ep_backend.deployment.schema import Deployment, Model, Role, Topology, json_schema
from ep_backend.plan.calibration import calibrations

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_schema_that_ships_is_current() -> None:
    shipped = json.loads((DEPLOY / "schema" / "deployment.json").read_text())
    assert shipped == json_schema(), "run: ep-backend schema --out deploy/schema/deployment.json"


def test_an_editor_is_offered_the_presets() -> None:
    kinds = json_schema()["$defs"]
    offered = kinds["Topology"]["properties"]["preset"]["anyOf"][0]["enum"]
    assert offered == list(topologies())
    assert kinds["Topology"]["properties"]["calibration"]["anyOf"][0]["enum"] == list(calibrations())
    assert kinds["Model"]["properties"]["preset"]["anyOf"][0]["enum"] == list(models())


def test_the_presets_asked_for_are_there() -> None:
    assert {"h800-nvl8-cx7", "h100-nvl8-cx7", "h200-nvl8-cx7", "h200-nvl4", "b200-nvl8", "gb200-nvl72", "p5-efa"} == set(
        topologies()
    )
    wanted = {"deepseek-v3", "deepseek-r1", "deepseek-v2-lite", "kimi-k2", "qwen3-235b-a22b", "glm-4.5", "gpt-oss-120b"}
    assert wanted == set(models())


@pytest.mark.parametrize(
    ("text", "size"), [("64GiB", 64 << 30), ("1.5 GB", 1_500_000_000), ("512MiB", 512 << 20), (4194304, 4194304)]
)
def test_sizes_have_units(text: object, size: int) -> None:
    assert Topology(hbm=text).hbm == size  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["much", "-1GiB", "", 0])
def test_no_size(text: object) -> None:
    with pytest.raises(ValidationError):
        Topology(hbm=text)  # type: ignore[arg-type]


def test_numbers_replace_the_presets() -> None:
    merged = topology(Topology(preset="h100-nvl8-cx7", nvlink_gbs=200.0, nodes=3))
    assert (merged.nvlink_gbs, merged.nodes, merged.hbm, merged.nvlink_domain) == (200.0, 3, 80 << 30, 8)
    again = Topology.model_validate(Topology(preset="h100-nvl8-cx7", nvlink_gbs=200.0, nodes=3).model_dump())
    assert topology(again) == merged
    shape = shape_of(Model(preset="deepseek-v3", experts=512, moe_layers=10))
    assert (shape.experts, shape.moe_layers, shape.hidden) == (512, 10, 7168)


@pytest.mark.parametrize(
    ("machines", "role", "nodes", "per_node"),
    [
        ({"preset": "h100-nvl8-cx7", "nodes": 4}, {"data_parallel": 32, "nodes": 4}, 4, 8),
        ({"preset": "h100-nvl8-cx7", "nodes": 4}, {"data_parallel": 8, "nodes": 2}, 2, 4),
        ({"preset": "gb200-nvl72", "nodes": 18}, {"data_parallel": 48, "nodes": 12}, 1, 48),
        ({"preset": "gb200-nvl72", "nodes": 36}, {"data_parallel": 144, "nodes": 36}, 2, 72),
        ({"preset": "h200-nvl4", "gpus_per_node": 2}, {"data_parallel": 4}, 2, 2),
        ({}, {"data_parallel": 4, "nodes": 2}, 2, 2),
        ({}, {"data_parallel": 4, "ep": {"gpus_per_node": 2}}, 2, 2),
        ({}, {"data_parallel": 2, "args": {"tensor-parallel-size": 4}}, 1, 8),
        ({}, {"engine": "sglang", "data_parallel": 2, "args": {"tp-size": 8}}, 1, 8),
    ],
)
def test_how_ranks_lie_on_machines(machines: dict[str, object], role: dict[str, object], nodes: int, per_node: int) -> None:
    deployment = Deployment.model_validate(
        {"name": "test", "topology": machines, "model": {"preset": "deepseek-v3"}, "roles": {"unified": role}}
    )
    assert deployment.roles.unified is not None
    group = group_of(deployment, deployment.roles.unified)
    assert (group.nodes, group.gpus_per_node) == (nodes, per_node)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_replaced_names_are_gone_from_the_newest_version(engine: str) -> None:
    newest = table(engine, None)
    assert not set(replaced(engine)["env"]) & set(newest.env)
    deprecated = {"disable-cuda-graph", "enable-dp-attention"}
    assert set(replaced(engine)["flags"]) & set(newest.flags) <= deprecated


def test_flags_with_a_key_after_a_dot_are_keys_of_one_mapping() -> None:
    """The words before the dot are joined by dashes, those after it stay as the engine's class has them."""
    args = {
        "--compilation_config.pass_config.fuse_norm_quant": True,
        "compilation-config": '{"mode": 3, "pass_config": {"eliminate_noops": false}}',
        "compilation-config.pass_config.fuse_act_quant": True,
        "compilation-config.cudagraph_mode": "FULL",
        "max_num_seqs": 8,
    }
    assert Role(data_parallel=2, args=args).flags == {
        "compilation-config": {
            "mode": 3,
            "pass_config": {"eliminate_noops": False, "fuse_norm_quant": True, "fuse_act_quant": True},
            "cudagraph_mode": "FULL",
        },
        "max-num-seqs": 8,
    }
