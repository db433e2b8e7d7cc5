"""The deployments for H200s, and what deploy/scripts/measure.py makes of answers and traces."""

import gzip
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ep_backend.bench.traces import all_to_all, between, first_trace, steps
from ep_backend.checkpoint import write_shape
from ep_backend.deployment.lint.report import findings_of
from ep_backend.deployment.load import load, read
from ep_backend.deployment.render import render
from ep_backend.plan.planner import plan
from tests.deployment.conftest import Workplace

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted(DEPLOY.glob("h200*.yaml"))


def _measure() -> Any:
    spec = importlib.util.spec_from_file_location("measure", DEPLOY / "scripts" / "measure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure"] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


measure = _measure()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_they_pass_every_check(file: Path, tmp_path: Path) -> None:
    write_shape(tmp_path / ".ep" / "deepseek-v3-100m", "deepseek-v3-shape")
    there = tmp_path / "deploy" / file.name
    there.parent.mkdir()
    there.write_text(file.read_text())
    assert [str(finding) for finding in findings_of(there)] == []
    deployment = load(there).deployment
    assert plan(deployment).roles["unified"].auto != "none"
    assert len(render(there, ("shell",)).files) == 3
    assert deployment.name == file.stem
    assert deployment.roles.unified is not None
    assert deployment.roles.unified.ep_size == int(file.stem.removeprefix("h200x")[0])


def test_there_are_both_engines_on_two_and_four_gpus() -> None:
    names = {file.stem for file in FILES}
    assert names >= {f"h200x{n}-{what}" for n in (2, 4) for what in ("vllm-decode", "vllm-prefill", "vllm-dbo", "sglang")}


def test_each_family_of_each_engine_runs_as_two_micro_batches() -> None:
    roles = [read(file)[0].deployment.roles.unified for file in FILES]
    found = {(role.engine, role.ep.mode) for role in roles if role is not None and role.ep.overlap != "none"}
    assert found >= {("vllm", "low_latency"), ("vllm", "direct"), ("sglang", "auto")}


def answers(seed: int, wobble: float = 0.0, margin: float = 1.0) -> list[Any]:
    """Two of ten tokens, whose log-probabilities differ by up to the wobble from those of the same seed."""
    rng, other = random.Random(seed), random.Random(seed + 1)
    return [
        measure.Answer(
            [rng.randrange(100) for _ in range(10)],
            [-rng.random() + wobble * other.uniform(-1, 1) for _ in range(10)],
            [margin] * 10,
        )
        for _ in range(2)
    ]


def test_equal_answers_are_equal() -> None:
    found = measure.judge(answers(0), answers(0, 0.01), answers(0, 0.02))
    assert found["equal"] and found["compared"] == found["positions"] == 20
    assert 0 < found["noise"] <= 0.01 < found["max_logprob_difference"] <= 0.02
    assert found["qualified"] == 1.0


def test_another_token_is_wrong_where_the_reference_is_sure() -> None:
    for margin, wrong in ((0.5, 1), (0.01, 0)):
        first, other = answers(0), answers(0)
        first[1].margins[4] = margin
        other[1].tokens[4:] = [-1] * 6
        found = measure.judge(first, answers(0, 0.01), other)
        assert len(found["wrong"]) == wrong and found["parted_where_unsure"] == 1 - wrong
        assert found["equal"] == (wrong == 0)
        assert found["compared"] == 15, "what follows has another context"
    assert found["wrong"] == []


def test_a_reference_that_is_rarely_sure_proves_nothing() -> None:
    found = measure.judge(answers(0, margin=0.001), answers(0, 0.01), answers(0))
    assert not found["equal"] and not found["wrong"] and found["qualified"] == 0.0


def kernel(name: str, begin: float, us: float, launch: int = 0) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": us, "args": {"correlation": launch} if launch else {}}


def test_ours_are_told_from_a_trace_with_their_overlap() -> None:
    layer = [kernel("ep_send", 0, 4), kernel("ep_await", 4, 2), kernel("ep_place", 6, 4), kernel("gemm", 10, 20)]
    layer += [kernel("ep_combine", 30, 6), kernel("ep_combine", 36, 4), kernel("gemm", 34, 3), kernel("gemm", 36, 2)]
    both = layer + [{**k, "ts": k["ts"] + 100} for k in layer]
    found = all_to_all(both)
    assert (found["layers"], found["us_a_layer"]) == (2, 20.0)
    assert (found["dispatch_us_a_layer"], found["combine_us_a_layer"]) == (10.0, 10.0)
    assert all_to_all(both, layers=4)["us_a_layer"] == 10.0, "by the buffer's own count"
    assert between(both) == {"dispatches": 2, "with_work": 0, "median_us": None}
    assert found["overlapped"] == pytest.approx(4 / 20), "34 to 38"
    assert found["covered"] == pytest.approx(5 / 25)
    assert found["kernels"][0] == {"name": "gemm", "calls": 6, "median_us": 3, "us": 50}


