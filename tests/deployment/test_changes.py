"""Each change of a deployment is hot, drain, restart or redeploy, and `flip` uses the same classes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ep_backend.control.changes import changes as flip_changes
from ep_backend.deployment.changes import CLASSES, changes, reachable
from ep_backend.deployment.load import read
from ep_backend.deployment.rank_settings import rank_settings
from ep_backend.deployment.schema import Deployment
from ep_backend.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
SGLANG = read(DEPLOY / "deepseek-v3-h100-sglang.yaml")[0].deployment
EP128 = read(DEPLOY / "deepseek-v3-h800-ep128.yaml")[0].deployment
UNIFIED = read(DEPLOY / "gpt-oss-120b-h200x4.yaml")[0].deployment


def changed(*place_and_value: Any, base: Deployment = EP128) -> Deployment:
    *place, value = place_and_value
    document = base.model_dump()
    at = document
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    return Deployment.model_validate(document)


EAGER = changed("roles", "decode", "args", {"enforce-eager": True})

CASES = {
    "mode, captured": (EP128, ("roles", "decode", "ep", "mode", "low_latency"), "drain"),
    "mode, captured by SGLang": (SGLANG, ("roles", "decode", "ep", "mode", "hybrid"), "restart"),
    "mode, eager": (EAGER, ("roles", "decode", "ep", "mode", "low_latency"), "hot"),
    "mode on a CPU": (changed("topology", "device", "cpu"), ("roles", "decode", "ep", "mode", "hybrid"), "hot"),
    "prefill within its buffer": (EP128, ("roles", "prefill", "ep", "mode", "hybrid"), "hot"),
    "unified in prefill's layout": (UNIFIED, ("roles", "unified", "ep", "mode", "normal"), "hot"),
    "unified in decode's layout": (
        changed("roles", "unified", "ep", "mode", "low_latency", base=UNIFIED),
        ("roles", "unified", "ep", "mode", "hybrid"),
        "drain",
    ),
    "across families": (EP128, ("roles", "decode", "ep", "mode", "normal"), "restart"),
    "capacity": (EP128, ("roles", "decode", "ep", "max_tokens", 256), "restart"),
    "EP size": (EP128, ("roles", "decode", "data_parallel", 64), "restart"),
    "timeout": (EP128, ("roles", "decode", "ep", "timeout_s", 5.0), "restart"),
    "engine of a pair": (EP128, ("roles", "decode", "engine", "sglang"), "redeploy"),
    "engine alone": (UNIFIED, ("roles", "unified", "engine", "sglang"), "restart"),
    "engine flag": (EP128, ("roles", "decode", "args", "max-num-seqs", 64), "restart"),
    "variable": (EP128, ("roles", "decode", "env", "NCCL_DEBUG", "INFO"), "restart"),
    "calibration": (EP128, ("topology", "calibration", "link-rate"), "hot"),
    "routing": (EP128, ("model", "routing", "kind", "group_limited"), "hot"),
    "nodes": (EP128, ("topology", "nodes", 24), "redeploy"),
    "router": (EP128, ("router", "port", 9000), "redeploy"),
    "patience": (EP128, ("target", "start_timeout_s", 900.0), "hot"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_class_of_a_change(case: str) -> None:
    base, change, kind = CASES[case]
    (found,) = changes(base, changed(*change, base=base))
    assert found.place == change[:-1]
    assert found.new == change[-1]
    assert found.kind == kind
    assert found.why
    assert found.role == (change[1] if change[0] == "roles" else None)


@pytest.mark.parametrize(
    "place", [("control", "key"), ("roles", "decode", "args", "api-key"), ("roles", "decode", "env", "HF_TOKEN")]
)
def test_a_secret_that_changes_is_not_shown(place: tuple[str, ...]) -> None:
    (given,) = changes(EP128, changed(*place, "s3cret-of-the-night"))
    (changed_,) = changes(changed(*place, "another-of-the-day"), changed(*place, "s3cret-of-the-night"))
    assert given.place == changed_.place == place and given.old is None
    for found in (given, changed_):
        assert "s3cret" not in str(found) and "another" not in str(found)
    assert (changed_.old, changed_.new) == ("***", "***")


def test_nothing_changed() -> None:
    assert changes(EP128, EP128) == []


def test_a_role_more_starts_all_anew() -> None:
    unified = changed("roles", {"unified": EP128.roles.decode.model_dump() if EP128.roles.decode else None})
    assert {(c.place, c.role, c.kind) for c in changes(EP128, unified)} == {
        (("roles", name), None, "redeploy") for name in ("prefill", "decode", "unified")
    }


def test_what_a_role_reaches_without_a_restart() -> None:
    assert reachable(EP128, "decode", "hybrid") == ["low_latency", "hybrid", "auto"]
    assert reachable(EP128, "prefill", "direct") == ["normal", "direct", "hybrid", "auto"]


def test_by_puts_hybrid_is_all_that_a_role_reaches() -> None:
    rail_only = read(DEPLOY / "qwen3-235b-rail-only.yaml")[0].deployment
    for name, role in rail_only.roles.items():
        assert reachable(rail_only, name, role.ep.mode) == ["hybrid", "auto"]
        settings = rank_settings(rail_only, name, role, "127.0.0.1", 9000)
        assert (settings["rail"], settings["max_tokens"]) == ("put", {"hybrid": role.ep.max_tokens})
        Settings.model_validate_json(json.dumps(settings), strict=True)
    (change,) = changes(rail_only, changed("roles", "decode", "ep", "rail", None, base=rail_only))
    assert change.kind == "restart"


def test_a_role_that_was_flipped_goes_back_to_where_it_started() -> None:
    """hybrid is of both families where there are several nodes."""
    two_by_two = read(DEPLOY / "h200x4-vllm-prefill.yaml")[0].deployment
    flipped = changed("roles", "unified", "ep", "mode", "hybrid", base=two_by_two)
    (back,) = changes(flipped, two_by_two, {"unified": "normal"})
    assert back.kind == "hot"
    (over,) = changes(flipped, changed("roles", "unified", "ep", "mode", "low_latency", base=two_by_two), {"unified": "normal"})
    assert over.kind == "restart"
    (anew,) = changes(flipped, two_by_two)
    assert anew.kind == "restart"


def leaves(model: dict[str, Any], place: str = "") -> Iterator[str]:
    for key, value in model.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{place}{key}.")
        else:
            yield f"{place}{key}"


def test_every_key_of_the_schema_has_a_class() -> None:
    """The last patterns are catch-alls; a key outside them would have none."""
    roots = {pattern.split(".")[0].rstrip("*") for pattern, _, _ in CLASSES}
    assert {place.split(".")[0] for place in leaves(EP128.model_dump())} == roots


def test_flip_acts_on_the_same_classes() -> None:
    for base, change, kind in CASES.values():
        actions = {"hot": "flip", "drain": "flip", "restart": "restart", "redeploy": "redeploy"}
        found = [c.action for c in flip_changes(base, changed(*change, base=base), {})]
        assert found == ([actions[kind]] if change[0] == "roles" or kind != "hot" else []), change
    assert flip_changes(EP128, changed("topology", "calibration", "link-rate"), {}) == []
