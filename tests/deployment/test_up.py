"""Starting and stopping, with fake engines: nothing is left running or in shared memory, however it ends."""

import json
import mmap
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ep_backend.deployment import claim, commands
from ep_backend.deployment.commands import down
from ep_backend.deployment.problems import DeploymentError
from ep_backend.deployment.processes import session_members, start_ticks, stop_sessions
from ep_backend.deployment.state import RunState, write_state
from tests.deployment.conftest import Workplace

FAULT_LINE = "ValueError: the weights are not there"


def sessions(workplace: Workplace) -> list[int]:
    return [instance["pid"] for instance in instances(workplace)]


def instances(workplace: Workplace) -> list[dict[str, Any]]:
    found = workplace.state()["instances"]
    assert isinstance(found, list)
    return found


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("fake_")}


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def is_ready(workplace: Workplace) -> bool:
    try:
        return workplace.state()["phase"] == "ready"
    except FileNotFoundError:
        return False


def assert_nothing_left(workplace: Workplace, leaders: list[int]) -> None:
    assert session_members(leaders) == []
    assert not {f"fake_{pid}" for pid in leaders} & shared_memory()


def start_foreground(workplace: Workplace) -> subprocess.Popen[str]:
    child = workplace.start("up", str(workplace.file))
    wait_until(lambda: is_ready(workplace))
    return child


def test_up_status_ask_down(workplace: Workplace) -> None:
    file = str(workplace.file)
    code, output = workplace.run("up", file, "--detach")
    assert code == 0, output
    for name in ("prefill", "decode", "router"):
        assert f"{name}: starting, log " in output
    leaders = sessions(workplace)
    code, output = workplace.run("status", file)
    assert code == 0, output
    assert "low_latency *" in output and "5.0 KiB" in output
    assert workplace.run("ask", file, "how are you?") == (0, "fine\n")
    code, output = workplace.run("ask", file, "how are you?", "--max-tokens", str(10**20))
    assert code == 2 and "--max-tokens" in output
    code, output = workplace.run("up", file)
    assert code == 1 and "runs already" in output
    assert workplace.run("down", file) == (0, f"{workplace.folder.name} is down\n")
    assert_nothing_left(workplace, leaders)
    state = workplace.folder / ".ep" / "run" / workplace.folder.name / "state.json"
    missing = f"there is no {state}; one is known in the folder where it was started"
    assert workplace.run("down", file) == (0, f"{workplace.folder.name} was not running: {missing}\n")
    code, output = workplace.run("ask", file, "still there?")
    assert code == 1 and f"does not run ({missing}); start it with" in output


def test_a_proxy_does_not_stand_before_what_runs_here(workplace: Workplace) -> None:
    """Neither between `up` and its instances, nor between these, which are told so: they reach the hub through it."""
    workplace.file.write_text(f"{workplace.file.read_text()}target: {{start_timeout_s: 30}}\n")
    file, proxy = str(workplace.file), {"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    code, output = workplace.run("up", file, "--detach", **proxy, no_proxy="intranet")
    assert code == 0, output
    assert workplace.run("ask", file, "how are you?", **proxy) == (0, "fine\n")
    for pid in sessions(workplace):
        given = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        assert {"HTTP_PROXY=http://127.0.0.1:9", "NO_PROXY=intranet,localhost,127.0.0.1,::1"} <= set(given)
        assert "no_proxy=intranet,localhost,127.0.0.1,::1" in given


def test_ctrl_c_leaves_nothing(workplace: Workplace) -> None:
    child = start_foreground(workplace)
    leaders = sessions(workplace)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0, output
    assert_nothing_left(workplace, leaders)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_leaves_nothing(workplace: Workplace, number: signal.Signals) -> None:
    child = start_foreground(workplace)
    leaders = sessions(workplace)
    assert child.stdout is not None
    child.stdout.close()
    child.send_signal(number)
    child.wait(timeout=60)
    assert_nothing_left(workplace, leaders)


def test_many_signals_at_once_leave_nothing(workplace: Workplace) -> None:
    child = start_foreground(workplace)
    leaders = sessions(workplace)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) * 300:
        if child.poll() is None:
            child.send_signal(number)
    child.communicate(timeout=60)
    assert_nothing_left(workplace, leaders)


