"""A whole `sglang serve` of a small Qwen3-MoE in float32 answers with expert parallelism what transformers answers without."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("sglang", reason="these tests need SGLang, in an environment of its own: run ./ep test sglang")

from ep_backend.settings import SETTINGS_VARIABLE
from server_plugins.sglang import NAME
from server_plugins.sglang.state import ABANDON, MODE, MODES, TOKEN
from tests.engine.conftest import TOKENS, Served
from tests.server_plugins.sglang_cpu import DISPATCHES, SPOILED

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

START_S = 300.0
MAX_TOKENS = {"normal": 128, "direct": 128, "low_latency": 64, "hybrid": 64}
FLAGS = ["--dtype", "float32", "--device", "cpu", "--context-length", "512", "--chunked-prefill-size", "256"]
FLAGS += ["--mem-fraction-static", "0.3", "--max-total-tokens", "2048", "--disable-radix-cache", "--disable-overlap-schedule"]
FLAGS += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled", "--skip-server-warmup"]
FLAGS += ["--tp-size", "2", "--attn-dp-size", "2", "--enable-dp-lm-head", "--moe-dense-tp-size", "1"]
FLAGS += ["--moe-a2a-backend", NAME, "--enable-two-batch-overlap"]


@dataclass
class Server:
    """A running `sglang serve`."""

    url: str
    folder: Path
    prompts: list[str]
    token: int = field(default=0)

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", timeout=60).raise_for_status().json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return httpx.post(f"{self.url}{path}", json=body, timeout=120).raise_for_status().json()

    def answers(self) -> list[list[int]]:
        """One prompt alone, so that the other rank idles; then all at once, so that each rank splits its batch in two."""
        sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        alone = self.post("/generate", {"text": self.prompts[0], "sampling_params": sampling})
        together = self.post("/generate", {"text": self.prompts, "sampling_params": sampling})
        return [answer["output_ids"] for answer in (alone, *together)]

    def ranks(self) -> list[dict[str, Any]]:
        states = [state[NAME] for state in self.get("/server_info")["internal_states"]]
        return sorted(states, key=lambda rank: rank["rank"])

    def ask(self, **request: int) -> list[bool]:
        return self.post("/set_internal_state", {"server_args": request})

    def propose(self, mode: str) -> list[bool]:
        self.token += 1
        return self.ask(**{TOKEN: self.token, MODE: MODES.index(mode)})

    def dispatches(self, mode: str) -> list[int]:
        return [rank["modes"].get(mode, {"dispatches": 0})["dispatches"] for rank in self.ranks()]

    @property
    def spoiled(self) -> Path:
        return self.folder / "spoiled"

    @property
    def noted(self) -> Path:
        return self.folder / "dispatches"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, served_qwen: Served) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", folder, served_qwen.prompts)
    settings = {"max_tokens": MAX_TOKENS, "timeout_s": 60, "gpus_per_node": 1}
    (folder / "settings.json").write_text(json.dumps(settings))
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        SETTINGS_VARIABLE: str(folder / "settings.json"),
        DISPATCHES: str(server.noted),
        SPOILED: str(server.spoiled),
    }
    program = str(Path(sys.executable).with_name("sglang"))
    command = [program, "serve", "--model-path", str(served_qwen.checkpoint), "--port", str(port), *FLAGS]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until_ready(server, process)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            server.get("/server_info")
            return
        time.sleep(0.5)
    state = "still starts" if process.poll() is None else f"ended with {process.poll()}"
    pytest.fail(f"sglang serve {state}:\n{(server.folder / 'log').read_text()[-6000:]}")


@pytest.fixture(scope="module")
def expected(served_qwen: Served) -> list[list[int]]:
    return [served_qwen.expected[0], *served_qwen.expected]


def test_the_server_says_what_it_runs(server: Server) -> None:
    info = server.get("/server_info")
    assert (info["moe_a2a_backend"], info["ep_size"]) == (NAME, 2)
    assert [state["moe_a2a_backend"] for state in info["internal_states"]] == [NAME, NAME]
    for number, rank in enumerate(server.ranks()):
        assert (rank["rank"], rank["world_size"], rank["lanes"]) == (number, 2, 2)
        assert (rank["role"], rank["mode_desired"]) == ("unified", "auto")
        assert rank["families"] == ["prefill", "decode"]
        assert rank["max_tokens"] == MAX_TOKENS


def test_auto_gives_each_batch_a_mode_of_its_family_and_tokens_are_equal(server: Server, expected: list[list[int]]) -> None:
    assert server.answers() == expected
    # Two virtual nodes: prefill goes over hybrid where it has room, decode over hybrid, for it makes fewer copies.
    used = {mode for rank in server.ranks() for mode in rank["modes"]}
    assert used == {"normal", "hybrid"}


def test_prefill_runs_in_two_sub_batches(server: Server, expected: list[list[int]]) -> None:
    server.noted.unlink(missing_ok=True)
    assert server.answers() == expected
    lanes = {line for line in server.noted.read_text().split("\n") if line.endswith("normal")}
    assert lanes == {"0 normal", "1 normal"}


@pytest.mark.parametrize("mode", ["direct", "normal", "low_latency", "hybrid"])
def test_every_mode_gives_equal_tokens(server: Server, expected: list[list[int]], mode: str) -> None:
    assert server.propose(mode) == [True, True]
    before = server.dispatches(mode)
    assert server.answers() == expected
    assert all(now > then for now, then in zip(server.dispatches(mode), before, strict=True))
    for rank in server.ranks():
        assert (rank["mode_desired"], rank["flip"]["agreed_token"]) == (mode, server.token)
        assert (rank["timeouts"], rank["failed"], rank["refused"]) == (0, None, None)
    epochs = {rank["flip"]["agreed_epoch"] for rank in server.ranks()}
    assert len(epochs) == 1


def test_a_request_that_cannot_be_followed_changes_nothing(server: Server) -> None:
    desired = [rank["mode_desired"] for rank in server.ranks()]
    assert server.ask(**{TOKEN: 9}) == [False, False]
    assert "ep_backend_token and ep_backend_mode go together" in server.ranks()[0]["refused"]
    assert server.ask(**{TOKEN: 9, MODE: 5}) == [False, False]
    assert "ep_backend_mode=5; it is one of 0 normal, 1 direct" in server.ranks()[1]["refused"]
    assert server.ask(**{TOKEN: 9, MODE: 1, "pp_max_micro_batch_size": 4}) == [False, False]
    assert "send two requests" in server.ranks()[1]["refused"]
    assert server.ask(pp_max_micro_batch_size=4) == [True, True]
    assert server.propose("direct") == [True, True]
    assert server.ask(**{ABANDON: server.token}) == [True, True]
    server.answers()
    assert [rank["mode_desired"] for rank in server.ranks()] == desired


def test_a_spoiled_combine_changes_the_tokens(server: Server, expected: list[list[int]]) -> None:
    """The negative control: these tokens depend on what is combined."""
    server.spoiled.touch()
    try:
        assert server.answers() != expected
    finally:
        server.spoiled.unlink()
    assert server.answers() == expected
