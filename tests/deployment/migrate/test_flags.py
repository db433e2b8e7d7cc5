"""Every spelling of a flag that the engines take becomes a key of the file, or a note says why not."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from ep_backend.deployment.flags import engine_flags
from ep_backend.deployment.lint import lint
from ep_backend.deployment.lint.report import is_error
from ep_backend.deployment.load import read
from ep_backend.deployment.migrate import Migrated, Unmovable, migrate, repair
from ep_backend.deployment.migrate.images import version_of
from ep_backend.deployment.migrate.launches import launches
from ep_backend.deployment.migrate.shell import commands
from ep_backend.deployment.render import render
from ep_backend.deployment.words import flag_words

SERVE = "vllm serve deepseek-ai/DeepSeek-V3 -dp 8 -ep"
SGLANG = "python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention"


def file_of(made: Migrated) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load(made.text)
    return found


def args_of(made: Migrated, role: str = "unified") -> dict[str, Any]:
    found: dict[str, Any] = file_of(made)["roles"][role].get("args", {})
    return found


def notes_of(made: Migrated) -> list[tuple[str, str, str]]:
    return [(note.kind, note.what, note.became) for note in made.notes]


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ("-O3", {"optimization-level": 3}),
        ("-O 3", {"optimization-level": 3}),
        ("-O=2", {"optimization-level": 2}),
        ("-cc.mode=3", {"compilation-config": {"mode": 3}}),
        ("-cc.pass_config.fuse true -cc.mode 3", {"compilation-config": {"pass_config": {"fuse": True}, "mode": 3}}),
        ("--compilation_config.cudagraph_mode FULL", {"compilation-config": {"cudagraph_mode": "FULL"}}),
        ("-cc.splitting_ops+ a -cc.splitting_ops+=b,c", {"compilation-config": {"splitting_ops": ["a", "b", "c"]}}),
        ("--eplb-config.num_redundant_experts 8", {"eplb-config": {"num_redundant_experts": 8}}),
        ("--middleware a.B --middleware c.D", {"middleware": ["a.B", "c.D"]}),
        ("-O.mode=3", {"compilation-config": {"mode": 3}}),
        ("-dcp 2", {"decode-context-parallel-size": 2}),
    ],
)  # fmt: skip
def test_spellings_of_vllm(words: str, args: dict[str, Any]) -> None:
    made = migrate([("here.sh", f"{SERVE} {words}")])
    assert args_of(made) == args
    assert file_of(made)["roles"]["unified"]["ep"].get("redundant_experts", 0) == args.get("eplb-config", {}).get(
        "num_redundant_experts", 0
    )


@pytest.mark.parametrize(
    ("words", "kept", "lost"),
    [
        ("--seed 1 --seed 2", {"seed": 2}, "--seed 1"),
        ("""--compilation-config '{"mode": 3}' -cc.cudagraph_mode NONE""", {"compilation-config": {"cudagraph_mode": "NONE"}},
         '--compilation-config {"mode": 3}'),
    ],
)  # fmt: skip
def test_a_flag_given_twice_is_the_last_one_and_the_other_is_told(words: str, kept: dict[str, Any], lost: str) -> None:
    made = migrate([("here.sh", f"{SERVE} {words}")])
    assert args_of(made) == kept
    assert ("left out", lost, "") in notes_of(made)


def test_dollars_in_double_quotes() -> None:
    (launch,) = launches(commands(f'x=1; {SERVE} --api-key "\\$x" --root-path "a\\`b" --seed "$x"'))
    assert (launch.flags["api-key"], launch.flags["root-path"], launch.flags["seed"]) == ("$x", "a`b", 1)
    (launch,) = launches(commands(f'bash -c "x=2; {SERVE} --seed \\$x"'))
    assert launch.flags["seed"] == 2


TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "recompute",
    "kv_port": 14579,
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"num_threads": 8, "kv_lease_duration": 10},
}


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-transfer-config", json.dumps(TRANSFER)],
        [
            "--kv-transfer-config.kv_connector=NixlConnector",
            *("--kv-transfer-config.kv_role", "kv_consumer", "--kv_transfer_config.kv_port", "14579"),
            *("--kv-transfer-config.kv_load_failure_policy", "recompute", "--kv-transfer-config.kv_buffer_device=cpu"),
            *("--kv-transfer-config.kv_connector_extra_config.num_threads", "8"),
            "--kv-transfer-config.kv_connector_extra_config.kv_lease_duration=10",
        ],
    ],
    ids=["json", "dotted"],
)
def test_what_the_file_does_not_decide_of_the_kv_transfer_reaches_the_engine(words: list[str], tmp_path: Path) -> None:
    made = migrate([("here.sh", f"{SERVE} {shlex.join(words)}")])
    further = {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"num_threads": 8}}
    assert args_of(made, "decode") == {"kv-transfer-config": further}
    assert {what for kind, what, _ in notes_of(made) if kind == "left out" and "kv-transfer" in what} == {
        "--kv-transfer-config.kv_port 14579",
        "--kv-transfer-config.kv_buffer_device cpu",
        "--kv-transfer-config.kv_connector_extra_config.kv_lease_duration 10",
    }
    loaded, _ = read(tmp_path / "d.yaml", made.text)
    decode = loaded.deployment.roles.decode
    assert decode is not None
    given = engine_flags(loaded.deployment, "decode", decode)["kv-transfer-config"]
    assert isinstance(given, dict)
    assert given.pop("kv_connector_extra_config") == {"kv_lease_duration": 390, "num_threads": 8}
    assert given == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_buffer_device": "cuda",
        "kv_load_failure_policy": "recompute",
    }
    assert [str(finding) for finding in made.findings if is_error(finding) and "EP010" not in str(finding)] == []


@pytest.mark.parametrize(
    ("role", "value", "refused"),
    [
        ("decode", "{kv_load_failure_policy: fail}", False),
        ("decode", "{kv_role: kv_both}", True),
        ("decode", "{kv_connector_extra_config: {kv_lease_duration: 1}}", True),
        ("decode", "'{}'", False),
        ("decode", """'{"kv_role": "kv_both"}'""", True),
        ("unified", "{kv_load_failure_policy: fail}", True),
    ],
)
def test_a_file_may_say_of_the_kv_transfer_what_it_does_not_decide(
    role: str, value: str, refused: bool, tmp_path: Path
) -> None:
    roles = f"roles: {{{role}: {{data_parallel: 8, args: {{kv-transfer-config: {value}}}}}}}"
    text = f"name: x\nmodel: {{preset: deepseek-v3}}\n{roles}\n"
    loaded, _ = read(tmp_path / "d.yaml", text)
    assert ("EP304" in {problem.code for problem in lint(loaded.deployment)}) is refused


def test_a_flag_that_is_given_once_for_each_value_is_rendered_so(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(migrate([("here.sh", f"{SERVE} --middleware a.B --middleware c.D")]).text)
    files = render(file).files
    assert "--middleware a.B --middleware c.D" in files["unified/launch.sh"]
    assert "middleware" not in files["unified/engine.yaml"]
    assert flag_words({"middleware": ["a.B", "c.D"], "other": [1, 2]}) == [
        *("--middleware", "a.B", "--middleware", "c.D", "--other", "1", "2"),
    ]


def test_the_keys_of_another_connector_are_told() -> None:
    config = '{"kv_connector": "P2pNcclConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"http_port": 1}}'
    made = migrate([("here.sh", f"{SERVE} --kv-transfer-config '{config}'")])
    assert args_of(made, "prefill") == {}
    assert ("left out", '--kv-transfer-config.kv_connector_extra_config {"http_port": 1}', "") in notes_of(made)
    assert ("changed", "KV connector P2pNcclConnector", "NixlConnector") in notes_of(made)


def test_a_configuration_file_beside_the_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text(
        "model: deepseek-ai/DeepSeek-V3\nmax_num_seqs: 64\nseed: 7\nspeculative-config: {method: mtp}\n"
    )
    made = migrate([(str(tmp_path / "run.sh"), "vllm serve --config engine.yaml -dp 8 -ep --seed 2")])
    assert file_of(made)["model"]["source"] == "deepseek-ai/DeepSeek-V3"
    assert args_of(made) == {"max-num-seqs": 64, "seed": 2, "speculative-config": {"method": "mtp"}}
    assert ("changed", "--config engine.yaml", "args") in notes_of(made)
    assert ("left out", "--seed 7 of engine.yaml", "") in notes_of(made)


@pytest.mark.parametrize("content", [None, "just: [", "- a list"])
def test_a_configuration_file_that_cannot_be_used_is_told(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "engine.yaml").write_text(content)
    made = migrate([(str(tmp_path / "run.sh"), f"{SGLANG} --config engine.yaml")])
    assert ("left out", "--config engine.yaml", "") in notes_of(made)
    assert "config" not in args_of(made)


def test_many_unknown_flags_are_left_out_in_one_round_of_lint(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    monkeypatch.setattr(repair, "lint", lambda deployment: rounds.append(deployment) or lint(deployment))
    made = migrate([("here.sh", f"{SERVE} {' '.join(f'--no-such-{number} 1' for number in range(20))}")])
    assert sum(what.startswith("--no-such-") for _, what, _ in notes_of(made)) == 20
    assert args_of(made) == {} and len(rounds) <= 3


def test_a_configuration_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "engine.yaml")
    made = migrate([(str(tmp_path / "run.sh"), f"{SGLANG} --config engine.yaml")])
    assert ("left out", "--config engine.yaml", "") in notes_of(made)


@pytest.mark.parametrize(
    ("engine", "image", "version"),
    [
        ("vllm", "vllm/vllm-openai:v0.26.0", "0.26.0"),
        ("vllm", "registry.example:5000/mirror/vllm:0.33.0@sha256:ab", "0.33.0"),
        ("sglang", "lmsysorg/sglang:v0.5.20", "0.5.20"),
        ("sglang", "lmsysorg/sglang:v0.5.20.post1-cu130-amd64", "0.5.20.post1"),
        ("sglang", "lmsysorg/sglang:latest", None),
        ("sglang", "lmsysorg/sglang", None),
        ("vllm", "ghcr.io/llm-d/llm-d-cuda:v0.3.0", None),
        ("vllm", "nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.7.0", None),
        ("vllm", "nvcr.io/nvidia/vllm:25.09-py3", None),
    ],
)
def test_an_image_tells_the_version_if_its_tag_is_the_engine_s(engine: str, image: str, version: str | None) -> None:
    assert version_of(engine, image) == version  # type: ignore[arg-type]


def test_the_version_is_the_image_s_or_said_to_be_unknown() -> None:
    made = migrate([("here.sh", f"docker run --gpus all vllm/vllm-openai:v0.26.0 {SERVE}")])
    assert file_of(made)["target"]["image"] == {"name": "vllm/vllm-openai:v0.26.0", "packages": {"vllm": "0.26.0"}}
    made = migrate([("here.sh", SGLANG)])
    assert "image" not in file_of(made)["target"]
    assert ("left out", "version of sglang", "") in notes_of(made)


def test_an_image_that_starts_the_engine_itself() -> None:
    made = migrate(
        [("here.sh", "docker run --ipc=host vllm/vllm-openai:v0.26.0 --model deepseek-ai/DeepSeek-V3 -dp 8 -ep --seed 1")]
    )
    document = file_of(made)
    assert document["target"]["image"]["packages"] == {"vllm": "0.26.0"}
    assert (document["model"]["source"], args_of(made)) == ("deepseek-ai/DeepSeek-V3", {"seed": 1})


def test_names_and_commands_that_have_no_place_are_told() -> None:
    router = "python3 -m sglang_router.launch_router --pd-disaggregation --policy cache_aware"
    made = migrate([("here.sh", f"cd /x\n{SGLANG} --served-model-name a b --ep-size 4 &\n{router}")])
    assert file_of(made)["model"]["served_name"] == "a"
    lost = {what for kind, what, _ in notes_of(made) if kind == "left out"}
    assert {"--served-model-name b", "--ep-size 4", router} <= lost
    assert not any(what.startswith("cd") for what in lost)


def test_what_only_a_later_command_says_is_told() -> None:
    first = f"{SGLANG} --nnodes 2 --node-rank 0"
    notes = notes_of(migrate([("here.sh", f"{first}\n{first.replace('rank 0', 'rank 1')} --seed 1 --seed 2")]))
    assert {("left out", "--node-rank 1", ""), ("left out", "--seed 1", ""), ("changed", "--seed 2", "None")} <= set(notes)
    pair = [
        (f"{role}.sh", f"{SGLANG} --disaggregation-mode {role} --served-model-name {role}") for role in ("prefill", "decode")
    ]
    assert ("changed", "served-model-name decode", "prefill") in notes_of(migrate(pair))


def test_roles_of_different_images_keep_them() -> None:
    texts = [
        (f"{role}.sh", f"docker run lmsysorg/sglang:v0.5.{patch} {SGLANG} --disaggregation-mode {role}")
        for role, patch in (("prefill", 20), ("decode", 23))
    ]
    document = file_of(migrate(texts))
    images = {name: role["image"] for name, role in document["roles"].items()}
    assert images == {
        "prefill": {"name": "lmsysorg/sglang:v0.5.20", "packages": {"sglang": "0.5.20"}},
        "decode": {"name": "lmsysorg/sglang:v0.5.23", "packages": {"sglang": "0.5.23"}},
    }


def test_a_role_that_the_command_contradicts_is_an_error() -> None:
    text = f"{SGLANG} --disaggregation-mode decode"
    with pytest.raises(Unmovable, match="--role is prefill, but the command says decode itself; leave --role out"):
        migrate([("here.sh", text)], role="prefill")
    assert "decode" in file_of(migrate([("here.sh", text)], role="decode"))["roles"]
    both = f"""{SERVE} --kv-transfer-config '{{"kv_connector": "NixlConnector", "kv_role": "ROLE"}}'"""
    pair = [("a.sh", both.replace("ROLE", "kv_producer")), ("b.sh", both.replace("ROLE", "kv_both"))]
    assert list(file_of(migrate(pair, role="decode"))["roles"]) == ["prefill", "decode"]


def test_what_a_default_assumes_of_the_gpu_is_told() -> None:
    def why(**options: str) -> str:
        made = migrate([("here.sh", SERVE)], **options)  # type: ignore[arg-type]
        return next(note.why for note in made.notes if note.what == "ep.max_tokens")

    assert "on GPUs of 80 GiB; nothing tells what yours have, --topology does" in why()
    assert why(topology="b200-nvl8") == "what the engine's own limits admit in a step"


def test_keys_of_json_flags_that_the_version_lacks_are_left_out() -> None:
    config = '{"num_redundant_experts": 0, "window_size": 1000, "window": 1}'
    made = migrate([("here.sh", f"{SERVE} --eplb-config '{config}'")])
    assert args_of(made, "unified")["eplb-config"] == {"num_redundant_experts": 0, "window_size": 1000}
    (note,) = [note for note in notes_of(made) if "eplb" in note[1]]
    assert note == ("left out", "--eplb-config.window 1", "")


def test_what_only_a_shell_knows_is_told() -> None:
    """It would be a literal: a key that anybody may guess, a token that hides the one that is set."""
    made = migrate([("here.sh", f"HF_TOKEN=$HF_TOKEN {SERVE} --api-key ${{KEY}} --served-model-name `hostname` --seed 3")])
    assert {(what, became) for kind, what, became in notes_of(made) if kind == "changed"} >= {
        ("$HF_TOKEN", "env.HF_TOKEN, as it is written"),
        ("${KEY}", "args.api-key, as it is written"),
        ("`hostname`", "model.served_name, as it is written"),
    }
    assert not [became for _, _, became in notes_of(made) if "seed" in became]
