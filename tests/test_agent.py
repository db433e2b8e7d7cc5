"""The rank's agent over HTTP, its refusals, and the watchdog."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from ep_backend.agent import Agent, Identity
from ep_backend.control.flip import Flip
from ep_backend.watchdog import EXIT_CODE, Watchdog

WHO = Identity("demo", "prefill", 1, 2, 2, "vllm 0.32.0")


class Buffer:
    def __init__(self, mode: str, epoch: int, failed: str | None = None) -> None:
        self.mode, self.epoch, self.failed = mode, epoch, failed

    def stats(self):
        counters = {
            "dispatches": self.epoch,
            "combines": self.epoch,
            "tokens": 10,
            "slots_high_water": self.epoch,
            "records": {"local": 1, "scale_up": 2, "scale_out": 3, "forwarded": 4},
        }
        return {
            "mode_executed": self.mode,
            "epoch": self.epoch,
            "lane_rounds": [self.epoch, 1],
            "failed": self.failed,
            "modes": {self.mode: counters},
            "wait_s": {"0": 0.5},
            "buffer_bytes": {"control": 64},
            "timeouts": 0,
        }

    def propose(self, token):
        pass

    def agreed(self):
        return 0


@pytest.fixture
def agent():
    started: list[Agent] = []

    def start(*buffers, host="127.0.0.1", port=0, key=None):
        flip = Flip("auto", buffers=lambda: buffers, check=lambda wish: None)
        started.append(Agent(WHO, host=host, port=port, key=key, flip=flip, buffers=lambda: buffers))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def status(agent: Agent, **headers: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{agent.port}/status", headers=headers, timeout=60)


def test_status_says_who_answers_and_what_was_executed(agent):
    body = status(agent(Buffer("direct", 7))).json()
    assert body["deployment"] == "demo"
    assert body["rank"] == 1 and body["world_size"] == 2
    assert body["mode_desired"] == "auto" and body["mode_executed"] == "direct"
    assert body["epoch"] == 7 and body["failed"] is None
    assert body["modes"]["direct"]["records"]["scale_out"] == 3


def test_counters_are_sums_over_buffers(agent):
    body = status(agent(Buffer("direct", 7), Buffer("direct", 5), Buffer("normal", 9, "rank 0 stalled"))).json()
    assert body["modes"]["direct"]["dispatches"] == 12 and body["lane_rounds"] == [21, 3]
    assert body["modes"]["direct"]["slots_high_water"] == 7
    assert body["modes"]["direct"]["records"] == {"local": 2, "scale_up": 4, "scale_out": 6, "forwarded": 8}
    assert body["mode_executed"] == "normal"
    assert body["failed"] == "rank 0 stalled"


def test_status_before_the_first_buffer(agent):
    body = status(agent()).json()
    assert body["mode_executed"] is None and body["epoch"] == 0 and body["modes"] == {}


def test_a_key_is_asked_for(agent):
    one = agent(key="secret")
    assert status(one).status_code == 401
    assert status(one, Authorization="Bearer wrong").status_code == 401
    assert status(one, Authorization="Bearer secret").status_code == 200


def test_on_loopback_it_answers_to_names_of_this_machine_alone(agent):
    """A page from elsewhere whose name leads here could flip ranks that want no key."""
    one = agent(host="127.0.0.2")
    for name, code in (("127.0.0.2", 200), ("localhost:1", 200), ("attacker.example", 400)):
        url = f"http://127.0.0.2:{one.port}/status"
        assert httpx.get(url, headers={"Host": name}, timeout=60).status_code == code


def test_no_body_is_read_without_end(agent):
    sent = iter([b" " * (1 << 20), b" "])
    address = f"http://127.0.0.1:{agent(key='K').port}/flip/check"
    answer = httpx.post(address, content=sent, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code == 413 and "larger than 1 MiB" in answer.json()["detail"]


def test_a_reachable_host_needs_a_key(agent):
    with pytest.raises(ValueError, match=r"agent_host=0.0.0.0 can be reached from other machines; set agent_key"):
        agent(host="0.0.0.0")
    assert status(agent(host="0.0.0.0", key="secret"), Authorization="Bearer secret").status_code == 200


def test_a_taken_port_is_named(agent):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"agent port {port} on 127.0.0.1 is taken; choose another agent_port"):
            agent(port=port)


def test_stop_frees_the_port(agent):
    first = agent()
    port = first.port
    first.stop()
    assert status(agent(port=port)).status_code == 200


def watch(failure, **options):
    ended: list[int] = []
    dog = Watchdog(failure, poll_s=0.01, end=ended.append, **options)
    dog.start()
    return dog, ended


def test_watchdog_ends_the_process_of_a_failed_buffer(caplog):
    failed = threading.Event()
    dog, ended = watch(lambda: "combine: peer=1" if failed.is_set() else None)
    time.sleep(0.1)
    assert dog.is_alive() and not ended
    failed.set()
    dog.join(5)
    assert ended == [EXIT_CODE]
    assert "combine: peer=1" in caplog.text


def test_watchdog_leaves_time_to_an_exception_being_handled():
    dog, ended = watch(lambda: "failed", grace_s=30.0)
    time.sleep(0.1)
    assert not ended
    dog.stop()
    dog.join(5)
    assert not dog.is_alive() and not ended


def test_watchdog_ends_a_process_whose_main_thread_is_stuck():
    program = (
        "import time; from ep_backend.watchdog import Watchdog; Watchdog(lambda: 'peer 3', poll_s=0.05).start(); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.returncode == EXIT_CODE
    assert "peer 3" in done.stderr


def test_a_status_does_not_wait_for_a_busy_rank(agent):
    buffer, busy = Buffer("direct", 7), threading.Event()
    one = agent(buffer)
    assert status(one).json()["epoch"] == 7
    original = buffer.stats

    def slow():
        busy.wait(60)
        return original()

    buffer.stats, buffer.epoch = slow, 8
    try:
        late = status(one).json()
        assert late["epoch"] == 7  # what it said last
        time.sleep(2)
        assert status(one).json()["silent_s"] > 2
    finally:
        busy.set()
    deadline = time.monotonic() + 60
    while (now := status(one).json())["epoch"] == 7:
        assert time.monotonic() < deadline
    assert now["epoch"] == 8 and now["silent_s"] < 2


def test_a_change_that_comes_too_late_is_refused(agent):
    request = {"do": "prepare", "token": 5, "mode": "auto", "until": time.monotonic() - 0.1}
    assert agent(Buffer("direct", 7))._answer(request) == {"code": 409, "body": "the request came too late"}


def test_the_http_process_is_started_again_on_its_port(agent, caplog):
    one = agent(Buffer("direct", 3))
    for _ in range(2):
        first = one._process.pid
        assert httpx.get(f"http://127.0.0.1:{one.port}/status", timeout=30).json()["epoch"] == 3
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while one._process.pid == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert httpx.get(f"http://127.0.0.1:{one.port}/status", timeout=30).json()["epoch"] == 3
    assert "the HTTP process of rank 1's agent ended with status -9 and is started again" in caplog.text


def test_an_http_process_that_always_ends_is_given_up(agent, caplog, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    one = agent(Buffer("direct", 3))
    one._thread.join(30)
    assert not one._thread.is_alive()
    assert "the agent of rank 1 no longer serves: its HTTP process ended 5 times soon" in caplog.text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{one.port}/status", timeout=30)


def test_the_http_process_ends_with_the_rank():
    program = (
        "import time; from ep_backend.agent import Agent; from tests.test_agent import WHO, Flip; "
        "flip = Flip('auto', buffers=lambda: [], check=lambda wish: None); "
        "one = Agent(WHO, host='127.0.0.1', port=0, key=None, flip=flip, buffers=lambda: []); "
        "print(one._process.pid, flush=True); time.sleep(60)"
    )
    root = str(Path(__file__).parents[1])
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root)
    assert rank.stdout is not None
    front = int(rank.stdout.readline())
    rank.kill()
    rank.communicate()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{front}").exists() and Path(f"/proc/{front}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, f"process {front} is still there"
        time.sleep(0.1)
