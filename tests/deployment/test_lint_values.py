"""What an engine's flags take, by the tables alone: no engine is installed or started for these."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import JsonValue

from ep_backend.deployment.engines import installed, table
from ep_backend.deployment.lint.report import findings_of
from ep_backend.deployment.lint.values import refused, refused_inside
from ep_backend.deployment.load import load
from ep_backend.deployment.problems import DeploymentError

WriteFile = Callable[..., Path]


@pytest.mark.parametrize(
    ("engine", "flag", "good", "bad"),
    [
        ("vllm", "max-num-seqs", [8, "8"], ["many", 8.0, True, [8], {"a": 1}, None, "8k"]),
        ("vllm", "max-num-batched-tokens", [2048, "8k", "1.5K"], ["auto", "8 k", "", 1e3]),
        ("vllm", "max-model-len", [4096, "auto", "32K", -1], ["long"]),
        ("vllm", "gpu-memory-utilization", [0.9, 1, "0.9", "9e-1", ".9"], ["most", True, [0.9], "0.9.1"]),
        ("vllm", "enforce-eager", [True, False], ["yes", 1, "true", None]),
        ("vllm", "cudagraph-capture-sizes", [[1, 2], 8], [[], [1, "x"], "all"]),
        ("vllm", "chat-template", ["a.jinja", 5], [True, ["a"], None]),
        ("vllm", "dcp-comm-backend", ["ag_rs", "a2a"], ["a2b", True, ["a2a"]]),
        ("vllm", "compilation-config", [{"cudagraph_mode": "FULL"}, "{}", 3], [None]),
        ("sglang", "enable-dp-lm-head", [True, False], [1, "on"]),
        ("sglang", "max-prefill-tokens", [8192, -1, "8k"], ["all", [1]]),
        ("sglang", "attention-backend", ["fa3"], ["fa9", ["fa3"]]),
        ("sglang", "cuda-graph-bs-decode", [[8, 16]], [["8.5"], [True]]),
    ],
)
def test_what_a_flag_takes(engine: str, flag: str, good: list[JsonValue], bad: list[JsonValue]) -> None:
    takes = table(engine, None).flags[flag]
    assert [value for value in good if refused(takes, value)] == []
    assert [value for value in bad if not refused(takes, value)] == []


@pytest.mark.parametrize(
    ("flag", "key", "good", "bad"),
    [
        ("speculative-config", "num_speculative_tokens", [2, "2", 2.0, None], ["two", 1.5, [2], {"a": 1}]),
        ("eplb-config", "log_balancedness", [True, "false", 1, "off"], ["sometimes", 2, [True]]),
        ("kv-transfer-config", "kv_load_failure_policy", ["fail"], ["ignore", True, ["fail"]]),
        ("compilation-config", "cudagraph_mode", ["full", "ANY"], []),  # rewritten before its type is looked at
    ],
)
def test_what_a_key_of_a_json_flag_takes(flag: str, key: str, good: list[JsonValue], bad: list[JsonValue]) -> None:
    takes = table("vllm", None).inside[flag][key]
    assert [value for value in good if refused_inside(takes, value)] == []
    assert [value for value in bad if not refused_inside(takes, value)] == []


def test_keys_of_json_flags_are_those_of_the_version(write_file: WriteFile) -> None:
    """kv_parallel_size was there in 0.26, and is gone."""
    flag = ("max-num-seqs: 8", "kv-transfer-config: {kv_parallel_size: 2}")
    assert findings_of(write_file(image("0.26.0"), flag)) == []
    (found,) = findings_of(write_file(image("0.33.0"), flag))
    assert "kv-transfer-config.kv_parallel_size: is no key of kv-transfer-config in vllm 0.33.0; " in str(found)
    assert found.problem.code == "EP314"


def image(version: str) -> tuple[str, str]:
    return ("model: {path: model}", f"model: {{path: model}}\ntarget: {{image: {{packages: {{vllm: {version}}}}}}}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("max-num-seqs: eight", "max-num-seqs: is eight, but vllm {} takes a whole number; write a whole number [EP309]"),
        ("max-num-seqs: 8.0", "max-num-seqs: is 8.0, but vllm {} takes a whole number; write 8 [EP309]"),
        ("enforce-eager: yes", "enforce-eager: is yes, but vllm {} takes true or false; write true [EP309]"),
        ("seed: ", "seed: is null, but vllm {} takes a value; leave the flag out to have its default, or give it"),
        ("dcp-comm-backend: a2b", "is a2b, but vllm {} takes ag_rs or a2a; did you mean `a2a`? [EP309]"),
        (
            "gpu-memory-utilization: 1e300",
            "is 1e+300, must be a share of the GPU's memory, above 0 and at most 1; write one such",
        ),
        ("gpu-memory-utilization: -0.5", "is -0.5, must be a share of the GPU's memory, above 0 and at most 1; write one such"),
        ("seed: [1, null]", "is [1, null], but vllm {} takes a whole number; write a whole number [EP309]"),
    ],
)
def test_a_value_is_told_with_line_rule_and_fix(given: str, said: str, write_file: WriteFile) -> None:
    file = write_file(("max-num-seqs: 8", given))
    (found,) = findings_of(file)
    version = table("vllm", installed("vllm")).version
    assert str(found).startswith(f"{file}:8:42: roles.prefill.args.")
    assert said.format(version) in str(found)


def test_nothing_follows_from_a_refused_value(write_file: WriteFile) -> None:
    """Its number would be the batch: without it the default is compared with max_tokens, and disagrees."""
    file = write_file(("args: {max-num-batched-tokens: 256}", "args: {max-num-batched-tokens: lots}"))
    with pytest.raises(DeploymentError) as caught:
        load(file)
    (line,) = caught.value.lines
    assert "roles.decode.args.max-num-batched-tokens: is lots, but vllm " in line


def test_choices_of_an_unknown_version_are_not_judged(write_file: WriteFile) -> None:
    other = ("model: {path: model}", "model: {path: model}\ntarget: {image: {packages: {vllm: 0.33.9}}}")
    assert findings_of(write_file(other, ("max-num-seqs: 8", "dcp-comm-backend: newer"))) == []
    (found,) = findings_of(write_file(other, ("max-num-seqs: 8", "max-num-seqs: newer")))
    assert found.problem.code == "EP309"
