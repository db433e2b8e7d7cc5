"""`flip` and `status` on a deployment of fake engines: real processes, a real control service."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from ep_backend.agent import SILENT_S
from ep_backend.cli.app import app
from ep_backend.control.client import ControlClient, ControlFailed
from ep_backend.control.models import DeploymentStatus, RoleStatus
from ep_backend.deployment import commands
from ep_backend.deployment.agents import rank_statuses
from ep_backend.deployment.client import chat
from ep_backend.deployment.load import load
from ep_backend.deployment.processes import start_ticks
from ep_backend.deployment.rank_status import RankStatus
from ep_backend.deployment.state import InstanceState, RunState
from tests.deployment.conftest import Workplace
from tests.deployment.conftest import workplace as workplace
from tests.deployment.conftest import write_file as write_file


def edit(place: Workplace, old: str, new: str) -> None:
    text = place.file.read_text()
    assert old in text
    place.file.write_text(text.replace(old, new, 1))


def status(place: Workplace) -> dict[str, Any]:
    code, output = place.run("status", str(place.file), "--json")
    assert code == 0, output
    found: dict[str, Any] = json.loads(output)
    return found


def pids(place: Workplace) -> dict[str, int]:
    return {instance["name"]: instance["pid"] for instance in status(place)["instances"]}


def test_an_edited_file_is_flipped_or_restarted(workplace: Workplace) -> None:
    file = str(workplace.file)
    assert workplace.run("up", file, "--detach")[0] == 0
    before = pids(workplace)

    edit(workplace, "mode: direct", "mode: normal")
    code, output = workplace.run("status", file)
    assert code == 0 and "the file differs: roles.prefill.ep.mode: direct -> normal (flip)" in output
    code, output = workplace.run("flip", file, "--dry-run")
    assert code == 0 and "would apply" in output and "nothing was changed" in output, output
    assert {role["mode_desired"] for role in status(workplace)["roles"]} == {"direct", "low_latency"}
    code, output = workplace.run("flip", file)
    assert code == 0 and "prefill: direct -> normal: applied after epoch 3 on 2 ranks" in output, output
    assert workplace.run("flip", file) == (0, "the file says what runs; nothing to do\n")
    now = status(workplace)
    assert [role["mode_executed"] for role in now["roles"]] == ["normal", "low_latency"] and now["drift"] == []
    assert pids(workplace) == before

    edit(workplace, "mode: low_latency, max_tokens: 256", "mode: hybrid, max_tokens: 512")
    code, output = workplace.run("flip", file)
    assert code == 1 and "roles.decode.ep.max_tokens: 256 -> 512 (restart)" in output and "--restart" in output, output
    code, output = workplace.run("flip", file, "--restart")
    assert code == 0 and "decode: restarted" in output, output
    after = pids(workplace)
    assert after["prefill"] == before["prefill"] and after["decode"] != before["decode"]
    assert [role["mode_executed"] for role in status(workplace)["roles"]] == ["normal", "hybrid"]
    assert workplace.run("ask", file, "how are you?") == (0, "fine\n")


def test_a_restart_that_fails_brings_the_old_settings_back(workplace: Workplace) -> None:
    file = str(workplace.file)
    assert workplace.run("up", file, "--detach")[0] == 0
    edit(workplace, "mode: low_latency, max_tokens: 256}", "mode: low_latency, max_tokens: 512}\n    env: {FAKE_DIES: decode}")
    code, output = workplace.run("flip", file, "--restart")
    assert code == 1 and "ValueError: the weights are not there" in output and "runs with its old settings again" in output
    log = workplace.folder / ".ep" / "run" / workplace.folder.name / "decode.failed.log"
    assert f"its log {log} ends with" in output and "ValueError: the weights are not there" in log.read_text()
    now = status(workplace)
    assert now["phase"] == "ready"
    assert {change["place"] for change in now["drift"]} == {"roles.decode.ep.max_tokens", "roles.decode.env.FAKE_DIES"}


def test_what_a_failed_restart_brings_back_is_what_ran(workplace: Workplace) -> None:
    """Not what the deployment started with: flips since then count, and roles that were restarted before this one."""
    file = str(workplace.file)
    assert workplace.run("up", file, "--detach")[0] == 0
    edit(workplace, "mode: low_latency", "mode: hybrid")
    assert workplace.run("flip", file)[0] == 0
    before = pids(workplace)
    edit(workplace, "max_tokens: 1024}", "max_tokens: 2048}")
    edit(workplace, "max_tokens: 256}", "max_tokens: 512}\n    env: {FAKE_DIES: decode}")
    code, output = workplace.run("flip", file, "--restart")
    assert code == 1 and "decode runs with its old settings again" in output, output
    now = status(workplace)
    assert [(role["mode_desired"], role["mode_executed"], role["drift"]) for role in now["roles"]] == [
        ("direct", "direct", []),
        ("hybrid", "hybrid", []),
    ]
    assert {change["place"] for change in now["drift"]} == {"roles.decode.ep.max_tokens", "roles.decode.env.FAKE_DIES"}
    assert pids(workplace)["prefill"] != before["prefill"]


def test_a_restart_that_cannot_even_begin_leaves_all_running(workplace: Workplace) -> None:
    file = str(workplace.file)
    assert workplace.run("up", file, "--detach")[0] == 0
    before = pids(workplace)
    many = ", ".join(f"X{number}: {'x' * 65_000}" for number in range(50))  # more than the system gives to a program
    edit(workplace, "max_tokens: 256}", f"max_tokens: 512}}\n    env: {{{many}}}")
    code, output = workplace.run("flip", file, "--restart")
    assert code == 1 and "Argument list too long" in output and "decode runs with its old settings again" in output, output
    assert status(workplace)["phase"] == "ready" and pids(workplace)["prefill"] == before["prefill"]
    assert workplace.run("ask", file, "how are you?") == (0, "fine\n")


def test_an_engine_that_is_not_here_is_told_before_anything_ends(workplace: Workplace) -> None:
    file, nowhere = str(workplace.file), str(workplace.folder / "nowhere")
    one = workplace.file.read_text().partition("  decode:")[0].replace("prefill:", "unified:")
    port = re.findall(r"router:.*", workplace.file.read_text())[0]
    workplace.file.write_text(f"{one}{port}\n")
    assert workplace.run("up", file, "--detach", EP_SGLANG_PYTHON=nowhere)[0] == 0
    before = pids(workplace)
    edit(workplace, "    data_parallel: 2", "    engine: sglang\n    data_parallel: 2")
    edit(workplace, "args: {max-num-batched-tokens: 1024, max-num-seqs: 8}", "args: {chunked-prefill-size: 2048}")
    for options in (["--dry-run"], ["--restart"]):
        code, output = workplace.run("flip", file, *options)
        assert code == 1 and f"deployment.yaml:6:5: roles.unified.engine: is sglang, but EP_SGLANG_PYTHON={nowhere}" in output
    assert pids(workplace) == before


def test_a_restart_that_could_not_be_noted_ends_nothing(workplace: Workplace) -> None:
    """As on a full disk: the deployment serves on, and can be stopped."""
    file = str(workplace.file)
    assert workplace.run("up", file, "--detach")[0] == 0
    before = pids(workplace)
    state = workplace.folder / ".ep" / "run" / workplace.folder.name / "state.json"
    state.with_suffix(".tmp").mkdir()
    edit(workplace, "max_tokens: 256}", "max_tokens: 512}")
    code, output = workplace.run("flip", file, "--restart")
    assert code == 1, output
    assert f"{state} cannot be used: Is a directory; see to it; decode runs on as it was" in output
    assert pids(workplace) == before
    assert workplace.run("ask", file, "how are you?") == (0, "fine\n")
    assert workplace.run("down", file) == (0, f"{workplace.folder.name} is down\n")
    assert not state.exists()


def test_an_interrupted_flip_says_what_goes_on(workplace: Workplace) -> None:
    file = str(workplace.file)
    assert workplace.run("up", file, "--detach")[0] == 0
    before = pids(workplace)["decode"]
    edit(workplace, "max_tokens: 256}", "max_tokens: 512}\n    env: {FAKE_LOADS_S: '20'}")
    child = workplace.start("flip", file, "--restart")
    while workplace.state()["phase"] == "ready":
        time.sleep(0.05)
    code, output = workplace.run("flip", file)
    assert code == 1 and re.search(r"is starting for \d+ s; try again|another change of .* is under way", output), output
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    assert f"what was asked for goes on, and `ep-backend status {file}` follows it" in output
    while workplace.state()["phase"] != "ready":
        time.sleep(0.05)
    assert pids(workplace)["decode"] != before


def test_a_flip_during_a_start_says_that_it_starts(workplace: Workplace) -> None:
    child = workplace.start("up", str(workplace.file), FAKE_LOADS_S="60")
    state = workplace.folder / ".ep" / "run" / workplace.folder.name / "state.json"
    while not state.exists() or len(workplace.state()["instances"]) < 2:
        time.sleep(0.05)
    edit(workplace, "mode: direct", "mode: normal")
    code, output = workplace.run("flip", str(workplace.file))
    assert code == 1
    assert re.search(rf"^ep-backend: {workplace.folder.name} is starting for \d+ s; try again once it serves$", output), output
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)


@pytest.mark.parametrize(
    ("status_code", "form", "body"),
    [(200, "text/html", "<html>\nhello\n</html>"), (404, "text/html", "<html>\nno\n</html>"), (200, "application/json", "[1]")],
)
def test_something_else_at_the_services_address_is_told(
    workplace: Workplace, tmp_path: Path, status_code: int, form: str, body: str
) -> None:
    class Other(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.send_response(status_code)
            self.send_header("Content-Type", form)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        state = RunState(
            **{"name": "other", "pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "phase": "ready"},
            **{"started_at": 0.0, "url": address, "served_name": "model", "control_url": address},
        )
        wanted = load(workplace.file)
        said = f"what answers at {address} is no control service of this version (status {status_code}, {form}); end it"
        with ControlClient(state) as control:
            for ask in (
                control.status,
                lambda: control.ask("hello", 3),
                lambda: control.apply(wanted, dry_run=True, restart=False),
            ):
                with pytest.raises(ControlFailed, match=re.escape(said)):
                    ask()
        with pytest.raises(httpx.HTTPError) as told:
            chat(state, "hello", 3)
        assert "\n" not in str(told.value)
        agent = InstanceState(name="decode", role="decode", log=tmp_path / "log", agents=[address], pid=1, start_ticks=1)
        (rank,) = rank_statuses(agent, None)
        assert rank.error and "\n" not in rank.error and (status_code != 200 or "is no agent of a rank" in rank.error)
        server.shutdown()


@pytest.mark.parametrize(
    ("trouble", "code"),
    [({}, 0), ({"silent_s": SILENT_S + 1}, 1), ({"failed": "rank 1: gone"}, 1), ({"error": "no"}, 1), ({"silent_s": 1.0}, 0)],
)
def test_the_exit_status_tells_of_ranks_in_trouble(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trouble: dict[str, object], code: int
) -> None:
    rank = RankStatus.model_validate({"agent": "http://127.0.0.1:1", "role": "unified", "rank": 0, "world_size": 1, **trouble})
    role = RoleStatus(role="unified", engine="vllm", mode_desired="auto", mode_executed=None, allowed=[], ranks=[rank])
    now = DeploymentStatus(name="x", phase="ready", url="", file="x.yaml", drift=[], roles=[role], instances=[])
    state = RunState(
        name="x", pid=1, start_ticks=1, phase="ready", started_at=0.0, url="", served_name="m", control_url="http://x"
    )
    monkeypatch.setattr(commands, "running", lambda name: state)
    monkeypatch.setattr(ControlClient, "status", lambda self: now)
    file = tmp_path / "x.yaml"
    file.write_text("name: x\n")
    for options in ([], ["--json"]):
        assert CliRunner().invoke(app, ["status", str(file), *options]).exit_code == code


def test_the_services_port_and_key_come_from_the_file(workplace: Workplace, tmp_path: Path) -> None:
    file = str(workplace.file)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        edit(workplace, "router:", f"control: {{port: {port}, key: a secret}}\nrouter:")
        code, output = workplace.run("up", file)
        assert code == 1 and f"control.port: 127.0.0.1:{port} cannot be listened on" in output and "EP014" in output
    assert workplace.run("up", file, "--detach")[0] == 0
    code, output = workplace.run("status", file)
    assert code == 0 and f"control service at http://127.0.0.1:{port}" in output
    state = tmp_path / ".ep" / "run" / tmp_path.name / "state.json"
    assert "a secret" in state.read_text() and state.stat().st_mode & 0o077 == 0


def test_requests_wait_while_a_role_restarts(workplace: Workplace) -> None:
    file = str(workplace.file)
    edit(workplace, "router: {", "router: {hold: true, ")
    assert workplace.run("up", file, "--detach")[0] == 0
    edit(workplace, "max_tokens: 256", "max_tokens: 512")
    stop, answers = threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            reply = httpx.post(f"{workplace.state()['url']}/v1/chat/completions", json={}, timeout=60)
            answers.append((reply.status_code, reply.elapsed.total_seconds()))
            time.sleep(0.02)

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(ask) for _ in range(2)]
        code, output = workplace.run("flip", file, "--restart")
        before = len(answers)
        while len(answers) < before + 4:
            time.sleep(0.05)
        stop.set()
        for client in clients:
            client.result()
    assert code == 0 and "decode: restarted" in output, output
    assert {code for code, _ in answers} == {200}
    assert max(seconds for _, seconds in answers) > 0.5  # that is how long a fake engine takes to load


def test_addresses_of_ipv6(workplace: Workplace) -> None:
    """Router, control service and agents; their URLs need brackets."""
    edit(workplace, "router: {", 'control: {host: "::1"}\nrouter: {host: "::1", ')
    file = str(workplace.file)
    code, output = workplace.run("up", file, "--detach")
    assert code == 0 and "at http://[::1]:" in output, output
    now = status(workplace)
    assert all(rank["error"] is None and "//[::1]:" in rank["agent"] for role in now["roles"] for rank in role["ranks"])
    code, output = workplace.run("ask", file, "hello")
    assert code == 0, output


def test_a_prompt_that_is_no_text(workplace: Workplace) -> None:
    file = str(workplace.file)
    assert workplace.run("up", file, "--detach")[0] == 0
    code, output = workplace.run("ask", file, os.fsdecode(b"\xff\xfe"))
    assert code == 1 and output.startswith("ep-backend: no answer: the prompt is no text in UTF-8; send it in that"), output


def test_a_host_that_is_not_here_is_named(workplace: Workplace) -> None:
    for host in ("nosuch.example.invalid", "203.0.113.7", "2001:db8::7"):
        text = workplace.file.read_text()
        edit(workplace, "router: {", f'control: {{host: "{host}", key: k}}\nrouter: {{host: "{host}", ')
        code, output = workplace.run("up", str(workplace.file))
        workplace.file.write_text(text)
        for part in ("router", "control"):
            assert code == 1 and f"{part}.host: is {host}, which is no address of this machine (" in output.replace('"', ""), (
                output
            )
