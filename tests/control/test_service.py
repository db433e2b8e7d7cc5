"""What the control service refuses, plans, applies and writes down; no rank runs here unless a test starts one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ep_backend.control import controller
from ep_backend.control.audit import Audit
from ep_backend.control.service import start_service
from ep_backend.deployment.load import load
from ep_backend.deployment.schema import Deployment, RoleName
from ep_backend.deployment.state import RunState
from ep_backend.files import MOST_BYTES
from tests.control.conftest import FILE, KEY, Service
from tests.control.instance import instance

JSON = {"Content-Type": "application/json"}
StartService = Callable[..., Service]
ROUTES = [
    ("GET", "/v1/status"),
    ("GET", "/v1/audit"),
    ("GET", "/metrics"),
    ("POST", "/v1/ask"),
    ("POST", "/v1/deployment"),
    ("POST", "/v1/roles/prefill/mode"),
]


@pytest.mark.parametrize("key", [None, "wrong", KEY + "x", KEY[:-1]])
def test_every_route_wants_the_key(service: StartService, key: str | None) -> None:
    control = service()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    paths = {path for path in control.client.get("/openapi.json").json()["paths"]}
    assert paths == {path.replace("prefill", "{role}") for _, path in ROUTES}
    for method, path in ROUTES:
        answer = httpx.request(method, f"{control.client.base_url}{path}", headers=headers, timeout=60)
        assert answer.status_code == 401, (path, answer.text)
        assert "Authorization: Bearer KEY" in answer.text
    assert not control.audit.exists()


def test_no_body_is_read_without_end(service: StartService) -> None:
    """Not even of somebody without the key."""
    control = service()
    sent = iter([b" " * (4 << 20), b" "])  # in chunks, so that no header says how much comes
    answer = httpx.post(f"{control.client.base_url}/v1/ask", content=sent, headers=JSON, timeout=60)
    assert answer.status_code == 413 and "larger than 4 MiB" in answer.json()["detail"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "control.example"])
def test_only_loopback_is_served_without_a_key(service: StartService, host: str) -> None:
    loaded = load(service().file)
    control = loaded.deployment.control.model_copy(update={"host": host, "key": None})
    open_to_all = replace(loaded, deployment=loaded.deployment.model_copy(update={"control": control}))
    with pytest.raises(ValueError, match=re.escape(f"control.host={host} can be reached from other machines; set control.key")):
        start_service(open_to_all, RunState, _no_restart, Audit(Path("unused")))


async def _no_restart(role: RoleName, wanted: Deployment, running: Deployment) -> None:
    raise AssertionError("nothing asked for a restart")


def test_another_name_for_this_machine_is_refused(service: StartService) -> None:
    assert service().client.get("/v1/status", headers={"Host": "attacker.example"}).status_code == 400


@pytest.mark.parametrize(
    ("role", "mode", "allowed"),
    [
        ("prefill", "hybrid", ["normal", "direct", "auto"]),
        ("prefill", "fast", ["normal", "direct", "auto"]),
        ("decode", "normal", ["low_latency", "hybrid", "auto"]),
        ("router", "normal", ["prefill", "decode"]),
    ],
)
def test_a_wrong_mode_or_role_is_told_the_right_ones(service: StartService, role: str, mode: str, allowed: list[str]) -> None:
    answer = service().flip(role, mode)
    assert answer.status_code == 422
    assert answer.json()["allowed"] == allowed


def test_a_misspelt_mode_is_asked_back(service: StartService) -> None:
    detail = service().flip("decode", "low_latncy").json()["detail"]
    assert detail == "mode 'low_latncy' is unknown; did you mean `low_latency`?"


def test_a_rank_that_does_not_answer_is_named(service: StartService) -> None:
    control = service()
    answer = control.flip("prefill", "normal")
    assert answer.status_code == 504
    assert "prefill rank 0 (http://127.0.0.1:9/) does not answer (ConnectError" in answer.json()["detail"]
    now = control.role("prefill")
    assert now["mode_desired"] == "direct"
    assert len(now["drift"]) == 1 and "rank 0: does not answer" in now["drift"][0]


PLANS = {
    "flip": ("mode: direct", "mode: normal", [("roles.prefill.ep.mode", "prefill", "flip")]),
    "EP size": ("prefill:\n    data_parallel: 2", "prefill:\n    data_parallel: 4",
                [("roles.prefill.data_parallel", "prefill", "restart")]),
    "capacity": ("mode: low_latency, max_tokens: 2048", "mode: hybrid, max_tokens: 4096",
                 [("roles.decode.ep.mode", "decode", "flip"), ("roles.decode.ep.max_tokens", "decode", "restart")]),
    "router": ("control:", "router: {port: 8123}\ncontrol:", [("router.port", None, "redeploy")]),
    "nothing that runs": ("control:", "target: {stop_timeout_s: 5}\ncontrol:", []),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_drift_names_each_change_and_what_it_takes(service: StartService, plan: str) -> None:
    control = service()
    assert control.status()["drift"] == []
    old, new, expected = PLANS[plan]
    assert old in FILE
    control.file.write_text(FILE.replace(old, new, 1))
    found = [(change["place"], change["role"], change["action"]) for change in control.status()["drift"]]
    assert found == expected


def test_a_broken_file_is_told_not_applied(service: StartService) -> None:
    control = service()
    text = FILE.replace("mode: direct", "mode: hybrid")
    control.file.write_text(text)
    assert "roles.prefill.ep.mode: is hybrid" in control.status()["file_error"]
    answer = control.apply(text)
    assert answer.status_code == 422 and "roles.prefill.ep.mode: is hybrid" in answer.json()["lines"][0]
    assert control.apply(FILE.replace("name: test", "name: other")).status_code == 422


@pytest.mark.parametrize("text", ["name: 2001-13-45\n", "a: !!int x\n", "[" * 3000, "a: " + "1" * 5000, ""])
def test_a_file_that_is_no_yaml_is_told_and_the_service_goes_on(service: StartService, text: str) -> None:
    control = service()
    control.file.write_text(text)
    assert f"{control.file}:1:" in control.status()["file_error"]
    assert control.client.get("/metrics").status_code == 200
    assert control.apply(text).status_code == 422


@pytest.mark.parametrize("become", ["a folder", "gone", "a pipe", "bytes"])
def test_the_service_answers_whatever_its_file_has_become(service: StartService, become: str) -> None:
    control = service()
    control.file.unlink()
    if become == "a folder":
        control.file.mkdir()
    elif become == "a pipe":
        os.mkfifo(control.file)
    elif become == "bytes":
        control.file.write_bytes(b"\xff")
    assert control.status()["file_error"]
    assert control.client.get("/metrics").status_code == 200


@pytest.mark.parametrize("route", ["/v1/ask", "/v1/roles/prefill/mode"])
def test_half_of_a_character_is_refused(service: StartService, route: str) -> None:
    body = '{"prompt": "\\ud800", "mode": "\\ud800"}'
    answer = service().client.post(route, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert "surrogates not allowed" in answer.json()["detail"][0]["msg"], answer.text


def test_a_rule_that_fails_on_a_file_does_not_silence_the_service(
    service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OverflowError("a number too large")

    control = service()
    monkeypatch.setattr(controller, "load", fails)
    assert control.status()["file_error"] == "OverflowError: a number too large"


@pytest.mark.parametrize("kind", ["", "application/x-www-form-urlencoded", "text/plain"])
def test_json_that_does_not_say_so_is_told(service: StartService, kind: str) -> None:
    control = service()
    for route in ("/v1/roles/prefill/mode", "/v1/ask"):
        headers = {"Content-Type": kind} if kind else {}
        answer = control.client.post(route, content='{"mode": "normal", "prompt": "x"}', headers=headers)
        assert answer.status_code == 415, answer.text
        assert answer.json()["detail"].startswith(f"content type {kind!r} is no JSON; send application/json")
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    answer = control.client.post("/v1/roles/prefill/mode", content='{"mode": "nope"}', headers=headers)
    assert answer.status_code == 422 and "'nope' is unknown" in answer.text


def test_only_yaml_of_a_sane_size_is_read(service: StartService) -> None:
    control = service()
    assert control.client.post("/v1/deployment", content=FILE, headers={"Content-Type": "text/plain"}).status_code == 415
    assert control.apply("#" * (MOST_BYTES + 1)).status_code == 413
    assert control.apply(FILE + "#" * (MOST_BYTES - len(FILE))).status_code == 200  # as large as `load` takes it
    assert control.client.post("/v1/deployment", content=b"\xff", headers={"Content-Type": "text/yaml"}).status_code == 422


def test_a_change_counts_where_the_audit_log_cannot_be_written(service: StartService) -> None:
    control = service()
    control.audit.mkdir()
    text = FILE.replace("mode: low_latency, max_tokens: 2048", "mode: low_latency, max_tokens: 4096")
    assert control.apply(text, restart="true").json()["restarted"] == ["decode"]
    answer = control.client.get("/v1/audit")
    assert answer.status_code == 500 and str(control.audit) in answer.json()["detail"]


def test_an_audit_log_that_was_cut_off_goes_on(service: StartService) -> None:
    control = service()
    control.flip("decode", "fast")
    control.audit.write_bytes(control.audit.read_bytes() + b'\xff\n{"time": "2026')
    control.flip("decode", "faster")
    assert [entry["what"] for entry in control.client.get("/v1/audit").json()] == ["decode to fast", "decode to faster"]


def test_a_restart_is_announced_and_done_when_asked_for(service: StartService) -> None:
    control = service()
    text = FILE.replace("mode: low_latency, max_tokens: 2048", "mode: hybrid, max_tokens: 4096")
    answer = control.apply(text)
    assert answer.status_code == 409
    assert answer.json()["detail"] == (
        "roles.decode.ep.max_tokens: 2048 -> 4096 (restart); ask for a restart (flip --restart). Nothing was changed"
    )
    assert control.restarted == []
    assert control.apply(text, dry_run="true").json()["restarted"] == []
    assert control.apply(text, restart="true").json()["restarted"] == ["decode"]
    ((role, deployment),) = control.restarted
    assert role == "decode" and deployment.roles.decode is not None and deployment.roles.decode.ep.max_tokens == 4096
    assert control.role("decode")["mode_desired"] == "hybrid"
    control.file.write_text(text)
    assert control.status()["drift"] == []
    assert control.apply(text.replace("device: cpu", "device: cpu, nodes: 2"), restart="true").status_code == 409


def test_a_whole_file_flips_both_roles(ranks: Any, service: StartService, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with instance(ranks(2), "prefill", "direct", stop, busy=False) as prefill:
        control = service(prefill=prefill)
        text = FILE.replace("mode: direct", "mode: normal")
        dry = control.apply(text, dry_run="true").json()
        assert [flip["outcome"] for flip in dry["flips"]] == ["would apply"]
        assert control.role("prefill")["mode_desired"] == "direct"
        # Decode has no ranks: asked first, so that prefill is not flipped either.
        both = text.replace("mode: low_latency", "mode: hybrid")
        assert control.apply(both).status_code == 504
        assert control.role("prefill")["mode_executed"] is None
        done = control.apply(text).json()
        assert [flip["outcome"] for flip in done["flips"]] == ["applied"]
        assert control.role("prefill")["mode_executed"] == "normal"
        assert [change["new"] for change in control.status()["drift"]] == ["direct"]
    assert control.audit.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in control.audit.read_text().splitlines()]
    assert [(line["action"], line["outcome"].partition(":")[0]) for line in lines] == [
        ("dry run of a file", "done"),
        ("file", "RankFailed"),
        ("file", "done"),
    ]
    assert control.client.get("/v1/audit").json() == lines
    assert all(line["client"] == "127.0.0.1" for line in lines)


def test_the_service_and_up_need_no_torch() -> None:
    modules = "ep_backend.control.service, ep_backend.control.client, ep_backend.deployment.supervisor, ep_backend.agent"
    program = f"import sys, {modules}; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
