"""What a deployment tells each engine process: one JSON file, named by an environment variable."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, Secret, ValidationError, model_validator

from ep_backend.config import TIMEOUT_S
from ep_backend.errors import did_you_mean
from ep_backend.files import read_text
from ep_backend.modes import Family, Layout, Mode
from ep_backend.policy import AUTO, Role, Wish, check_wish, modes_of
from ep_backend.values import Host, Key, Name, Port, Positive, Seconds, Strict, Tokens

SETTINGS_VARIABLE = "EP_BACKEND_SETTINGS"


class Settings(Strict):
    """Settings of one engine instance; the defaults let the engine's flag work alone."""

    deployment: Name = "default"
    role: Role | None = None
    """None: from the engine's own configuration (vLLM: kv_role; SGLang: --disaggregation-mode)."""
    mode: Wish = AUTO
    max_tokens: dict[Mode, Tokens] = Field(default={})
    """Most tokens a rank dispatches in one call, by mode. Absent: the engine's own limit, for the mode in use."""
    lanes: Literal[1, 2] | None = None
    """None: 2 if the engine runs two micro-batches, else 1."""
    timeout_s: Seconds = TIMEOUT_S
    gpus_per_node: Positive | None = None
    """Ranks of one scale-up domain; None: found out. Smaller than the host makes virtual nodes."""
    rail: Literal["auto", "put"] = "auto"
    """How hybrid reaches other domains: stores to peers, or NVSHMEM's puts; then it is the only mode."""
    fp8: bool = True
    """Rows travel as FP8 where the experts take FP8 with 128-wide scales; otherwise as bf16."""
    layout: Layout | None = None
    """How rows reach the experts of vLLM's decode family; None: masked where vLLM has fast experts for that, else compact."""
    sms: Positive | None = None
    """Most SMs a kernel uses; None: the mode's default."""
    estimates: dict[Mode, Seconds] = Field(default={})
    """Seconds a layer by mode, as planned: across nodes auto takes the least. Absent: the mode with fewer copies."""
    agent_host: Host = "127.0.0.1"
    agent_port: Port | None = None
    """Rank r's agent listens at this port plus r; None: no agent."""
    agent_key: Secret[Key] | None = None

    @model_validator(mode="after")
    def _modes_fit_the_role(self) -> Self:
        if self.role is not None:
            check_wish(self.role, self.mode)
            for mode in self.max_tokens:
                check_wish(self.role, mode)
        if self.rail == "put" and (self.mode not in (AUTO, Mode.HYBRID) or set(self.max_tokens) != {Mode.HYBRID}):
            wish = "auto" if self.mode == AUTO else Mode(self.mode).value
            names = ", ".join(mode.value for mode in self.max_tokens) or "no mode"
            raise ValueError(
                f"rail put leaves hybrid alone, but mode is {wish} and max_tokens names {names}; use mode hybrid or auto, and "
                'max_tokens {"hybrid": TOKENS}'
            )
        decode = {n for m, n in self.max_tokens.items() if m in modes_of(Family.DECODE)}
        if self.role is Role.DECODE and len(decode) > 1:
            raise ValueError(
                f"max_tokens={{{', '.join(f'{m.value}: {n}' for m, n in self.max_tokens.items())}}} differ, but the "
                "engine sizes the rows of its decode experts once; give the decode modes one number"
            )
        return self


def load_settings() -> Settings:
    """The settings of this process; ValueError names the file and what is wrong in it."""
    path = os.environ.get(SETTINGS_VARIABLE)
    if not path:
        return Settings()
    try:
        text = read_text(Path(path))
        settings = Settings.model_validate_json(text, strict=True)
        json.loads(text, object_pairs_hook=_each_once)
    except OSError as e:
        raise ValueError(f"{SETTINGS_VARIABLE}={path} cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        what = f"byte {e.object[e.start]:#04x} at position {e.start}"
        raise ValueError(f"{SETTINGS_VARIABLE}={path} is not UTF-8 text: {what}; save it as UTF-8") from None
    except _GivenTwice as e:
        raise ValueError(f"{SETTINGS_VARIABLE}={path}: {e} is given twice; keep one") from None
    except ValidationError as e:
        raise ValueError(f"{SETTINGS_VARIABLE}={path}: {_told(e)}") from None
    return settings


class _GivenTwice(Exception):
    """A key of a JSON object, of which parsers keep only the last value."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _GivenTwice(key)
        found[key] = value
    return found


def _told(error: ValidationError) -> str:
    """Each wrong setting once: its value, the rule, and what was perhaps meant."""
    told: dict[str, str] = {}
    modes = [mode.value for mode in Mode]
    choices = {"mode": [AUTO, *modes], "role": [role.value for role in Role], "layout": [each.value for each in Layout]}
    for fault in error.errors(include_url=False):
        key, *below = [str(part) for part in fault["loc"]] or [""]
        value = "***" if key == "agent_key" else json.dumps(fault["input"], default=str)
        if not key:
            told[key] = fault["msg"].removeprefix("Value error, ")
        elif fault["type"] == "extra_forbidden":
            told[key] = f"{key}: there is no such setting; " + did_you_mean(key, Settings.model_fields, "leave it out")
        elif key in choices or below[-1:] == ["[key]"]:
            words = choices.get(key, modes)
            meant = did_you_mean(value, words, "write one of them")
            told[f"{key} {value}"] = f"{key}: {value} must be one of {', '.join(words)}; {meant}"
        else:
            told[key] = f"{'.'.join([key, *below])}: {value}: {fault['msg']}"
    return "; ".join(told.values())
