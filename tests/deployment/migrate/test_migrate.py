"""Public commands and manifests become deployment files that lint accepts, and every word of them is accounted for."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from ep_backend.deployment.lint.report import is_error
from ep_backend.deployment.migrate import Migrated, Unmovable, migrate
from ep_backend.deployment.migrate.launches import Launch, launches
from ep_backend.deployment.migrate.shell import commands

from .cases import CASES, INPUTS, Case


def migrated(case: Case) -> Migrated:
    return migrate(case.texts, **case.options)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_public_setup(case: Case) -> None:
    made = migrated(case)
    assert [str(finding) for finding in made.findings if is_error(finding)] == []
    roles = YAML(typ="safe").load(made.text)["roles"]
    found = {
        name: (role["nodes"], role["data_parallel"], role["ep"]["mode"], role["ep"]["max_tokens"])
        for name, role in roles.items()
    }
    assert found == case.roles
    assert migrated(case) == made


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_flag_or_variable_is_lost(case: Case) -> None:
    """Each stands in the file, or a note names it, or it is one of the few that a key of the file says."""
    made = migrated(case)
    told = made.text + "\n".join(f"{note.what} {note.became}" for note in made.notes)
    said = {
        *("model-path", "served-model-name", "tp-size", "dp-size", "ep-size", "nnodes", "disaggregation-mode"),
        *("moe-a2a-backend", "enable-deepep-moe", "deepep-mode", "enable-two-batch-overlap", "ep-num-redundant-experts"),
        *("tensor-parallel-size", "data-parallel-size", "data-parallel-size-local", "enable-expert-parallel", "headless"),
        *("all2all-backend", "enable-dbo", "kv-transfer-config", "data-parallel-start-rank"),
        *("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "VLLM_ALL2ALL_BACKEND"),
    }
    text = "\n".join(text for _, text in case.texts if not text.startswith("apiVersion"))
    flags = {flag.replace("_", "-") for flag in re.findall(r"(?<=[\s\[])--([a-z][\w-]+)", text)} - {
        *("gpus", "shm-size", "tp", "trust-remote", "model", "data-parallel-supervisor-port", "otlp-traces-endpoint")
    }
    variables = set(re.findall(r"(?:^|[ \t])([A-Z][A-Z0-9_]+)=", text, re.MULTILINE)) | set(
        re.findall(r"name: ([A-Z][A-Z0-9_]+)", text)
    )
    variables -= {"START_RANK", "LWS_WORKER_INDEX"}
    assert len(flags) > 3
    assert {name for name in flags | variables if name not in told} <= said


def test_drift_between_leader_and_worker_is_told() -> None:
    notes = [note for note in migrated(CASES["sglang-lws"]).notes if "differed" in note.why]
    assert [(note.role, note.what, note.became) for note in notes] == [
        (role, *difference)
        for role in ("prefill", "decode")
        for difference in (
            ("worker NVSHMEM_IB_TRAFFIC_CLASS 16", "absent"),
            ("worker securityContext", "leader's securityContext"),
        )
    ]


def test_two_nodes_of_a_role_that_differ_are_told() -> None:
    text = (INPUTS / "vllm-two-nodes.sh").read_text()
    first, second = text.split("# second node")
    changed = second.replace("--headless", "--headless --max-num-seqs 7")
    notes = migrate([("a.sh", first), ("b.sh", changed)]).notes
    assert ("--max-num-seqs 7", "None") in [(note.what, note.became) for note in notes if note.kind == "changed"]
    with pytest.raises(Unmovable, match=r"two unified commands differ: vllm on 2 nodes with 16 .* with 32 data-parallel ranks"):
        migrate([("a.sh", first), ("b.sh", second.replace("--data-parallel-size 16", "--data-parallel-size 32"))])


SERVE = "vllm serve deepseek-ai/DeepSeek-V3 -dp 8 -ep"


@pytest.mark.parametrize(
    ("text", "flags", "env"),
    [
        (f"A=1 B='x y' {SERVE}", {}, {"A": "1", "B": "x y"}),
        (f"export A=1\nB=2\n{SERVE} --seed $B", {"seed": 2}, {"A": "1"}),
        (f"{SERVE} \\\n  --seed 3 \\   # why\n  --max-num-seqs=8 # end", {"seed": 3, "max-num-seqs": 8}, {}),
        (f"# vllm serve other\ncd /x && {SERVE} --seed 1 > log 2>&1 &", {"seed": 1}, {}),
        (f"env A=1 nohup {SERVE} --seed $((2 * 3))", {"seed": 6}, {"A": "1"}),
        (f"docker run --gpus all -e A=1 --env=B=2 image {SERVE}", {}, {"A": "1", "B": "2"}),
        (f"""bash -c "{SERVE} --seed ${{SEED:-9}}" """, {"seed": 9}, {}),
        (f"""export A=1; srun -N 2 bash -lc 'cd /x && {SERVE} --seed $A'""", {"seed": 1}, {"A": "1"}),
        (f"""docker run -e A=1 image:1 bash -c '{SERVE} --seed 4'""", {"seed": 4}, {"A": "1"}),
        (f"{SERVE} --compilation_config '{{\"mode\": 3}}'", {"compilation-config": {"mode": 3}}, {}),
        (f"{SERVE} --allowed-origins '[\"*\"]' --served-model-name a b", {"allowed-origins": '["*"]'}, {}),
        (f"{SERVE} --api-key $(cat key | tr -d ' ') --root-path '$HOME/#x'", {"root-path": "$HOME/#x"}, {}),
        (
            f"A=(-x)\nA=(--seed 6  # it's (so)\n  --root-path '(a)')\nA+=(--no-x)\n{SERVE} \"${{A[@]}}\"",
            {"seed": 6, "root-path": "(a)"},
            {},
        ),
        (f"local -a a=({SERVE})\n(exec ${{a[*]}} --seed 7)", {"seed": 7}, {}),
        (f"{SERVE}\r\n", {}, {}),
        (f"{SERVE} \\", {}, {}),
        (f"cat > a <<'EOF'\nit's $(not\nEOF\n{SERVE} --seed 4", {"seed": 4}, {}),
        (f"cat <<A <<-B && {SERVE} --seed 4\n' 1\nA\n' 2\n\tB\necho", {"seed": 4}, {}),
        (f"/opt/venv/bin/{SERVE} --cuda-graph-sizes 1 2 -4", {"cuda-graph-sizes": [1, 2, -4]}, {}),
    ],
)
def test_what_shells_allow(text: str, flags: dict[str, object], env: dict[str, str]) -> None:
    (launch,) = launches(commands(text))
    assert launch.flags["model-path"] == "deepseek-ai/DeepSeek-V3"
    assert (launch.flags["data-parallel-size"], launch.flags["enable-expert-parallel"]) == (8, True)
    assert flags.items() <= launch.flags.items()
    assert launch.env == env


def test_options_of_variables_leave_with_them() -> None:
    (launch,) = launches(commands(f"docker run --rm -e A=1 --env B=2 -e C image {SERVE}"))
    assert (launch.env, launch.before) == ({"A": "1", "B": "2"}, ["docker", "run", "--rm", "-e", "C", "image"])


def test_what_a_shell_would_have_to_run_stays_as_it_is() -> None:
    (launch,) = launches(commands(f"{SERVE} --api-key $(cat key | tr -d ' ') --seed `date +%s`"))
    assert isinstance(launch, Launch)
    assert (launch.flags["api-key"], launch.flags["seed"]) == ("$(cat key | tr -d ' ')", "`date +%s`")


SGLANG = "python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no command starts an engine; must hold `vllm serve`"),
        ("echo 'vllm serve model'", "no command starts an engine"),
        ("vllm serve 'unclosed", "line 1: a quotation that starts with ' is not closed"),
        ("\n\nvllm serve $(oops", r"line 3: \$\( is not closed; add \)"),
        ("ls\nA=(--seed\nvllm serve x", r"line 2: an array is not closed; add \)"),
        ("vllm serve --seed 1", "the vllm command names no model; add --model PATH_OR_ID"),
        ("vllm serve someone/unheard-of -dp 8", "model someone/unheard-of is none that is known here.*--model"),
        (f"{SGLANG} --tp-size $TP", r"--tp-size is '\$TP', must be a whole number of at least 1; write it, or set the"),
        (f'{SERVE} --kv-transfer-config \'{{"kv_connector": "NixlConnector", "kv_role": "kv_both"}}\'', "kv_role is kv_both"),
        (f"{SERVE} --kv-transfer-config {{kv_role:x}}", "--kv-transfer-config is '{kv_role:x}', must be a JSON object"),
        ("apiVersion: v1\nkind: ConfigMap\n", "kind is ConfigMap, must be one of LeaderWorkerSet, DisaggregatedSet"),
        ("apiVersion: v1\nkind: [", "the manifest is no YAML"),
        ("apiVersion: leaderworkerset.x-k8s.io/v1\nkind: LeaderWorkerSet\nmetadata: {name: x}\n", "x: no container runs"),
    ],
)
def test_what_cannot_become_a_deployment(text: str, complaint: str) -> None:
    with pytest.raises(Unmovable, match=complaint) as error:
        migrate([("here.sh", text)])
    assert "\n" not in str(error.value)


def run(*arguments: str, text: str = "") -> tuple[int, str, str]:
    command = [sys.executable, "-m", "ep_backend", "migrate", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_command(tmp_path: Path) -> None:
    files = [str(INPUTS / name) for name in CASES["sglang-6017"].inputs]
    code, out, error = run(*files, "--out", str(tmp_path / "d.yaml"))
    assert (code, out) == (0, "")
    assert re.search(r"changed +decode +--cuda-graph-bs 256 -> args.cuda-graph-bs-decode: the engine renamed it", error)
    assert run(*files, "--out", "-")[:2] == (0, (tmp_path / "d.yaml").read_text())
    code, out, error = run(*files, "--json")
    told = json.loads(out)
    assert (code, error) == (0, "")
    assert told["file"] == (tmp_path / "d.yaml").read_text()
    assert {"kind", "role", "what", "became", "why"} == set(told["changes"][0])


def test_half_a_pair_is_written_and_says_what_is_missing() -> None:
    code, out, error = run("-", text=(INPUTS / "sglang-6017-decode.sh").read_text())
    assert code == 1
    assert "roles:\n  decode:" in out
    assert "still to do: deployment.yaml:" in error and "must have prefill and decode, or unified alone" in error


@pytest.mark.parametrize(
    ("arguments", "text", "complaint"),
    [
        (["/nowhere.sh"], "", "/nowhere.sh cannot be read: No such file or directory; give a shell script or a manifest"),
        (["-", "--topology", "h100"], SERVE, "--topology h100 is no preset; choose one of h800-nvl8-cx7,"),
        (["-", "--model", "gpt"], SERVE, "--model gpt is no preset; choose one of deepseek-v3,"),
        (["-", "--out", "/nowhere/d.yaml"], SERVE, "--out /nowhere/d.yaml cannot be written: No such file or directory"),
        (["-", "--out", __file__], SERVE, "test_migrate.py cannot be written: File exists; choose another"),
        ([str(Path(sys.executable).resolve())], "", "is no text in UTF-8"),
        (["-", "--name", "A B"], SERVE, "name would be 'A B': string should match pattern"),
        (["-"], SERVE.replace("8", "0"), "--data-parallel-size is 0, must be a whole number of at least 1"),
    ],
)
def test_a_wrong_call_is_one_line(arguments: list[str], text: str, complaint: str) -> None:
    code, out, error = run(*arguments, text=text)
    assert (code, out) == (1, "")
    assert error.startswith("ep-backend: ") and error.count("\n") == 1
    assert complaint in error


def test_a_file_that_was_not_written_whole_is_not_there(tmp_path: Path) -> None:
    """Another run would refuse it as somebody's own."""
    out = tmp_path / "d.yaml"
    words = [sys.executable, "-m", "ep_backend", "migrate", "-", "--out", str(out)]
    limited = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *words]
    done = subprocess.run(limited, input=SERVE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"--out {out} cannot be written: File too large; choose another" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("value", ["2001-13-45", "!!int abc", "[" * 300, "1" * 5000])
def test_a_manifest_with_a_value_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(Unmovable, match=r"the manifest is no YAML: .*line 3.*; correct it"):
        migrate(
            [("set.yaml", f"apiVersion: leaderworkerset.x-k8s.io/v1\nkind: LeaderWorkerSet\nmetadata: {{name: {value}}}\n")]
        )
