"""What a role of SGLang turns into: command lines, settings, its router, and the Python that runs it."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ep_backend.deployment import interpreters
from ep_backend.deployment.buffers import buffer_config
from ep_backend.deployment.checks import check_startable
from ep_backend.deployment.flags import engine_flags
from ep_backend.deployment.instances import Instance, engine_instances, router_instance
from ep_backend.deployment.lint import parser
from ep_backend.deployment.lint.parser import check_with_engine
from ep_backend.deployment.load import load
from ep_backend.deployment.logs import last_errors, last_line
from ep_backend.deployment.resolve import shape_of
from ep_backend.deployment.schema import Deployment, Model
from ep_backend.modes import Mode

PREFILL = "ep: {mode: direct, max_tokens: 1024}\n    args: {max-num-batched-tokens: 1024, max-num-seqs: 8}"
DECODE = "ep: {mode: low_latency, max_tokens: 256}\n    args: {max-num-batched-tokens: 256}"
PAIR = (
    (f"data_parallel: 2\n    {PREFILL}", f"engine: sglang\n    data_parallel: 2\n    {PREFILL}"),
    (f"data_parallel: 2\n    {DECODE}", f"engine: sglang\n    data_parallel: 2\n    {DECODE}"),
    ("max-num-batched-tokens: 1024, max-num-seqs: 8", "chunked-prefill-size: 2048"),
    ("max-num-batched-tokens: 256", "max-running-requests: 512, cuda-graph-backend-decode: disabled"),
)
PYTHON = "/opt/sglang/bin/python"


@pytest.fixture(autouse=True)
def _some_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "sglang", lambda: (PYTHON, "0.5.23"))


@pytest.fixture
def unified(write_file: Callable[..., Path]) -> Callable[..., Deployment]:
    """The pair's prefill role alone, with replacements."""

    def make(*replacements: tuple[str, str]) -> Deployment:
        file = write_file(*PAIR[:1], PAIR[2], *replacements)
        text = file.read_text()
        file.write_text(text[: text.index("  decode:")].replace("prefill:", "unified:") + text[text.index("router:") :])
        return load(file).deployment

    return make


def value(instance: Instance, flag: str) -> str:
    return instance.command[instance.command.index(flag) + 1]


def settings(instance: Instance) -> dict[str, object]:
    read: dict[str, object] = json.loads(Path(instance.env["EP_BACKEND_SETTINGS"]).read_text())
    return read


def test_a_unified_role_has_both_families_and_its_own_address(unified: Callable[..., Deployment], tmp_path: Path) -> None:
    deployment = unified(("max_tokens: 1024", "max_tokens: 1024, overlap: tbo, lanes: 2"), ("{device: cuda}", "{device: cpu}"))
    (engine,) = engine_instances(deployment, tmp_path / "run")
    assert engine.command[:4] == [PYTHON, "-P", "-m", "sglang.launch_server"]
    assert value(engine, "--model-path") == str(deployment.model.path)
    assert value(engine, "--moe-a2a-backend") == "ep_backend"
    assert (value(engine, "--tp-size"), value(engine, "--attn-dp-size")) == ("2", "2")
    assert value(engine, "--device") == "cpu"
    assert value(engine, "--chunked-prefill-size") == "2048"
    assert "--enable-two-batch-overlap" in engine.command
    assert not any("disaggregation" in word for word in engine.command)
    assert engine.health == f"http://127.0.0.1:{deployment.router.port}/health"
    assert settings(engine)["max_tokens"] == {mode.value: 1024 for mode in Mode}
    assert engine.agents == [f"http://127.0.0.1:{int(str(settings(engine)['agent_port'])) + rank}" for rank in range(2)]
    assert router_instance(deployment, [engine]) is None