def test_of_an_engines_own_the_collectives_count() -> None:
    gather, scatter = "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
    kernels = [kernel(gather, n * 50 + t, 10) for n in range(4) for t in (0, 10)]
    kernels += [kernel(scatter, n * 50 + 30, 15) for n in range(4)]
    found = all_to_all([*kernels, kernel("gemm", 20, 10)])
    assert (found["layers"], found["us_a_layer"], found["overlapped"]) == (4, 35.0, 0.0)
    assert (found["dispatch_us_a_layer"], found["combine_us_a_layer"]) == (20.0, 15.0)
    assert all_to_all([kernel("gemm", 0, 1)])["us_a_layer"] is None


@pytest.mark.parametrize("ends", [("ep_send", "ep_await"), ("ep_dispatch", "ep_dispatch")], ids=["small", "large"])
def test_the_work_of_another_micro_batch_between_send_and_receive(ends: tuple[str, str]) -> None:
    """On one stream, where no two kernels run at the same time."""
    send, receive = ends
    layer = ["ep_order", send, "attention", "gate", receive, send, "gemm", receive, "ep_combine", "gemm", "ep_combine"]
    kernels = [kernel(name, 10 * n, 9) for n, name in enumerate(layer)]
    assert all_to_all(kernels)["overlapped"] == 0.0
    assert between(kernels) == {"dispatches": 2, "with_work": 2, "median_us": 13.5}


@pytest.mark.parametrize("names", [("ep_dispatch", "ep_combine"), ("ncclAllGather", "ncclReduceScatter")], ids=["ours", "own"])
def test_steps_in_graphs_are_told_from_what_else_ran(names: tuple[str, str]) -> None:
    """Two layers with experts a step; what ran without a graph, however long it waited for a peer, is not theirs."""
    kernels = [kernel(names[0], 0, 5000, 1), kernel("gemm", 5000, 9, 2)]
    for step, us in enumerate((20, 30, 90)):
        begin = 10_000 + 1000 * step
        kernels += [kernel("gemm", begin + 10 * n, 9, 10 + step) for n in range(30)]
        kernels += [kernel(name, begin + 300 + n, us, 10 + step) for n, name in enumerate(names * 2)]
    assert steps(kernels, 2) == {
        **{"steps": 3, "step_us": 1000, "graph_us": 333},
        **{"us_a_layer": 60, "combine_us_a_layer": 30},
    }
    assert steps(kernels[:30], 2) is None
    del kernels[-1]["args"]
    assert steps(kernels, 2) is not None, "a trace need not have them of all"


def test_a_trace_is_read_once_it_is_whole(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps({"traceEvents": [kernel("gemm", 0, 1), {"cat": "cpu_op"}]}).encode())
    (tmp_path / "rank0.pt.trace.json.gz").write_bytes(whole[:40])
    with pytest.raises(TimeoutError, match="rank0"):
        first_trace(tmp_path, 0.1)
    (tmp_path / "rank1.pt.trace.json.gz").write_bytes(whole)
    path, kernels = first_trace(tmp_path)
    assert path.name.startswith("rank1") and [k["name"] for k in kernels] == ["gemm"]


