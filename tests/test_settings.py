"""The settings file: defaults, strictness, and what contradicts the role."""

import json
import os
import re
from pathlib import Path

import pytest

from ep_backend.modes import Mode
from ep_backend.settings import SETTINGS_VARIABLE, Settings, load_settings


@pytest.fixture
def load(tmp_path, monkeypatch):
    def write(**content):
        path = tmp_path / "settings.json"
        path.write_text(json.dumps(content))
        monkeypatch.setenv(SETTINGS_VARIABLE, str(path))
        return load_settings()

    return write


def test_without_a_file_the_flag_works_alone(monkeypatch):
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    settings = load_settings()
    assert settings == Settings()
    assert settings.mode == "auto" and settings.role is None and settings.agent_port is None


def test_a_whole_file(load):
    settings = load(
        deployment="demo",
        role="decode",
        mode="hybrid",
        max_tokens={"hybrid": 128, "low_latency": 128},
        lanes=2,
        timeout_s=10.0,
        gpus_per_node=4,
        fp8=False,
        layout="compact",
        sms=24,
        agent_host="127.0.0.1",
        agent_port=9000,
        agent_key="secret",
    )
    assert settings.mode is Mode.HYBRID and settings.max_tokens[Mode.LOW_LATENCY] == 128
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"modes": "direct"}, "modes: there is no such setting; did you mean `mode`\\?$"),
        ({"mode": "pplx"}, 'mode: "pplx" must be one of auto, normal, .*; write one of them$'),
        ({"mode": "lowlatency"}, 'mode: "lowlatency" must be one of .*; did you mean `low_latency`\\?$'),
        ({"max_tokens": {"hybird": 64}}, 'max_tokens: "hybird" must be one of .*; did you mean `hybrid`\\?$'),
        ({"max_tokens": {"hybrid": 0}}, "max_tokens.hybrid: 0: Input should be greater than or equal to 1$"),
        (
            {"rail": "put"},
            "rail put leaves hybrid alone, but mode is auto and max_tokens names no mode; use mode hybrid or auto",
        ),
        ({"rail": "put", "mode": "direct", "max_tokens": {"hybrid": 8}}, "but mode is direct and max_tokens names hybrid; use"),
        (
            {"rail": "put", "max_tokens": {"hybrid": 8, "normal": 8}},
            "but mode is auto and max_tokens names hybrid, normal; use",
        ),
        ({"layout": "rows"}, 'layout: "rows" must be one of compact, masked; write one of them$'),
        ({"layout": "maskd"}, 'layout: "maskd" must be one of compact, masked; did you mean `masked`\\?$'),
        ({"role": "decoder"}, 'role: "decoder" must be one of prefill, decode, unified; did you mean `decode`\\?$'),
        ({"lanes": 3}, "lanes: 3: Input should be 1 or 2$"),
        ({"lanes": True}, "lanes: true: Input should be a valid integer$"),
        ({"timeout_s": float("inf")}, "timeout_s: Infinity: Input should be a finite number$"),
        ({"timeout_s": 1e300}, "timeout_s: 1e\\+300: Input should be less than or equal to 1000000000$"),
        ({"timeout_s": "60"}, 'timeout_s: "60": Input should be a valid number$'),
        ({"agent_port": True}, "agent_port: true: Input should be a valid integer$"),
        ({"agent_port": 70000}, "agent_port: 70000: Input should be less than or equal to 65535$"),
        ({"max_tokens": {"direct": True}}, "max_tokens.direct: true: Input should be a valid integer$"),
        ({"max_tokens": {"direct": 10**21}}, "max_tokens.direct: 10{21}: Input should be less than or equal to 16777215$"),
        ({"gpus_per_node": 10**13}, "gpus_per_node: 10{13}: Input should be less than 2147483648$"),
        ({"agent_key": "schlüssel"}, "agent_key: \\*\\*\\*: String should match pattern .*"),
        ({"agent_key": "a\nb"}, "agent_key: \\*\\*\\*: String should match pattern .*"),
        ({"agent_host": "a b"}, 'agent_host: "a b": String should match pattern .*'),
        ({"lanes": 3, "mode": 7}, "mode: 7 must be one of .*; lanes: 3: Input should be 1 or 2$"),
        ({"role": "prefill", "mode": "low_latency"}, "mode low_latency does not serve role prefill; use .*auto"),
        ({"role": "decode", "max_tokens": {"direct": 64}}, "mode direct does not serve role decode"),
        ({"role": "decode", "max_tokens": {"hybrid": 64, "low_latency": 128}}, "give the decode modes one number"),
    ],
)
def test_wrong_content_names_file_and_fix(load, content, message):
    with pytest.raises(ValueError, match=f"(?s){SETTINGS_VARIABLE}=.*{message}"):
        load(**content)


def test_a_missing_file_is_named(monkeypatch):
    monkeypatch.setenv(SETTINGS_VARIABLE, "/nowhere/settings.json")
    with pytest.raises(ValueError, match=r"/nowhere/settings.json cannot be read: No such file"):
        load_settings()


def test_settings_that_are_no_file_are_told_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv(SETTINGS_VARIABLE, str(tmp_path / "pipe"))
    with pytest.raises(ValueError, match="pipe cannot be read: not a regular file"):
        load_settings()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"sms": 8, "sms": 16}', "sms is given twice; keep one"),
        (b'{"max_tokens": {"direct": 8, "direct": 9}}', "direct is given twice; keep one"),
        (b'{"deployment": "\xff"}', "is not UTF-8 text: byte 0xff at position 16; save it as UTF-8"),
    ],
)
def test_what_a_parser_would_take_or_trip_over_is_told(tmp_path, monkeypatch, content, message):
    path = tmp_path / "settings.json"
    path.write_bytes(content)
    monkeypatch.setenv(SETTINGS_VARIABLE, str(path))
    with pytest.raises(ValueError, match=f"{SETTINGS_VARIABLE}={path}:? {message}$"):
        load_settings()


def test_the_page_names_every_setting():
    page = (Path(__file__).parents[1] / "docs" / "by-hand.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(Settings.model_fields)
