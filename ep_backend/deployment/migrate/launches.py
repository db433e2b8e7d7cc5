"""Launches of engines among the commands of a shell text: which engine, with which flags and environment."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from ep_backend.deployment.migrate.shell import ASSIGNMENT, Command

Engine = Literal["vllm", "sglang"]
MODULES: tuple[tuple[str, Engine], ...] = (
    ("sglang.launch_server", "sglang"),
    ("dynamo.sglang", "sglang"),
    ("vllm.entrypoints.openai.api_server", "vllm"),
    ("dynamo.vllm", "vllm"),
)
PROGRAMS: dict[str, Engine] = {"sglang": "sglang", "vllm": "vllm"}
# Other spellings of a flag, by the one that this package uses.
ALIASES: dict[Engine, dict[str, str]] = {
    "sglang": {
        "model": "model-path",
        "tp": "tp-size",
        "tensor-parallel-size": "tp-size",
        "dp": "dp-size",
        "data-parallel-size": "dp-size",
        "ep": "ep-size",
        "expert-parallel-size": "ep-size",
        "nccl-init-addr": "dist-init-addr",
    },
    "vllm": {
        "tp": "tensor-parallel-size",
        "pp": "pipeline-parallel-size",
        "dp": "data-parallel-size",
        "dpn": "data-parallel-rank",
        "dpr": "data-parallel-start-rank",
        "dpl": "data-parallel-size-local",
        "dpa": "data-parallel-address",
        "dpp": "data-parallel-rpc-port",
        "dpb": "data-parallel-backend",
        "dph": "data-parallel-hybrid-lb",
        "dpe": "data-parallel-external-lb",
        "dpm": "data-parallel-multi-port-external-lb",
        "ep": "enable-expert-parallel",
        "q": "quantization",
        "n": "nnodes",
        "r": "node-rank",
        "cc": "compilation-config",
        "sc": "speculative-config",
        "ac": "attention-config",
    },
}
FLAG = re.compile(r"--?[A-Za-z][\w.-]*")


@dataclass
class Launch:
    """One launch. `program` is what its words begin with; `hints` are names near it that may tell the model or the role."""

    engine: Engine
    program: str
    flags: dict[str, JsonValue]
    env: dict[str, str]
    before: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)


def launches(found: Sequence[Command]) -> Iterator[Launch]:
    for command in found:
        at = _engine_at(command.words)
        if at is None:
            continue
        engine, first, after = at
        env = dict(command.env)
        before = [word for word in command.words[:first] if word not in ("python", "python3", "-m", "env")]
        for word in before:
            if given := ASSIGNMENT.fullmatch(word.removeprefix("--env=")):
                env[given[1]] = given[2]
        before = [word for word in before if not ASSIGNMENT.fullmatch(word.removeprefix("--env="))]
        yield Launch(engine, command.words[first], flags_of(engine, command.words[after:]), env, before)


def _engine_at(words: Sequence[str]) -> tuple[Engine, int, int] | None:
    """The engine, where its program stands, and where its own words begin."""
    for index, word in enumerate(words):
        for module, engine in MODULES:
            if word == module or word.startswith(f"{module}."):
                return engine, index, index + 1
        program = word.rpartition("/")[2]
        if program in PROGRAMS and words[index + 1 : index + 2] == ["serve"]:
            return PROGRAMS[program], index, index + 2
        if word.endswith("sglang/launch_server.py"):
            return "sglang", index, index + 1
    return None


def flags_of(engine: Engine, words: Sequence[str]) -> dict[str, JsonValue]:
    """Flags by their whole names without dashes. A word before the first flag is the model, as in `vllm serve MODEL`."""
    flags: dict[str, JsonValue] = {}
    name, values = "model", list[str]()
    for word in words:
        if FLAG.match(word):
            if values or name != "model":
                flags[name] = _value(values)
            key, equals, value = word.partition("=")
            key = key.lstrip("-").replace("_", "-") if "." not in key else key.lstrip("-")
            name, values = ALIASES[engine].get(key, key), [value] if equals else []
        else:
            values.append(word)
    if values or name != "model":
        flags[name] = _value(values)
    if "model" in flags:
        flags = {"model-path": flags.pop("model"), **flags}
    return flags


def _value(words: Sequence[str]) -> JsonValue:
    if not words:
        return True
    values = [_scalar(word) for word in words]
    return values[0] if len(values) == 1 else values


def _scalar(word: str) -> JsonValue:
    if re.fullmatch(r"-?(0|[1-9]\d*)", word):
        return int(word)
    if re.fullmatch(r"-?\d+\.\d+", word):
        return float(word)
    if word.startswith("{"):
        try:
            parsed: JsonValue = json.loads(word)
        except ValueError:
            return word
        return parsed
    return word
