"""A deployment whose roles are engines without a model, and a control service for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ep_backend.control.audit import Audit
from ep_backend.control.service import start_service
from ep_backend.deployment.load import load
from ep_backend.deployment.schema import Deployment, RoleName
from ep_backend.deployment.state import InstanceState, RunState
from tests.control.instance import Instance

CONFIG = {
    **{"hidden_size": 512, "num_hidden_layers": 2, "n_routed_experts": 16, "num_experts_per_tok": 4},
    **{"moe_intermediate_size": 64, "num_attention_heads": 4},
}
KEY = "correct horse"
NOBODY = "http://127.0.0.1:9"
FILE = """\
name: test
topology: {device: cpu}
model: {path: model}
roles:
  prefill:
    data_parallel: 2
    ep: {mode: direct, max_tokens: 2048}
  decode:
    data_parallel: 2
    ep: {mode: low_latency, max_tokens: 2048}
control: {key: correct horse, flip_timeout_s: 40}
"""


@dataclass
class Service:
    """A control service and the file that it started from."""

    client: httpx.Client
    file: Path
    audit: Path
    restarted: list[tuple[RoleName, Deployment]]

    def status(self) -> Any:
        return self.client.get("/v1/status").raise_for_status().json()

    def role(self, name: str) -> Any:
        return next(role for role in self.status()["roles"] if role["role"] == name)

    def flip(self, role: str, mode: str, **query: str) -> httpx.Response:
        return self.client.post(f"/v1/roles/{role}/mode", json={"mode": mode}, params=query)

    def apply(self, text: str, **query: str) -> httpx.Response:
        headers = {"Content-Type": "application/yaml"}
        return self.client.post("/v1/deployment", content=text, headers=headers, params=query)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """``service(prefill=instance, decode=instance)``; a role without one has agents that nobody answers for. ``url``: where
    clients ask."""
    with ExitStack() as stack:
        yield lambda file=FILE, url=NOBODY, **roles: stack.enter_context(_running(tmp_path, file, url, roles))


@contextmanager
def _running(folder: Path, text: str, url: str, roles: dict[str, Instance]) -> Iterator[Service]:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    file = folder / "deployment.yaml"
    file.write_text(text)
    loaded = load(file)
    instances = []
    for name, _ in loaded.deployment.roles.items():
        found = roles.get(name, Instance([f"{NOBODY}/"], NOBODY))
        place = {"log": folder / "log", "agents": found.agents, "url": found.url, "pid": 1, "start_ticks": 1}
        instances.append(InstanceState(name=name, role=name, **place))
    state = RunState(
        **{"name": "test", "pid": 1, "start_ticks": 1, "phase": "ready", "started_at": 0.0},
        **{"url": url, "served_name": "model", "instances": instances},
    )
    restarted: list[tuple[RoleName, Deployment]] = []

    async def restart(role: RoleName, wanted: Deployment, running: Deployment) -> None:
        restarted.append((role, wanted))

    audit = folder / "audit.jsonl"
    server = start_service(loaded, lambda: state, restart, Audit(audit))
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=60) as client:
        try:
            yield Service(client, file, audit, restarted)
        finally:
            server.stop()