def test_what_runs_is_served_when_nobody_reads_its_output(workplace: Workplace) -> None:
    child = workplace.start("up", str(workplace.file))
    assert child.stdout is not None
    child.stdout.close()
    wait_until(lambda: is_ready(workplace))
    leaders = sessions(workplace)
    assert workplace.run("ask", str(workplace.file), "how are you?") == (0, "fine\n")
    child.send_signal(signal.SIGTERM)
    child.wait(timeout=60)
    assert_nothing_left(workplace, leaders)


def test_ctrl_c_while_loading_leaves_nothing(workplace: Workplace) -> None:
    child = workplace.start("up", str(workplace.file))
    state = workplace.folder / ".ep" / "run" / workplace.folder.name / "state.json"
    wait_until(lambda: state.exists() and len(instances(workplace)) == 2)
    leaders = sessions(workplace)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert_nothing_left(workplace, leaders)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_waiting_up_stops_what_it_started(workplace: Workplace, number: signal.Signals) -> None:
    child = workplace.start("up", str(workplace.file), "--detach", FAKE_LOADS_S="60")
    state = workplace.folder / ".ep" / "run" / workplace.folder.name / "state.json"
    wait_until(lambda: state.exists() and len(instances(workplace)) == 2)
    leaders = sessions(workplace)
    child.send_signal(number)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert f"{number.name} came before {workplace.folder.name} served; it is stopped" in output
    assert_nothing_left(workplace, leaders)
    assert not state.exists()


def test_status_of_what_still_starts(workplace: Workplace) -> None:
    child = workplace.start("up", str(workplace.file), FAKE_LOADS_S="60")
    state = workplace.folder / ".ep" / "run" / workplace.folder.name / "state.json"
    wait_until(lambda: state.exists() and len(instances(workplace)) == 2)
    code, output = workplace.run("status", str(workplace.file))
    assert code == 0, output
    assert re.search(r"decode: starting for \d+ s", output)
    assert "Connect" not in output and "counters" not in output
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)


def test_up_prints_what_lint_doubts(workplace: Workplace) -> None:
    text = workplace.file.read_text()
    workplace.file.write_text(text.replace("max-num-seqs: 8", "max-num-seq: 8"))
    code, output = workplace.run("up", str(workplace.file), "--detach")
    assert code == 0, output
    assert "warning: " in output
    assert "roles.prefill.args.max-num-seq: is short for max-num-seqs; write max-num-seqs [EP307]" in output


def test_ask_gives_the_engines_own_words(workplace: Workplace) -> None:
    assert workplace.run("up", str(workplace.file), "--detach")[0] == 0
    code, output = workplace.run("ask", str(workplace.file), "word " * 200)
    assert code == 1
    assert "This model's maximum context length is 100 tokens, you asked for 200." in output


def test_a_dead_rank_takes_all_down_and_is_named(workplace: Workplace) -> None:
    child = start_foreground(workplace)
    leaders = sessions(workplace)
    _, output = workplace.run("status", str(workplace.file), "--json")
    rank = next(role["ranks"][0]["pid"] for role in json.loads(output)["roles"] if role["role"] == "decode")
    os.kill(rank, signal.SIGKILL)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 1
    assert f"decode lost rank 0 (process {rank} was ended by SIGKILL)" in output
    assert "decode.log ends with" in output
    assert_nothing_left(workplace, leaders)
    assert workplace.run("up", str(workplace.file), "--detach")[0] == 0


