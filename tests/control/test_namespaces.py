"""Network namespaces of launches: they reach each other and this one, by their own addresses only, and leave nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from ep_backend.deployment.checks import check_startable
from ep_backend.deployment.namespaces import BRIDGE, address, inside, namespaces
from ep_backend.deployment.schema import Deployment

LISTEN = "import socket, sys; s = socket.create_server((sys.argv[1], 4321)); print('listens', flush=True); s.accept()"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 4321), timeout=3)"


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "epb-probe"], capture_output=True).returncode == 0
    return made and subprocess.run(["ip", "netns", "del", "epb-probe"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces take root, `ip`, and a kernel that allows them")
@pytest.mark.parametrize("connects_from", ["epb-test-1", None])
def test_launches_reach_each_other_by_address_only(connects_from: str | None) -> None:
    spaces = {f"epb-test-{node}": address(200, node) for node in range(2)}
    with namespaces(spaces):
        command = inside("epb-test-0", [sys.executable, "-c", LISTEN, address(200, 0)])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
            assert listener.stdout is not None and listener.stdout.readline() == "listens\n"

            def connect(to: str) -> int:
                command = [sys.executable, "-c", CONNECT, to]
                command = inside(connects_from, command) if connects_from else command
                return subprocess.run(command, capture_output=True, timeout=30).returncode

            assert connect("127.0.0.1") != 0
            assert connect(address(200, 0)) == 0
            listener.wait(10)
        other = {"epb-other-0": address(201, 0)}
        with pytest.raises(OSError, match="`ip link add epb0 type bridge` failed"), namespaces(other):
            pass
    assert "epb-test" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert BRIDGE not in subprocess.run(["ip", "link"], capture_output=True, text=True).stdout


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces take root, `ip`, and a kernel that allows them")
def test_what_a_killed_process_left_is_no_obstacle() -> None:
    spaces = {f"epb-test-{node}": address(200, node) for node in range(2)}
    arguments = "from ep_backend.deployment.namespaces import namespaces; import os"
    program = f"{arguments}\nwith namespaces({spaces}): os._exit(0)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert "epb-test-0" in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    with namespaces(spaces):
        pass
    assert "epb-test" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_what_they_need_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    role = {"data_parallel": 2, "nodes": 2}
    deployment = Deployment.model_validate(
        {"name": "x", "model": {"path": "x"}, "roles": {"unified": role}, "target": {"namespaces": True}}
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    fixes = {problem.fix for problem in check_startable(deployment) if problem.place == ("target", "namespaces")}
    assert fixes == {"become root, or set it to false", "set control.key", "set router.hold"}
