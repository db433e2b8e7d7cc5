"""plan, lint, explain, diff and schema from the command line: exit status, and how quickly they start."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[1] / "deploy"
EP128 = str(DEPLOY / "deepseek-v3-h800-ep128.yaml")
BROKEN = Path(__file__).parent / "deployment" / "broken"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ep_backend", *arguments], capture_output=True, text=True, timeout=120)


def test_plan_as_json_and_as_tables() -> None:
    assert json.loads(run("plan", EP128, "--json").stdout)["roles"]["decode"]["ranks"] == 128
    text = run("plan", EP128).stdout
    for part in ("hybrid *", "auto picks it", "low_latency", "weights", "assumes routing"):
        assert part in text


def test_the_table_that_the_docs_explain_is_what_is_printed() -> None:
    printed = " ".join(re.sub("[┃│]", " ", run("plan", EP128).stdout).split())
    shown = (DEPLOY.parent / "docs" / "plan.md").read_text().split("## What the table says")[1].split("\n- ")[0]
    lines = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    assert len(lines) == 4
    for line in lines:
        assert line in printed


def test_plan_says_what_fits_without_contradiction() -> None:
    """A step dispatches 128 of 187 sequences; a buffer for 187 would leave less KV memory."""
    memory = json.loads(run("plan", EP128, "--json").stdout)["roles"]["decode"]["memory"]
    assert memory["dispatched"] == 128 < memory["largest_batch"] < memory["sequences"]
    text = " ".join(run("plan", EP128).stdout.split())
    assert (
        f"KV memory for {memory['sequences']} full-length sequences a rank, of which max_tokens lets one step dispatch 128"
        in text
    )
    assert f"the larger buffer leaves KV memory for {memory['largest_batch']};" in text


def test_plan_of_a_cpu_is_not_headed_by_nvlink(tmp_path: Path) -> None:
    config = {"hidden_size": 512, "n_routed_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 2}
    config |= {"moe_intermediate_size": 64, "num_attention_heads": 4, "first_k_dense_replace": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "cpu.yaml"
    file.write_text(
        "name: small\ntopology: {device: cpu}\nmodel: {path: .}\nroles: {unified: {data_parallel: 2, ep: {max_tokens: 2048}}}\n"
    )
    first, *_ = run("plan", str(file)).stdout.splitlines()
    assert first == "small: CPU, ranks share memory; times as if they were GPUs with 160 GB/s NVLink"


def test_plan_of_a_broken_file_is_its_errors() -> None:
    done = run("plan", str(BROKEN / "graph_bucket_vllm.yaml"))
    assert done.returncode == 1
    assert "[EP101]" in done.stderr
    assert done.stdout == ""


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    assert run("plan", EP128, "--plot", str(picture)).returncode == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_lint_ends_with_1_for_an_error_only() -> None:
    assert run("lint", EP128).returncode == 0
    assert run("lint", str(BROKEN / "direct_across_nodes.yaml")).returncode == 0
    done = run("lint", str(BROKEN / "flag_gone.yaml"), EP128, "--format", "json")
    assert done.returncode == 1
    assert [row["code"] for row in json.loads(done.stdout)] == ["EP302"]


def test_explain() -> None:
    text = run("explain", "ep101").stdout
    assert "EP101 (error)" in text
    assert all(part in text for part in ("Why: ", "Fix: ", "From: "))
    assert run("explain").stdout.count("\n") >= 40
    done = run("explain", "EP999")
    assert (done.returncode, "is no code" in done.stderr) == (1, True)


def test_diff(tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    text = Path(EP128).read_text()
    for was, becomes in (("mode: auto, max_tokens: 128", "mode: hybrid, max_tokens: 128"), ("port: 8000", "port: 8001")):
        assert was in text
        text = text.replace(was, becomes)
    new.write_text(text)
    rows = json.loads(run("diff", EP128, str(new), "--json").stdout)
    assert {(row["place"], row["kind"]) for row in rows} == {("roles.decode.ep.mode", "drain"), ("router.port", "redeploy")}
    assert run("diff", EP128, EP128).stdout == "no difference\n"


def test_diff_spells_values_as_the_file_does(tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    text = Path(EP128).read_text()
    for was, becomes in (
        ("mode: auto, max_tokens: 128, fp8: true", "mode: auto, max_tokens: 128, fp8: false, sms: 8"),
        ("router: {host: 0.0.0.0,", "router: {hold: true, host: 0.0.0.0,"),
    ):
        assert was in text
        text = text.replace(was, becomes)
    new.write_text(text)
    lines = run("diff", EP128, str(new)).stdout
    assert "roles.decode.ep.fp8: true -> false;" in lines
    assert "roles.decode.ep.sms: null -> 8;" in lines
    assert "router.hold: false -> true;" in lines
    assert not {"None", "True", "False"} & set(lines.replace(";", " ").split())


def test_schema_prints_what_ships() -> None:
    assert run("schema").stdout == (DEPLOY / "schema" / "deployment.json").read_text()


@pytest.mark.parametrize("command", ["plan", "lint"])
def test_cold_start_imports_nothing_that_it_does_not_use(command: str) -> None:
    program = (
        "import sys; sys.argv = ['ep-backend', *sys.argv[1:]]\n"
        "from ep_backend.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'vllm', 'sglang', 'matplotlib', 'httpx', 'fastapi', 'uvicorn', 'prometheus_client'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, command, EP128], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == "[]"
    assert done.stdout


def test_a_terminal_without_the_letter_gets_an_escape(tmp_path: Path) -> None:
    file = tmp_path / "emoji.yaml"
    file.write_text("name: a\ntopology: {device: \U0001f600}\nmodel: {preset: deepseek-v3}\nroles: {}\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ep_backend", "lint", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 1 and done.stderr == ""
    assert r"topology.device: is \U0001f600, must be cuda or cpu" in done.stdout.replace('"', "")