def test_an_engine_that_shuts_down_after_losing_a_rank_is_not_just_status_0(workplace: Workplace) -> None:
    child = workplace.start("up", str(workplace.file), FAKE_SHUTS_DOWN="1")
    wait_until(lambda: is_ready(workplace))
    _, output = workplace.run("status", str(workplace.file), "--json")
    rank = next(role["ranks"][1]["pid"] for role in json.loads(output)["roles"] if role["role"] == "decode")
    os.kill(rank, signal.SIGKILL)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 1
    assert f"decode lost rank 1 (process {rank} " in output
    assert "Engine core process EngineCore_DP1 died unexpectedly." in output


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (40, "signal 40")])
def test_a_killed_instance_takes_all_down_and_is_named(workplace: Workplace, number: int, name: str) -> None:
    child = start_foreground(workplace)
    leaders = sessions(workplace)
    os.kill(leaders[0], number)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 1
    assert f"prefill was ended by {name}" in output
    assert_nothing_left(workplace, leaders)


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_an_engine_that_ends_while_loading_is_named(workplace: Workplace, detach: list[str]) -> None:
    code, output = workplace.run("up", str(workplace.file), *detach, FAKE_DIES="decode")
    assert code == 1
    assert "decode exited with status 3; its log" in output
    assert FAULT_LINE in output
    leaders = sessions(workplace)
    assert_nothing_left(workplace, leaders)
    code, output = workplace.run("status", str(workplace.file))
    assert code == 1 and FAULT_LINE in output


def test_calls_in_messages_can_be_typed(workplace: Workplace) -> None:
    """Whatever the file is called."""
    workplace.file.rename(workplace.folder / "-my file.yaml")
    assert workplace.run("up", "--detach", "--", "-my file.yaml")[0] == 0
    code, output = workplace.run("up", "./-my file.yaml")
    assert code == 1
    said = re.search(r"runs already \(process \d+\); `ep-backend (.*)` stops it", output)
    assert said is not None, output
    assert workplace.run(*shlex.split(said[1]))[0] == 0


def test_down_cleans_up_after_a_killed_supervisor(workplace: Workplace) -> None:
    child = start_foreground(workplace)
    leaders = sessions(workplace)
    child.kill()
    child.communicate(timeout=60)
    code, output = workplace.run("status", str(workplace.file))
    assert code == 1 and "lost its supervisor" in output
    code, output = workplace.run("up", str(workplace.file))
    assert code == 1 and re.search(r"lost its supervisor \(process \d+\); `ep-backend down .*` cleans up", output), output
    assert workplace.run("down", str(workplace.file))[0] == 0
    assert_nothing_left(workplace, leaders)


@pytest.mark.parametrize(("content", "killed"), [("{bad", False), ("", True), ('{"name": "of another version"}', False)])
def test_down_cleans_up_where_the_state_is_garbage(workplace: Workplace, content: str, killed: bool) -> None:
    child = start_foreground(workplace)
    leaders, file = sessions(workplace), str(workplace.file)
    state = workplace.folder / ".ep" / "run" / workplace.folder.name / "state.json"
    if killed:
        child.kill()
        child.communicate(timeout=60)
    state.write_text(content)
    for command in (["status"], ["up"], ["up", "--detach"]):
        code, output = workplace.run(*command, file)
        assert code == 1 and f"{state} is no state of a deployment" in output and "down FILE` cleans up" in output, output
        assert "Traceback" not in output
    assert workplace.run("down", file) == (0, f"{workplace.folder.name} is down\n")
    assert_nothing_left(workplace, leaders)
    assert child.wait(60) == (-signal.SIGKILL if killed else 0)
    assert not state.exists()


@pytest.mark.parametrize("killed", [False, True])
def test_down_stops_what_has_lost_its_folder(workplace: Workplace, killed: bool) -> None:
    child = start_foreground(workplace)
    leaders, file = sessions(workplace), str(workplace.file)
    if killed:
        child.kill()
        child.communicate(timeout=60)
    shutil.rmtree(workplace.folder / ".ep")
    code, output = workplace.run("status", file)
    assert code == 1 and (killed or f"(process {child.pid}) has not started yet, or lost its" in output), output
    assert workplace.run("down", file) == (0, f"{workplace.folder.name} is down\n")
    assert_nothing_left(workplace, leaders)
    assert child.wait(60) == (-signal.SIGKILL if killed else 0)


