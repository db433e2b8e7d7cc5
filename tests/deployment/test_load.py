"""Every fault of a file is one line with its place, value, rule and fix, found before anything is loaded."""

import json
import os
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

from ep_backend.deployment.lint.report import findings_of
from ep_backend.deployment.load import load, name_in
from ep_backend.deployment.problems import DeploymentError
from ep_backend.deployment.schema import ModeName, modes_of
from ep_backend.modes import Mode

from .conftest import CONFIG

WriteFile = Callable[..., Path]


def lines_of(file: Path) -> list[str]:
    with pytest.raises(DeploymentError) as caught:
        load(file)
    return caught.value.lines


def test_a_good_file_loads_with_paths_relative_to_it(write_file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_file()
    monkeypatch.chdir("/")
    deployment = load(file).deployment
    assert deployment.model.path == file.parent / "model"
    assert [name for name, _ in deployment.roles.items()] == ["prefill", "decode"]


def test_the_shipped_preset_loads(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "deploy" / "local-cpu.yaml"
    assert source.read_text().startswith("#")
    (tmp_path / "deploy").mkdir()
    (tmp_path / ".ep" / "checkpoint").mkdir(parents=True)
    (tmp_path / ".ep" / "checkpoint" / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "deploy" / "local-cpu.yaml"
    file.write_text(source.read_text())
    decode = load(file).deployment.roles.decode
    assert decode is not None
    assert decode.arg("max-num-seqs") == 8
    assert decode.arg("dtype") == "float32"


FAULTS = {
    "unknown key": (
        ("data_parallel: 2", "data_paralel: 2"),
        "6:5: roles.prefill.data_paralel: unknown key; did you mean `data_parallel`, which is missing? [EP002]",
    ),
    "unknown mode": (
        ("mode: direct", "mode: fast"),
        "7:10: roles.prefill.ep.mode: is fast, must be auto, normal, direct, low_latency or hybrid; write one of them [EP004]",
    ),
    "misspelt mode": (
        ("mode: low_latency", "mode: low_latncy"),
        "11:10: roles.decode.ep.mode: is low_latncy, must be auto, normal, direct, low_latency or hybrid; "
        "did you mean `low_latency`? [EP004]",
    ),
    "mode of the other family": (
        ("mode: direct", "mode: hybrid"),
        "7:10: roles.prefill.ep.mode: is hybrid, must be one of normal, direct, auto for the prefill role",
    ),
    "prefill mode in decode": (
        ("mode: low_latency", "mode: normal"),
        "11:10: roles.decode.ep.mode: is normal, must be one of low_latency, hybrid, auto for the decode role",
    ),
    "batch above capacity": (
        ("max_tokens: 1024", "max_tokens: 512"),
        "7:24: roles.prefill.ep.max_tokens: is 512, but max-num-batched-tokens is 1024 tokens a rank",
    ),
    "default batch above capacity": (
        ("max-num-batched-tokens: 1024, ", ""),
        "roles.prefill.ep.max_tokens: is 1024, but the batch of vLLM is 8192 tokens a rank",
    ),
    "sequences above capacity": (
        ("max-num-batched-tokens: 256", "max-num-batched-tokens: 256, max-num-seqs: 300"),
        "roles.decode.args.max-num-batched-tokens: is 256, but max-num-seqs is 300; set it and ep.max_tokens to 300, or lower",
    ),
    "the least batch on a CPU": (
        ("device: cuda", "device: cpu, nodes: 1"),
        "roles.prefill.ep.max_tokens: is 1024, but the batch of vLLM is 2048 tokens a rank",
    ),
    "experts not divisible": (
        ("data_parallel: 2", "data_parallel: 3"),
        "roles.prefill.data_parallel: gives 3 EP ranks, but the model's 16 experts are not divisible by 3; use a divisor of 16",
    ),
    "tensor parallel only": (
        ("data_parallel: 2", "data_parallel: 1"),
        "roles.prefill.data_parallel: is 1, must be above 1: with tensor parallelism alone vLLM calls no all-to-all backend"
        "; set data_parallel to the role's number of GPUs, 2 or more",
    ),
    "tensor parallel with the GPUs of data parallel": (
        (
            "data_parallel: 2\n    ep: {mode: direct, max_tokens: 1024}\n    args: {",
            "data_parallel: 1\n    ep: {mode: direct, max_tokens: 1024}\n    args: {tensor_parallel_size: 4, ",
        ),
        "calls no all-to-all backend; set data_parallel: 4 and remove args.tensor_parallel_size",
    ),
    "virtual nodes of unequal size": (
        ("max_tokens: 1024", "max_tokens: 1024, gpus_per_node: 3"),
        "roles.prefill.ep.gpus_per_node: is 3, must divide the 2 EP ranks",
    ),
    "more nodes than there are": (
        ("data_parallel: 2", "data_parallel: 2\n    nodes: 2"),
        "roles.prefill.nodes: is 2, but topology.nodes is 1",
    ),
    "a flag that the file owns": (
        ("max-num-seqs: 8", "all2all_backend: naive"),
        "8:42: roles.prefill.args.all2all_backend: `ep` of this file decides that flag; remove it here",
    ),
    "two micro-batches in one lane": (
        ("max_tokens: 1024", "max_tokens: 1024, overlap: dbo"),
        "roles.prefill.ep.lanes: is 1, but overlap: dbo runs two micro-batches; set lanes: 2",
    ),
    "no model": (("path: model", "path: nowhere"), "3:9: model.path: "),
    "not YAML": (("name: ", "name: {"), "not valid YAML"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_one_line(fault: str, write_file: WriteFile) -> None:
    replacement, expected = FAULTS[fault]
    file = write_file(replacement)
    lines = lines_of(file)
    assert any(expected in line for line in lines), lines
    assert all(line.startswith(f"{file}:") for line in lines)
    # Both roles have a batch; every other fault is told once.
    assert len(lines) == (2 if fault == "the least batch on a CPU" else 1), lines


def test_all_faults_are_told_at_once(write_file: WriteFile) -> None:
    lines = lines_of(write_file(("mode: direct", "mode: hybrid"), ("max_tokens: 256", "max_tokens: 8")))
    assert [line.split(": ")[1] for line in lines] == ["roles.prefill.ep.mode", "roles.decode.ep.max_tokens"]


def test_roles_are_a_pair_or_unified(write_file: WriteFile) -> None:
    assert (
        "roles: has decode, unified, must have prefill and decode, or unified alone"
        in lines_of(write_file(("  prefill:", "  unified:")))[0]
    )


def test_no_file_and_no_mapping(tmp_path: Path) -> None:
    assert "cannot be read: No such file or directory" in lines_of(tmp_path / "none.yaml")[0]
    (tmp_path / "list.yaml").write_text("- a\n")
    assert "is a list, must be a mapping" in lines_of(tmp_path / "list.yaml")[0]
    (tmp_path / "empty.yaml").write_text("")
    assert "is empty, must be a mapping" in lines_of(tmp_path / "empty.yaml")[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00name", "1:1: error EP001: is not UTF-8 text: byte 0xff at position 0"),
        (b"name: a\nroles:\n\tprefill: {}\n", "indent with spaces"),
        (b"name: a\nname: b\n", "keep one"),
    ],
    ids=["bytes", "tab", "twice"],
)
def test_text_that_is_no_yaml(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "bad.yaml").write_bytes(content)
    lines = lines_of(tmp_path / "bad.yaml")
    assert len(lines) == 1 and said.split(": ")[-1] in lines[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("name: a\nroles: {decode: {ep: {timeout_s: .inf}}}\n", "is inf, must be a finite number"),
        ("name: a\nroles: {decode: {args: {x: [1, .nan]}}}\n", "is nan, must be a finite number"),
        ('name: "\\ud800"\n', "half of a character"),
    ],
)
def test_values_that_yaml_alone_has(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "bad.yaml").write_text(content)
    assert sum(said in line for line in lines_of(tmp_path / "bad.yaml")) == 1


def test_the_name_of_a_half_edited_file(write_file: WriteFile) -> None:
    good = write_file()
    name = load(good).deployment.name
    broken = write_file(("mode: direct", "mode: dirct"))
    lines_of(broken)
    assert name_in(broken) == name


def test_modes_of_the_schema_are_those_of_the_core() -> None:
    assert set(typing.get_args(ModeName)) == {"auto", *(mode.value for mode in Mode)}
    assert modes_of("prefill", "auto") == [Mode.NORMAL, Mode.DIRECT]
    assert modes_of("unified", "hybrid") == [Mode.LOW_LATENCY, Mode.HYBRID]


CONFIGS = {
    '"n_routed_experts": {"a": 1}': 'n_routed_experts is {"a": 1}, must be a whole number from 1 to 16777216; correct it',
    '"hidden_size": Infinity': "hidden_size is Infinity, must be a whole number from 1",
    '"hidden_size": null': "it has no hidden_size",
    '"hidden_size": 512.5': "hidden_size is 512.5, must be a whole number from 1",
    '"quantization_config": 3': "quantization_config is 3, must be a mapping",
    '"num_experts_per_tok": null': "it has no num_experts_per_tok or num_experts_per_token",
    '"num_experts_per_tok": 0': "num_experts_per_tok is 0, must be a whole number from 1 to 16",
    '"num_experts_per_tok": true': "num_experts_per_tok is true, must be a whole number from 1 to 16",
    '"num_experts_per_tok": 17': "num_experts_per_tok is 17, must be a whole number from 1 to 16",
    '"num_hidden_layers": -3': "num_hidden_layers is -3, must be a whole number from 1",
    '"num_hidden_layers": 1%s' % ("0" * 400): "000..., must be a whole number from 1",
    '"num_hidden_layers": 1%s' % ("0" * 5000): "is not JSON (Exceeds the limit",
    '"first_k_dense_replace": 2': "first_k_dense_replace is 2, must be a whole number from 0 to 1",
    '"mlp_only_layers": 3': "mlp_only_layers is 3, must be a list of layers from 0 to 1",
    '"mlp_only_layers": [0, 1]': "mlp_only_layers is [0, 1], must leave a layer that has experts",
    '"n_group": 32': "n_group is 32, must be a whole number from 0 to 16",
    '"num_attention_heads": "4"': 'num_attention_heads is "4", must be a whole number from 1',
    '"x": ' + "[" * 100_000: "is nested too deeply to be read",
}


@pytest.mark.parametrize("change", CONFIGS, ids=lambda change: change[:30])
def test_a_broken_config_of_a_model_is_one_fault_of_its_path(change: str, write_file: WriteFile) -> None:
    """For lint and, by way of load, for up, plan, diff and render."""
    file = write_file()
    (file.parent / "model" / "config.json").write_text(f"{json.dumps(CONFIG)[:-1]}, {change}}}")
    (line,) = lines_of(file)
    assert line.startswith(f"{file}:3:9: model.path: {file.parent / 'model'}") and line.endswith("[EP011]")
    assert CONFIGS[change] in line
    assert [str(finding) for finding in findings_of(file)] == [line]


def test_a_config_that_is_no_file_is_not_waited_for(write_file: WriteFile) -> None:
    file = write_file()
    config = file.parent / "model" / "config.json"
    config.unlink()
    os.mkfifo(config)
    assert f"{config} cannot be read (not a regular file)" in lines_of(file)[0]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("bench", '{"mode": "normal", "ranks": 2, "dispatch": {"p50_us": 1e300}, "combine": {"p50_us": 1e-200}}'),
        ("bench", "[" * 100_000),
        ("expert_counts", '{"expert_counts": [[1%s, 2]]}' % ("0" * 400)),
        ("expert_counts", '{"expert_counts": [[Infinity, 2]]}'),
        ("expert_counts", "[" * 100_000),
    ],
)
def test_a_measurement_with_numbers_that_are_none(key: str, text: str, write_file: WriteFile) -> None:
    if key == "bench":
        file = write_file(("{device: cuda}", "{device: cuda, bench: measured}"))
    else:
        file = write_file(("{path: model}", "{path: model, routing: {kind: measured, expert_counts: measured}}"))
    (file.parent / "measured").write_text(text)
    (line,) = lines_of(file)
    assert f"{key}: {file.parent / 'measured'}" in line and line.endswith("see docs/plan.md [EP131]")