@pytest.mark.parametrize(
    "more,running",
    [
        ("", 1024),
        ("max-running-requests: 100", 50),
        ("max-running-requests: 1", 1),
        ("max-running-requests: 100, speculative-num-draft-tokens: 4", 200),
    ],
)
def test_decoding_has_no_more_slots_than_its_sequences(
    unified: Callable[..., Deployment], tmp_path: Path, more: str, running: int
) -> None:
    """Of a role with both families, whose prompts need more."""
    deployment = unified(("chunked-prefill-size: 2048", f"chunked-prefill-size: 2048, {more}".rstrip(", ")))
    (engine,) = engine_instances(deployment, tmp_path / "run")
    told = settings(engine)["max_tokens"]
    assert told == {"normal": 1024, "direct": 1024, "low_latency": running, "hybrid": running}
    assert deployment.roles.unified is not None
    config = buffer_config(deployment, "unified", deployment.roles.unified, shape_of(Model(preset="deepseek-v3")), 1024)
    assert {mode.value: tokens for mode, tokens in config.max_tokens.items()} == told


def test_a_pair_and_its_router(write_file: Callable[..., Path], tmp_path: Path) -> None:
    deployment = load(write_file(*PAIR)).deployment
    prefill, decode = engine_instances(deployment, tmp_path / "run")
    assert value(prefill, "--disaggregation-mode") == "prefill" and value(decode, "--disaggregation-mode") == "decode"
    assert value(prefill, "--disaggregation-transfer-backend") == value(decode, "--disaggregation-transfer-backend") == "nixl"
    bootstrap = value(prefill, "--disaggregation-bootstrap-port")
    assert "--disaggregation-bootstrap-port" not in decode.command
    assert settings(decode)["max_tokens"] == {"low_latency": 256, "hybrid": 256}
    router = router_instance(deployment, [prefill, decode])
    assert router is not None and router.command[:5] == [
        PYTHON,
        "-P",
        "-m",
        "sglang_router.launch_router",
        "--pd-disaggregation",
    ]
    assert (router.health or "").endswith("/readiness")
    at = router.command.index("--prefill")
    assert router.command[at + 1 : at + 3] == [f"http://127.0.0.1:{value(prefill, '--port')}", bootstrap]


