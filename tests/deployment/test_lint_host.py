"""Rules that look at this machine, the engine's own parser, and the forms of a report."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from ep_backend.deployment import engines
from ep_backend.deployment.checks import check_startable
from ep_backend.deployment.lint import check, lint
from ep_backend.deployment.lint import engine as engine_rules
from ep_backend.deployment.lint.report import RENDER, findings_of
from ep_backend.deployment.lint.values import refused_inside
from ep_backend.deployment.load import read
from ep_backend.deployment.schema import Deployment

from .parser_values import disagreements

BROKEN = Path(__file__).parent / "broken"
Document = dict[str, object]


@pytest.fixture
def local(tmp_path: Path) -> Callable[..., Deployment]:
    """A local deployment on a CPU, with replacements of top-level keys."""
    config = {"hidden_size": 512, "n_routed_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 2}
    config |= {"moe_intermediate_size": 64, "num_attention_heads": 4, "first_k_dense_replace": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def make(**keys: object) -> Deployment:
        role = {"data_parallel": 4, "ep": {"max_tokens": 4096}, "args": {"max-model-len": 4096}}
        document: Document = {"name": "local", "topology": {"device": "cpu"}, "roles": {"unified": role}}
        return Deployment.model_validate(document | {"model": {"path": tmp_path}} | keys)

    return make


def codes(deployment: Deployment) -> list[str]:
    return sorted(problem.code for problem in lint(deployment))


def pretend(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    for module in (engines, engine_rules):
        monkeypatch.setattr(module, "installed", versions.get)


def test_a_local_target_is_held_to_what_is_installed(local: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch) -> None:
    right = {"vllm": "0.33.0", "torch": "2.14.0", "nvidia-nvshmem-cu13": "3.4.5"}
    role = {"data_parallel": 4, "ep": {"max_tokens": 8192}}
    cuda = {"topology": {"preset": "h200-nvl4"}, "roles": {"unified": role}}
    for change, expected in (
        ({}, []),
        ({"torch": "2.14.1"}, ["EP311"]),
        ({"nvidia-nvshmem-cu13": "3.6.5"}, ["EP312"]),
    ):
        pretend(monkeypatch, right | change)
        assert codes(local(**cuda)) == expected, change


def test_an_engine_version_without_a_table_is_held_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {})
    assert engines.table("vllm", "0.32.4").version == "0.32.0"
    assert engines.table("vllm", "0.19.0").version == "0.26.0"
    assert engines.table("sglang", None).version == "0.5.23"


def test_heaps_larger_than_memory(local: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch) -> None:
    """4 ranks x 4096 tokens x (4 x 1088 + 4 x 1024 bytes), both modes of the family sharing: 132 MiB."""
    for pages, expected in ((100, ["EP409"]), (1000, [])):
        sizes = {"SC_PHYS_PAGES": pages, "SC_PAGE_SIZE": 1 << 20}
        monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
        assert codes(local()) == expected


@pytest.mark.parametrize("host", ["127.0.0.2", "localhost", "::1", "0:0:0:0:0:0:0:1"])
def test_every_loopback_address_is_one(local: Callable[..., Deployment], host: str) -> None:
    assert codes(local(control={"host": host})) == []


def test_a_local_target_has_no_pods(local: Callable[..., Deployment]) -> None:
    assert codes(local(target={"kind": "local", "pod": {"shm": "64GiB"}})) == ["EP407"]


def test_up_starts_local_vllm_only(local: Callable[..., Deployment]) -> None:
    def refused(deployment: Deployment) -> set[str]:
        return {problem.code for problem in check_startable(deployment)} - {"EP014"}

    role = {"data_parallel": 4, "engine": "sglang"}
    assert refused(local()) == set()
    assert refused(local(target={"kind": "slurm"})) == {"EP013"}
    assert refused(local(roles={"unified": role})) == {"EP013"}


def test_check_has_the_errors_of_lint_that_the_file_shows() -> None:
    for name, expected in (("graph_bucket_vllm", ["EP101"]), ("direct_across_nodes", []), ("unknown_flag", [])):
        assert [p.code for p in check(read(BROKEN / f"{name}.yaml")[0].deployment)] == expected


def test_text_names_place_code_why_and_fix() -> None:
    file = BROKEN / "graph_bucket_vllm.yaml"
    text = RENDER["text"](findings_of(file))
    first, why, fix, count = text.splitlines()
    assert first.startswith(f"{file}:18:7: error EP101: roles.decode.args.compilation-config: captures a batch of 256")
    assert (why.split()[0], fix) == ("why:", "    fix: set max_tokens to 256, or a largest bucket of 128")
    assert count == "1 error(s), 0 warning(s)"


def test_a_file_that_is_not_there_is_no_fault_of_its_yaml(tmp_path: Path) -> None:
    first, why, fix, _ = RENDER["text"](findings_of(tmp_path / "none.yaml")).splitlines()
    assert first.endswith("none.yaml:1:1: error EP005: cannot be read: No such file or directory")
    assert (why, fix) == ("    why: Nothing was checked.", "    fix: give the path of a deployment file")


def test_json_has_one_object_a_finding() -> None:
    (row,) = json.loads(RENDER["json"](findings_of(BROKEN / "direct_across_nodes.yaml")))
    assert row["code"] == "EP203"
    assert row["severity"] == "warning"
    assert row["place"] == "roles.prefill.ep.mode"
    assert (row["line"], row["column"]) == (8, 39)
    assert all(row[key] for key in ("file", "what", "why", "fix"))


def test_github_annotations() -> None:
    file = BROKEN / "no_pod_settings.yaml"
    lines = RENDER["github"](findings_of(file)).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"::error file={file},line=")
    assert ",title=EP401::target.pod: gives /dev/shm" in lines[0]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_tables_agree_with_the_installed_source(engine: str) -> None:
    """The table that ships for a version is what its source says now."""
    version = engines.installed(engine)
    if version not in engines._versions(engine):
        pytest.skip(f"no table for {engine} {version}")
    now, table = engines._installed_table(engine, version), engines.table(engine, version)
    assert (now.flags, now.env) == (table.flags, table.env)


@pytest.mark.engine
@pytest.mark.slow
def test_the_installed_engine_parses_the_flags_itself(local: Callable[..., Deployment]) -> None:
    pytest.importorskip("vllm")
    from ep_backend.deployment.lint.parser import check_with_engine

    role = {"data_parallel": 4, "args": {"max-num-seqs": 8, "max-model-len": 256}}
    assert list(check_with_engine(local(roles={"unified": role}))) == []
    role["args"] = {"max-num-seqs": "eight"}
    (found,) = check_with_engine(local(roles={"unified": role}))
    assert found.code == "EP306"
    assert "--max-num-seqs" in found.what


@pytest.mark.engine
@pytest.mark.slow
def test_the_table_is_what_the_parser_registers() -> None:
    """Flags and what they take, read from the source without importing it, against argparse's own registry."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    real = {name[2:] for name in parser._option_string_actions if name.startswith("--")}
    table = engines.table("vllm", engines.installed("vllm"))
    assert disagreements(parser, table.flags) == []
    known = set(table.flags)
    assert real - known == {"help"}
    assert {name for name in known - real if not name.startswith("no-")} == set()


