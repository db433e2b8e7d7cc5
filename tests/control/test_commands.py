"""`flip` and `status` on a deployment of fake engines: real processes, a real control service."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

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
    now = status(workplace)
    assert now["phase"] == "ready"
    assert {change["place"] for change in now["drift"]} == {"roles.decode.ep.max_tokens", "roles.decode.env.FAKE_DIES"}


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