def test_down_leaves_processes_that_only_have_the_numbers(workplace: Workplace) -> None:
    child = start_foreground(workplace)
    state = workplace.folder / ".ep" / "run" / workplace.folder.name / "state.json"
    old = workplace.state()
    assert workplace.run("down", str(workplace.file))[0] == 0
    child.communicate(timeout=60)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        for instance in old["instances"]:  # type: ignore[attr-defined]
            instance["pid"] = other.pid
        state.write_text(json.dumps(old))
        assert workplace.run("down", str(workplace.file))[0] == 0
        assert other.poll() is None
        other.kill()
    assert not state.exists()


def test_down_does_not_wait_for_a_supervisor_that_ends_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    write_state(
        RunState(
            name="gone", pid=ended.pid, start_ticks=1, phase="ready", started_at=0.0, url="http://127.0.0.1:9", served_name="m"
        )
    )
    monkeypatch.setattr(commands, "_supervised", lambda state: True)  # it was there a moment ago
    assert down("gone")


def test_down_gives_a_deployment_the_time_to_stop_that_its_file_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 200:
            supervisor.stdin.close()
            supervisor.wait()

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as supervisor:
        facts = {"started_at": 0.0, "url": "http://127.0.0.1:9", "served_name": "model", "stop_timeout_s": 300.0}
        ticks = start_ticks(supervisor.pid)
        write_state(RunState(name="slow", phase="ready", pid=supervisor.pid, start_ticks=ticks, **facts))
        monkeypatch.setattr(commands, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
        monkeypatch.setattr(os, "kill", lambda pid, number: None)  # it is slow to end
        assert down("slow")
        monkeypatch.undo()
        assert now > 200


def test_what_cannot_be_removed_does_not_keep_the_rest(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    stop_sessions([], {tmp_path / "folder", tmp_path / "file"}, 0.0)
    assert not (tmp_path / "file").exists()


MAPS = """
import mmap, sys, time
kept = []
for name in sys.argv[1:]:
    with open(name, "r+b") as file:
        kept.append(mmap.mmap(file.fileno(), 4096))
print("maps", flush=True)
time.sleep(60)
"""


def test_memory_that_others_use_too_stays() -> None:
    """Another deployment's, or a profiler's: only what nobody maps any more is left over."""
    own, common = (Path(f"/dev/shm/fake_{what}_{os.getpid()}") for what in ("own", "common"))
    with ExitStack() as ends:
        for file in (own, common):
            file.write_bytes(bytes(4096))
            ends.callback(file.unlink, missing_ok=True)
        command = [sys.executable, "-c", MAPS, str(own), str(common)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as leader, common.open("r+b") as file:
            ends.callback(leader.kill)
            assert leader.stdout is not None and leader.stdout.readline() == b"maps\n"
            with mmap.mmap(file.fileno(), 4096):
                stop_sessions([leader.pid], set(), 10.0)
        assert not own.exists() and common.exists()


def test_up_lets_one_that_failed_end_first(workplace: Workplace) -> None:
    name = workplace.folder.name
    with subprocess.Popen(["sleep", "6"]) as ending:
        place = {"url": "u", "served_name": "m", "started_at": 0.0}
        ticks = start_ticks(ending.pid)
        assert ticks is not None
        file = workplace.folder / ".ep" / "run" / name / "state.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"name": name, "pid": ending.pid, "start_ticks": ticks, "phase": "failed", **place}))
        code, output = workplace.run("up", str(workplace.file), "--detach")
        assert code == 0, output


@pytest.mark.parametrize("command", ["up", "status", "down", "flip"])
def test_a_folder_that_was_removed_is_told(workplace: Workplace, command: str) -> None:
    gone = workplace.folder / "gone"
    gone.mkdir()
    program = f"cd {gone} && rmdir {gone} && exec {workplace.folder}/bin/python -P -m ep_backend {command} {workplace.file}"
    done = subprocess.run(["bash", "-c", program], env=workplace.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "ep-backend: the current folder was removed; go to the one where the deployment was started\n"


def test_a_file_where_the_folder_belongs_is_told(workplace: Workplace) -> None:
    (workplace.folder / ".ep").touch()
    for command in (["status"], ["down"], ["up"], ["up", "--detach"]):
        code, output = workplace.run(*command, str(workplace.file))
        assert (code, output) == (1, f"ep-backend: {workplace.folder}/.ep is a file, must be a folder; move it away\n")
    (workplace.folder / ".ep").unlink()


def test_anothers_state_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def refuse(file: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DeploymentError, match=r"state.json cannot be used: Permission denied; do this as the user who"):
        down("theirs")


@pytest.mark.parametrize("command", ["status", "down"])
def test_a_name_that_leads_elsewhere_is_refused(workplace: Workplace, command: str) -> None:
    text = workplace.file.read_text()
    workplace.file.write_text(text.replace(f"name: {workplace.folder.name}", "name: ../../evil"))
    code, output = workplace.run(command, str(workplace.file))
    assert code == 1 and "name is ../../evil, must be 1 to 63 of a-z" in output, output
    workplace.file.write_text(text)


def test_a_second_up_leaves_the_log_of_the_first(workplace: Workplace) -> None:
    file = str(workplace.file)
    both = [workplace.start("up", file, "--detach") for _ in range(2)]
    ended = sorted((child.communicate(timeout=120)[0], child.returncode) for child in both)
    assert sorted(code for _, code in ended) == [0, 1], ended
    assert re.search(r"runs already \(process \d+\)|is being started", next(out for out, code in ended if code)), ended
    log = workplace.folder / ".ep" / "run" / workplace.folder.name / "up.log"
    before = log.read_text()
    assert "is ready at" in before
    code, output = workplace.run("up", file, "--detach")
    assert code == 1 and "runs already" in output
    assert log.read_text() == before
    assert [each.name for each in log.parent.glob("up*")] == ["up.log"]


def test_an_up_that_was_stopped_says_so(workplace: Workplace) -> None:
    child = workplace.start("up", str(workplace.file), "--detach", FAKE_LOADS_S="60")
    state = workplace.folder / ".ep" / "run" / workplace.folder.name / "state.json"
    wait_until(lambda: state.exists() and len(instances(workplace)) == 2)
    assert workplace.run("down", str(workplace.file))[0] == 0
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 1
    assert f"{workplace.folder.name} was stopped before it served, by `ep-backend down` or a signal" in output


def test_a_port_in_use_is_told_before_loading(workplace: Workplace) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        text = workplace.file.read_text()
        before = text[text.rindex("{port: ") :].strip()
        workplace.file.write_text(text.replace(before, f"{{port: {port}}}"))
        code, output = workplace.run("up", str(workplace.file))
        assert code == 1
        assert f"router.port: 127.0.0.1:{port} cannot be listened on (Address already in use)" in output
        assert not Path(workplace.folder / ".ep").exists()


def test_one_port_given_twice_is_told_before_loading(workplace: Workplace) -> None:
    text = workplace.file.read_text()
    before = text[text.rindex("{port: ") :].strip()
    port = before.removeprefix("{port: ").removesuffix("}")
    workplace.file.write_text(f"{text.rstrip()}\ncontrol: {{port: {port}}}\n")
    code, output = workplace.run("up", str(workplace.file))
    assert code == 1
    assert f"control.port: {port} is the router's port too" in output
    assert not Path(workplace.folder / ".ep").exists()


def test_a_claimant_that_was_asked_too_often_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "QUESTIONS", 0)
    with claim.claimed(tmp_path) as mine:
        assert mine
        assert claim.claimant(tmp_path) == os.getpid()
        with pytest.raises(DeploymentError, match=f"holds {tmp_path}, and was asked too often to be named; end it by hand"):
            claim.claimant(tmp_path)
    assert claim.claimant(tmp_path) is None