@pytest.mark.engine
@pytest.mark.slow
def test_the_keys_of_json_flags_are_the_fields_of_the_classes() -> None:
    """Keys, and of the values that a key takes what pydantic makes of its annotation."""
    vllm = pytest.importorskip("vllm.config")
    inside = engines.table("vllm", engines.installed("vllm")).inside
    classes = {name.lower(): getattr(vllm, name) for name in dir(vllm) if name.endswith("Config")}
    shared = {flag: found for flag in inside if (found := classes.get(flag.replace("-", "")))}
    assert {"kv-transfer-config", "speculative-config", "compilation-config", "eplb-config"} <= set(shared)
    words: list[object] = ["7", 7, 2.5, True, "false", "x", "cuda", [8, 9], ["x"], {"a": 1}]
    for flag, of in shared.items():
        assert set(inside[flag]) == {field.name for field in dataclasses.fields(of)}, flag
        types, judged = get_type_hints(of), {key: takes for key, takes in inside[flag].items() if takes is not None}
        for key, takes in judged.items():
            choices = takes if isinstance(takes, list) else []
            wrong = [word for word in [*words, *choices] if refused_inside(takes, word) and _accepted(types[key], word)]
            assert wrong == [], (flag, key, takes)


def _accepted(of: object, value: object) -> bool:
    try:
        TypeAdapter(of, config={"arbitrary_types_allowed": True}).validate_python(value)
    except (ValidationError, PydanticUserError):
        return False
    return True