def test_a_pair_without_its_router_is_told_before_loading(
    write_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = load(write_file(*PAIR)).deployment
    monkeypatch.setattr(interpreters, "sglang", lambda: (sys.executable, "0.5.23"))
    assert not interpreters.has_sglang_router(sys.executable)
    (problem,) = check_startable(deployment)
    assert problem.place == ("roles",) and problem.fix == f"{sys.executable} -m pip install sglang-router"
    monkeypatch.setattr(interpreters, "ROUTER", "")
    assert check_startable(deployment) == []
    monkeypatch.setattr(interpreters, "ROUTER", "import time; time.sleep(60)")
    monkeypatch.setattr(interpreters, "TIMEOUT_S", 0.5)
    (problem,) = check_startable(deployment)
    assert f"{sys.executable} did not answer in 0.5 s" in problem.what


def test_two_launches_on_one_machine_are_told_before_loading(unified: Callable[..., Deployment]) -> None:
    deployment = unified(
        ("{device: cuda}", "{device: cuda, nodes: 2}"),
        ("data_parallel: 2", "data_parallel: 4\n    nodes: 2"),
        ("chunked-prefill-size: 2048", "chunked-prefill-size: 4096"),
    )
    (problem,) = check_startable(deployment)
    assert problem.place == ("roles", "unified", "nodes") and "claim the same ports" in problem.what


def test_an_older_sglang_gets_its_own_spelling(unified: Callable[..., Deployment]) -> None:
    deployment = unified()
    role = deployment.roles.unified
    assert role is not None
    flags = engine_flags(deployment, "unified", role, "0.5.17")
    assert flags["dp-size"] == 2 and flags["enable-dp-attention"] is True and "attn-dp-size" not in flags


PROGRAM = """#!/bin/sh
[ "$1" = -c ] && echo {versions} && exit {status}
"""


def program(folder: Path, versions: str, status: int = 0) -> str:
    file = folder / "python"
    file.write_text(PROGRAM.format(versions=versions, status=status))
    file.chmod(0o755)
    return str(file)


def test_the_python_of_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv(interpreters.SGLANG_PYTHON, program(tmp_path, "0.5.23+cpu 0.1.0"))
    assert interpreters.sglang() == (str(tmp_path / "python"), "0.5.23")
    monkeypatch.delenv(interpreters.SGLANG_PYTHON)
    monkeypatch.setattr(interpreters, "installed", lambda package: "0.5.22")
    assert interpreters.sglang() == (sys.executable, "0.5.22")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (None, "this environment has no SGLang"),
        ("/nowhere/python", "EP_SGLANG_PYTHON=/nowhere/python cannot be run"),
        (sys.executable, "has not all it needs (importlib.metadata.PackageNotFoundError"),
        ("", "EP_SGLANG_PYTHON= cannot be run"),
        ("/", "EP_SGLANG_PYTHON=/ cannot be run"),
        ("/bin/true", "EP_SGLANG_PYTHON=/bin/true is no Python (asked for two versions, it printed '')"),
        ("/bin/echo", "EP_SGLANG_PYTHON=/bin/echo is no Python (asked for two versions, it printed '-c "),
        ("/bin/false", "EP_SGLANG_PYTHON=/bin/false has not all it needs (status 1)"),
        ("#!/bin/sh\nprintf '\\377'", "is no Python (asked for two versions, it printed '\ufffd')"),
        ("#!/bin/sh\nexec sleep 60", "did not answer in 0.5 s"),
    ],
)
def test_no_python_of_sglang_is_told_before_loading(
    named: str | None, said: str, unified: Callable[..., Deployment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = unified()
    monkeypatch.undo()
    if named and named.startswith("#!"):
        (tmp_path / "python").write_text(named)
        (tmp_path / "python").chmod(0o755)
        named = str(tmp_path / "python")
        monkeypatch.setattr(interpreters, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(interpreters, "installed", lambda package: None)
    monkeypatch.setattr(interpreters, "VERSIONS", "from importlib.metadata import version; version('no-such-engine')")
    monkeypatch.setattr(os, "environ", {**os.environ, **({} if named is None else {interpreters.SGLANG_PYTHON: named})})
    (problem,) = check_startable(deployment)
    assert problem.place == ("roles", "unified", "engine") and said in problem.what
    assert "name its Python in EP_SGLANG_PYTHON" in problem.fix


def test_lint_asks_the_parser_in_sglangs_environment(
    unified: Callable[..., Deployment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > {asked}\necho 'sglang serve: error: no such chunk' >&2\nexit 2\n")
    python.chmod(0o755)
    monkeypatch.setattr(interpreters, "sglang", lambda: (str(python), "0.5.23"))
    (problem,) = check_with_engine(unified())
    assert problem.place == ("roles", "unified", "args")
    assert problem.what == "sglang 0.5.23 refuses: sglang serve: error: no such chunk"
    assert json.loads(asked.read_text()) == ["--chunked-prefill-size", "2048"]


def test_lint_does_not_wait_for_a_parser_for_ever(
    unified: Callable[..., Deployment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(interpreters, "sglang", lambda: (str(python), "0.5.23"))
    monkeypatch.setattr(parser, "TIMEOUT_S", 0.5)
    (problem,) = check_with_engine(unified())
    assert problem.what == "sglang 0.5.23 has not parsed them in 0.5 s"


def test_errors_in_a_log_of_sglang(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "[2026-11-29 10:00:01] The server is fired up and ready to roll!\n"
        "[2026-11-29 10:00:02 DP1 TP1 EP1] TimeoutError: rank 0 waited 5 s for rank 1\n"
        "Traceback (most recent call last):\n  File x\n"
        "[2026-11-29 10:00:03 DP0 TP0 EP0] Prefill batch, #new-seq: 1\n"
    )
    assert last_errors(log) == ["TimeoutError: rank 0 waited 5 s for rank 1"]
    assert last_line(log) == "Prefill batch, #new-seq: 1"
