"""What a role needs of a host, bounded waits, and the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ep_backend.deployment.load import read
from ep_backend.deployment.schema import RoleName
from ep_backend.doctor import host as host_module
from ep_backend.doctor.checks import CHECKS
from ep_backend.doctor.examine import examine, row
from ep_backend.doctor.host import Host, Unknown, run
from ep_backend.doctor.need import WITHOUT, Need, of_deployment, of_host
from ep_backend.doctor.result import Verdict, passed
from tests.doctor.tree import Tree

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAIR = """\
name: pair
topology: {preset: h200-nvl8-cx7, nodes: 2}
model: {preset: deepseek-v3}
roles:
  prefill: {data_parallel: 8, ep: {mode: direct, max_tokens: 4096}, args: {max-num-batched-tokens: 4096}}
  decode: {data_parallel: 16, nodes: 2, ep: {mode: low_latency, max_tokens: 128}, args: {max-num-batched-tokens: 128}}
target: {kind: slurm}
"""


def need_of(name: str, role: RoleName | None) -> Need:
    return of_deployment(read(DEPLOY / name)[0].deployment, role)


@pytest.mark.parametrize(
    "file, role, words, ranks",
    [
        ("local-cpu.yaml", None, {"cpu"}, 4),
        ("local-cpu.yaml", "decode", {"cpu"}, 2),
        ("gpt-oss-120b-h200x4.yaml", "unified", {"gpu", "gpus"}, 4),
        ("deepseek-v3-h800-ep128.yaml", "decode", {"gpu", "gpus", "remote", "nodes"}, 8),
        ("kimi-k2-gb200-nvl72.yaml", "decode", {"gpu", "gpus", "domain", "nodes"}, 4),
    ],
)
def test_words_follow_from_role_and_topology(file: str, role: RoleName | None, words: set[str], ranks: int) -> None:
    need = need_of(file, role)
    assert need.words - {"file"} == words
    assert need.ranks == ranks


def test_a_role_of_one_node_needs_no_nic(tmp_path: Path, tree: Tree) -> None:
    file = tmp_path / "pair.yaml"
    file.write_text(PAIR)

    def statuses(role: RoleName | None) -> dict[str, str]:
        return {row.texts.id: row.status for row in examine(tree.host(), file, role).rows}

    network = ("nics", "ibgda", "gpudirect", "memlock", "nic_distance")
    assert {statuses("prefill")[name] for name in network} == {"skip"}
    assert {statuses("decode")[name] for name in network} == {"pass"}
    assert {statuses(None)[name] for name in network} == {"pass"}
    assert statuses("prefill")["gpu_count"] == "fail"  # 8 ranks, 4 GPUs


def test_memory_of_a_role_is_the_plans(tmp_path: Path) -> None:
    from ep_backend.plan.planner import plan

    file = tmp_path / "pair.yaml"
    file.write_text(PAIR)
    deployment = read(file)[0].deployment
    (held,) = of_deployment(deployment, "decode").gpu_memory
    planned = plan(deployment).roles["decode"]
    assert planned.memory is not None
    assert held.buffer == planned.buffer["total"]
    assert held.weights == planned.memory.weights


def test_an_unknown_role_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match="no role prefill; it has unified"):
        need_of("gpt-oss-120b-h200x4.yaml", "prefill")


def test_without_a_file_the_hardware_says_what_to_check(tree: Tree, tmp_path: Path) -> None:
    assert of_host(tree.host()).words == {"gpu", "gpus", "domain", "remote", "nodes"}
    tree.write("/sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet")
    assert "roce" in of_host(tree.host()).words
    bare = Tree(tmp_path / "bare", tmp_path / "none")
    bare.root.mkdir()
    assert of_host(bare.host()).words == {"cpu"}


def test_nics_that_cannot_be_read_end_nothing(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/link_layer").mkdir(parents=True)
    host = Host(root=tmp_path, env={}, version=lambda package: None)
    assert of_host(host).words == {"cpu", "remote", "nodes"}
    (tmp_path / "bare/sys/class").mkdir(parents=True)
    (tmp_path / "bare/sys/class/infiniband").touch()
    assert of_host(replace(host, root=tmp_path / "bare")).words == {"cpu"}


def test_a_skipped_check_says_why(tree: Tree) -> None:
    def never(host: Host, need: Need) -> Verdict:
        raise AssertionError

    found = row("nics", never, tree.host(), Need("", frozenset({"gpu"})), 1)
    assert (found.status, found.evidence) == ("skip", WITHOUT["remote"])


def test_a_probe_that_hangs_or_breaks_ends_nothing(tree: Tree) -> None:
    def hangs(host: Host, need: Need) -> Verdict:
        time.sleep(20)
        return passed("")

    def breaks(host: Host, need: Need) -> Verdict:
        raise ZeroDivisionError("by nought")

    start = time.monotonic()
    found = row("cpus", hangs, tree.host(), Need("", frozenset()), 0.2)
    assert (found.status, found.evidence) == ("fail", "no answer in 0.2 s")
    assert time.monotonic() - start < 5
    found = row("cpus", breaks, tree.host(), Need("", frozenset()), 5)
    assert (found.status, found.evidence) == ("skip", "not understood: ZeroDivisionError: by nought")


def program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_commands_are_bounded_and_their_faults_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "COMMAND_S", 0.5)
    program(tmp_path, "hangs", "trap '' TERM; sleep 60 & wait")
    program(tmp_path, "fails", "echo first; echo no devices >&2; exit 9")
    start = time.monotonic()
    with pytest.raises(Unknown, match=r"hangs did not answer in 0\.5 s"):
        run([str(tmp_path / "hangs")])
    assert time.monotonic() - start < 10
    with pytest.raises(Unknown, match="ended with status 9: no devices"):
        run([str(tmp_path / "fails")])
    with pytest.raises(Unknown, match="No such file"):
        run([str(tmp_path / "absent")])
    assert run(["echo", "fine"]) == "fine\n"


def test_a_command_that_hung_is_not_asked_again(tree: Tree) -> None:
    asked = []

    def runner(command: object) -> str:
        asked.append(command)
        raise Unknown("nvidia-smi did not answer in 10 s")

    host = tree.host()
    host.runner = runner
    need = Need("", frozenset(WITHOUT), ranks=4)
    rows = {name: row(name, CHECKS[name], host, need, 5) for name in ("driver", "gpu_count", "mig", "persistence")}
    assert rows["driver"].status == "fail"
    assert rows["mig"].status == "skip" and "did not answer" in rows["mig"].evidence
    assert len(asked) == 1


def doctor(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = "import sys; from ep_backend.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    env = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else None
    command = [sys.executable, "-c", code, "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=env)


def test_json_has_every_check_and_the_exit_status_is_1_for_a_failure(tmp_path: Path) -> None:
    """A GPU role: on a host without one, or with fewer than 64, at least a check fails."""
    file = tmp_path / "role.yaml"
    big = "unified: {data_parallel: 64, ep: {mode: direct, max_tokens: 4096}, args: {max-num-batched-tokens: 4096}}"
    file.write_text(f"name: big\ntopology: {{preset: gb200-nvl72}}\nmodel: {{preset: deepseek-v3}}\nroles: {{{big}}}\n")
    done = doctor("-f", str(file), "--role", "unified", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert [check["id"] for check in report["checks"]] == list(CHECKS)
    assert set(report["checks"][0]) == {"id", "group", "title", "status", "evidence", "fix", "why", "source"}
    assert sum(report["counts"].values()) == len(CHECKS)
    assert report["counts"]["fail"] >= 1
    documented = (ROOT / "docs" / "doctor.md").read_text()
    assert all(f"`{key}`" in documented for key in [*report, *report["checks"][0]])


def test_text_for_people(tmp_path: Path) -> None:
    done = doctor("-f", str(DEPLOY / "local-cpu.yaml"), "--role", "decode")
    assert "local-cpu: decode (low_latency, EP2 on one host)" in done.stdout
    assert "Clock source" in done.stdout and "NVLink" not in done.stdout
    assert "NVLink" in doctor("-f", str(DEPLOY / "local-cpu.yaml"), "--all").stdout


def test_what_cannot_be_asked_is_told() -> None:
    for arguments, words in (
        (("--role", "decode"), "add -f FILE"),
        (("--role", "encode", "-f", "deploy/local-cpu.yaml"), "none of prefill, decode, unified"),
        (("-f", "absent.yaml"), "absent.yaml:1:1: cannot be read"),
    ):
        done = doctor(*arguments)
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr
