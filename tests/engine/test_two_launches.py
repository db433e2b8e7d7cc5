"""A role as two launches, head and headless, from one file: the shape of two nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from ep_backend.demo import PRESET
from ep_backend.deployment.agents import all_statuses
from ep_backend.deployment.client import complete
from ep_backend.deployment.processes import free_ports
from ep_backend.deployment.state import RunState
from tests.control.test_namespaces import can_make_namespaces
from tests.engine.conftest import TOKENS, Served

pytest.importorskip("vllm", reason="these tests need vLLM: run ./ep test")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


KEY = "a key of this test"
NAMESPACES = pytest.param(
    True,
    ["10.213.2.1", "10.213.2.2"],
    id="namespaces",
    marks=pytest.mark.skipif(
        not can_make_namespaces(), reason="network namespaces take root, `ip`, and a kernel that allows them"
    ),
)


def two_launches(folder: Path, checkpoint: Path, namespaces: bool) -> Path:
    yaml = YAML(typ="safe")
    document: dict[str, Any] = yaml.load(PRESET)
    role = document["roles"]["prefill"]
    role["nodes"] = 2
    document.update(name="two-launches", roles={"unified": role}, router={"port": free_ports(1)})
    document.update(control={"key": KEY}, target={"namespaces": namespaces})
    document["router"]["hold"] = namespaces
    document["topology"]["nodes"] = 2
    document["model"]["path"] = str(checkpoint)
    file = folder / "two-launches.yaml"
    yaml.dump(document, file)
    return file


@pytest.mark.parametrize(
    ("namespaces", "addresses"), [pytest.param(False, ["127.0.0.1", "127.0.0.2"], id="loopback"), NAMESPACES]
)
def test_two_launches_of_a_role_serve_and_flip(
    served: Served, up: Callable[[Path], RunState], tmp_path: Path, namespaces: bool, addresses: list[str]
) -> None:
    state = up(two_launches(tmp_path, served.checkpoint, namespaces))
    assert [instance.name for instance in state.instances] == ["unified-node0", "unified-node1"]
    assert [complete(state, prompt, TOKENS) for prompt in served.prompts] == served.expected
    ranks = all_statuses(state)
    assert [rank.agent.removeprefix("http://").partition(":")[0] for rank in ranks] == addresses
    assert all(rank.modes["direct"].records["scale_out"] for rank in ranks)

    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{state.control_url}/v1/roles/unified/mode", json={"mode": "normal"}, headers=headers, timeout=120)
    assert answer.status_code == 200 and answer.json()["outcome"] == "applied", answer.text
    assert [complete(state, prompt, TOKENS) for prompt in served.prompts] == served.expected
    assert {rank.mode_executed for rank in all_statuses(state)} == {"normal"}
    assert len({rank.flip.agreed_epoch for rank in all_statuses(state)}) == 1