def test_results_are_compared(tmp_path: Path) -> None:
    for name, mode, step, us in (("ours", "low_latency", 5.0, 40.0), ("own", "allgather_reducescatter", 6.0, 90.0)):
        windows = [{"sequences_a_rank": 64, "step_ms": step + turn} for turn in (0.1, 0, 9)]
        in_graphs = {"us_a_layer": us, "step_us": step * 1000, "graph_us": step * 900}
        profiles = [{"sequences_a_rank": 64, "us_a_layer": 2 * us, "in_graphs": in_graphs}]
        profiles.append({"sequences_a_rank": 32, "us_a_layer": us, "in_graphs": None})
        entry = {"windows": windows, "profiles": profiles}
        (tmp_path / f"{name}.json").write_text(json.dumps({"modes": {mode: entry}}))
    done = CliRunner().invoke(measure.app, ["compare", str(tmp_path / "ours.json"), str(tmp_path / "own.json")])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "low_latency, 64 sequences a rank: step 5.100 ms, the engine's own 6.100 ms",
        "low_latency, 64 sequences a rank, in CUDA graphs: 40.0 us of all-to-all a layer, the engine's own 90.0",
        "low_latency, 64 sequences a rank, in CUDA graphs: 5000.0 us a step, the engine's own 6000.0",
        "low_latency, 64 sequences a rank, in CUDA graphs: 4500.0 us of them in its graph, the engine's own 5400.0",
        "low_latency, 32 sequences a rank, in CUDA graphs: None us of all-to-all a layer, the engine's own None",
        "low_latency, 32 sequences a rank, in CUDA graphs: None us a step, the engine's own None",
        "low_latency, 32 sequences a rank, in CUDA graphs: None us of them in its graph, the engine's own None",
    ]


