"""A deployment of a fake SGLang in an environment of its own: status, a flip, a rank that dies, and nothing left."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from ep_backend.deployment.processes import session_members
from tests.deployment.conftest import FAKE, Workplace

UNIFIED = """\
name: {name}
topology: {{device: cpu}}
model: {{path: model}}
roles:
  unified:
    engine: sglang
    data_parallel: 2
    ep: {{mode: direct, max_tokens: 1024}}
    args: {{chunked-prefill-size: 2048}}
router: {{port: {port}}}
"""


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    """The workplace with one role of SGLang, whose Python is the fake engine."""
    before = workplace.file.read_text()
    port = before[before.rindex("port: ") :].removeprefix("port: ").strip("}\n ")
    workplace.file.write_text(UNIFIED.format(name=workplace.folder.name.lower(), port=port))
    workplace.env["EP_SGLANG_PYTHON"] = str(FAKE)
    return workplace


def test_up_status_flip_and_a_dead_rank(place: Workplace) -> None:
    file = str(place.file)
    code, output = place.run("up", file, "--detach")
    assert code == 0, output
    code, output = place.run("status", file)
    assert code == 0 and "direct *" in output, output
    place.file.write_text(place.file.read_text().replace("mode: direct", "mode: hybrid"))
    code, output = place.run("flip", file)
    assert code == 0 and "direct -> hybrid" in output, output

    (instance,) = place.state()["instances"]  # type: ignore[attr-defined]
    code, output = place.run("status", file, "--json")
    (role,) = json.loads(output)["roles"]
    assert role["engine"] == "sglang" and len(role["ranks"]) == 2
    victim = role["ranks"][1]["pid"]
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while place.state()["phase"] != "failed":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    error = str(place.state()["error"])
    assert error.startswith("unified lost") and f"(process {victim} " in error
    assert session_members([instance["pid"]]) == []


def test_a_python_without_sglang_is_told_before_loading(place: Workplace) -> None:
    code, output = place.run("up", str(place.file), EP_SGLANG_PYTHON="/bin/false")
    assert code == 1 and "roles.unified.engine: is sglang, but EP_SGLANG_PYTHON=/bin/false has not all it needs" in output
    assert not Path(place.folder / ".ep").exists()