def measured(workplace: Workplace, file: str, *arguments: str, **env: str) -> tuple[int, str, dict[str, Any]]:
    """The script's status, output and result, of fake engines that answer all alike."""
    text = (DEPLOY / f"{file}.yaml").read_text()
    workplace.file.write_text(text.replace(file, workplace.folder.name.lower()))
    out = workplace.folder / "out" / "result.json"
    command = [workplace.folder / "bin" / "python", DEPLOY / "scripts" / "measure.py", arguments[0], workplace.file]
    command += ["--out", out, "--model", "model", "--set", "enforce-eager=true", *arguments[1:]]
    env = {**workplace.env, **env}
    done = subprocess.run(command, cwd=workplace.folder, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr, json.loads(out.read_text())


PLANNED = [
    (name, int(seconds), words.split())
    for name, seconds, words in re.findall(
        r"^((?:vllm|sglang)-\S+) +(\d+) +((?:equality|timing) .*)$", (DEPLOY / "scripts" / "measure_all.sh").read_text(), re.M
    )
]


@pytest.mark.parametrize("name,seconds,words", PLANNED, ids=[name for name, *_ in PLANNED])
def test_what_is_planned_for_a_gpu_host_is_taken(name: str, seconds: int, words: list[str], tmp_path: Path) -> None:
    """By the script's own options, and as a deployment by every check: minutes of a start must not tell."""
    command: Any = get_command(measure.app)
    given = command.commands[words[0]].make_context(name, [*words[1:], "--out", "x.json"]).params
    file = DEPLOY.parent / given["file"]
    engine = "sglang" if "sglang" in file.stem else "vllm"
    assert name.startswith(engine) and seconds <= 390
    fp8 = words[0] == "timing" and engine == "sglang"
    write_shape(tmp_path, "deepseek-v3-shape-fp8" if fp8 else "deepseek-v3-shape")
    document = measure._document(file, tmp_path, given["arguments"])
    if fp8:
        measure._role(document)["ep"]["fp8"] = True
    modes = measure._modes(given["modes"], document)
    if given.get("one_gpu"):
        measure._share_one_gpu(document)
    if given["profile"]:
        measure._prepare_profiles(document, tmp_path)
    assert ("profiler-config" in measure._role(document)["args"]) == (given["profile"] and engine == "vllm")
    assert document["roles"]["unified"]["args"].get("enforce-eager", False) == ("eager" in name)
    assert measure._overlaps(document) == ("dbo" in name or "tbo" in name)
    for mode in modes:
        measure._role(document)["ep"]["mode"] = mode
        found = [str(finding) for finding in findings_of(measure._write(document, tmp_path))]
        wanted = ("EP203", "EP204")  # direct over several nodes, which peer stores reach here; hybrid in one domain
        assert [each for each in found if not any(code in each for code in wanted)] == []


def test_measurements_go_on_where_the_last_call_ended(tmp_path: Path) -> None:
    """With a stand-in for the engines: what fits into a call is done, once, an engine's own answers only in its first run."""
    for folder in ("deploy/scripts", "kernels/scripts", "results", "out"):
        (tmp_path / folder).mkdir(parents=True)
    script = tmp_path / "deploy" / "scripts" / "measure_all.sh"
    shutil.copy(DEPLOY / "scripts" / "measure_all.sh", script)
    engine = tmp_path / "kernels" / "scripts" / "engine.sh"
    engine.write_text(
        '#!/bin/bash\nif [ "$2" = unpack ]; then exec test -f "$RESULTS/$1"; fi\n'
        'out=${3##*--out }\necho "$3" >>"$RESULTS/told"\necho \'{"reference": []}\' >"${out%% *}"\n'
    )
    engine.chmod(0o755)

    def call(seconds: int, *names: str, status: int = 0) -> tuple[str, list[str]]:
        told = tmp_path / "results" / "told"
        told.write_text("")
        env = {**os.environ, "RESULTS": str(tmp_path / "results"), "OUT": str(tmp_path / "out"), "CALL_S": str(seconds)}
        done = subprocess.run([script, *names], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr, told.read_text().splitlines()

    assert call(570)[1] == [], "nothing was carried"
    (tmp_path / "results" / "sglang").touch()
    assert call(9999, "none")[1] == []
    assert call(9999, "sglang-hybrd", status=2) == ("no run and no engine is called sglang-hybrd\n", [])
    said, told = call(200, "sglang-hybrid", "sglang-own")
    assert told == [] and "for another call: sglang-hybrid sglang-own" in said
    said, told = call(315, "sglang-hybrid", "sglang-own")
    assert len(told) == 1 and "--modes hybrid" in told[0] and "--reference" not in told[0], said
    said, told = call(395, "sglang")
    assert ["h200x2-sglang-tbo" in told[0], "--baseline" in told[2]] == [True, True] and len(told) == 5, told
    assert f"--reference {tmp_path}/results/reference-sglang.json" in told[0] and "--reference" not in told[2]
    assert "for another call: vllm-ours" in call(9999)[0]
    assert "all are done" in call(9999, "sglang")[0]
    assert (tmp_path / "out" / "measured-sglang.tgz").stat().st_size


@pytest.mark.slow
def test_an_engine_is_served_flipped_and_compared(workplace: Workplace) -> None:
    status, said, result = measured(workplace, "h200x2-vllm-prefill", "equality", "--modes", "direct,normal", "--tokens", "4")
    assert status == 0, said
    assert list(result["modes"]) == ["direct", "normal"]
    assert result["modes"]["direct"]["flip"] is None
    assert [f["mode"] for f in result["modes"]["normal"]["flip"]["flips"]] == ["normal"]
    for mode, entry in result["modes"].items():
        assert entry["equal"] and entry["positions"] == entry["compared"] == 16 * 4
        assert [rank["dispatches"] for rank in entry["ranks"]] == [{mode: 16}] * 2, "those of these answers alone"
    assert len(result["reference"]) == 2 and result["deployment"]["roles"]["unified"]["data_parallel"] == 2
    assert result["deployment"]["roles"]["unified"]["args"]["enforce-eager"] is True


@pytest.mark.slow
@pytest.mark.parametrize("splits", ["1", "0.25"])
def test_without_two_micro_batches_an_overlapping_engine_is_not_equal(workplace: Workplace, splits: str) -> None:
    reference = workplace.folder / "reference.json"
    answer = {"tokens": [1] * 4, "logprobs": [-0.1] * 4, "margins": [2.9] * 4}
    reference.write_text(json.dumps({"reference": [[answer] * 16] * 2}))
    asked = ("--tokens", "4", "--reference", str(reference))
    status, said, result = measured(workplace, "h200x2-vllm-dbo", "equality", *asked, FAKE_SPLITS=splits)
    entry = result["modes"]["low_latency"]
    assert entry.get("equal") and entry["positions"] == 2 * 16 * 4, said
    assert entry["split"] == {"prompts": float(splits), "decoding": float(splits)}
    assert [rank["lane_rounds"] for rank in entry["ranks"]] == [[64, int(64 * float(splits))]] * 2
    assert (status == 0) == entry["micro_batched"] == (splits == "1")


@pytest.mark.slow
def test_windows_of_the_engines_own_all_to_all(workplace: Workplace) -> None:
    asked = ("--baseline", "--sequences", "2,1", "--windows", "2", "--no-profile")
    status, said, result = measured(workplace, "h200x2-vllm-prefill", "timing", *asked)
    assert status == 0, said
    entry = result["modes"]["allgather_reducescatter"]
    assert [(w["turn"], w["sequences_a_rank"]) for w in entry["windows"]] == [(0, 2), (0, 1), (1, 2), (1, 1)]
    assert entry["finite"] and all(w["long_s"] > 0 for w in entry["windows"])
    assert result["deployment"]["roles"]["unified"]["args"]["load-format"] == "dummy"
