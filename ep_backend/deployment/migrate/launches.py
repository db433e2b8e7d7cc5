"""Launches of engines among the commands of a shell text: which engine, with which flags and environment."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue
from ruamel.yaml.error import YAMLError

from ep_backend.deployment.document import plain_documents
from ep_backend.deployment.engines.traits import Engine
from ep_backend.deployment.migrate.notes import Said, shown
from ep_backend.deployment.migrate.shell import ASSIGNMENT, Command
from ep_backend.deployment.words import REPEATED

MODULES: tuple[tuple[str, Engine], ...] = (
    ("sglang.launch_server", "sglang"),
    ("dynamo.sglang", "sglang"),
    ("vllm.entrypoints.openai.api_server", "vllm"),
    ("dynamo.vllm", "vllm"),
)
# Images whose entry point is the engine's server: flags follow the image.
ENTRY_POINTS = re.compile(r"(?:.*/)?vllm-openai(?:[:@].*)?")
PROGRAMS: dict[str, Engine] = {"sglang": "sglang", "vllm": "vllm"}
LEVEL = "optimization-level"
# Commands that change nothing that an engine sees.
SILENT = ("cd", "echo", "set", "sleep", "wait", "trap", "true", "if", "fi", "for", "while", "done", "[", "[[", "}")
CONTAINERS = ("docker", "podman", "nerdctl")
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
        "dcp": "decode-context-parallel-size",
        "pcp": "prefill-context-parallel-size",
        "dc": "diffusion-config",
        "cc": "compilation-config",
        "O": LEVEL,
        "sc": "speculative-config",
        "ac": "attention-config",
    },
}
FLAG = re.compile(r"--?[A-Za-z][\w.-]*")


@dataclass
class Launch:
    """One launch. `program` is what its words begin with; `hints` are names near it that may tell the model or the role;
    `said` is what became of words that `flags` does not hold as they were given."""

    engine: Engine
    program: str
    flags: dict[str, JsonValue]
    env: dict[str, str]
    before: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    image: str | None = None
    said: list[Said] = field(default_factory=list)


def launches(found: Sequence[Command], file: Callable[[str], str | None] = lambda path: None) -> list[Launch]:
    """`file`: the text of a file that a command names, None if it cannot be reached."""
    started, others = list[Launch](), list[Said]()
    for command in found:
        at = _engine_at(command.words)
        if at is None:
            if command.words[0] not in SILENT:
                others.append(("left out", shown(shlex.join(command.words)), "", "it starts no engine"))
            continue
        engine, first, after = at
        env = dict(command.env)
        before = [word for word in command.words[:first] if word not in ("python", "python3", "-m", "env")]
        assigned = {
            index: given for index, word in enumerate(before) if (given := ASSIGNMENT.fullmatch(word.removeprefix("--env=")))
        }
        env |= {given[1]: given[2] for given in assigned.values()}
        taken = {*assigned, *(index - 1 for index in assigned if before[index - 1] in ("-e", "--env"))}
        before = [word for index, word in enumerate(before) if index not in taken]
        flags, said = _flags(engine, command.words[after:])
        program = command.words[first]
        image = program if ENTRY_POINTS.fullmatch(program) else _image(before)
        launch = Launch(engine, program, flags, env, before, image=image, said=said)
        _take_config(launch, file)
        started.append(launch)
    if started:
        started[0].said += others
    return started


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
        if ENTRY_POINTS.fullmatch(word) and words[index + 1 : index + 2] and FLAG.match(words[index + 1]):
            return "vllm", index, index + 1
    return None


def _image(before: Sequence[str]) -> str | None:
    """The image that a container is started from, in the words before the engine's program."""
    for word in before:
        if word.startswith("--container-image="):
            return word.partition("=")[2]
    return before[-1] if before[:1] and before[0].rpartition("/")[2] in CONTAINERS else None


def _flags(engine: Engine, words: Sequence[str]) -> tuple[dict[str, JsonValue], list[Said]]:
    """Flags by their whole names without dashes, `--flag.key value` as mappings; and what of them the engine would not take."""
    flags, nested, said = dict[str, JsonValue](), dict[str, dict[str, Any]](), list[Said]()

    def replaced(flag: str, value: JsonValue) -> None:
        said.append(("left out", spelt(flag, value), "", "it is given again, and the engine takes the last"))

    for name, values in _given(engine, words):
        flag, dot, path = name.partition(".")
        value = _value(values)
        if flag == LEVEL and (dot or isinstance(value, dict)):
            flag = "compilation-config"
            said.append(("changed", spelt(f"-O{dot}{path}", value), f"args.{flag}", "the engine renamed it"))
        if dot:
            _nest(nested.setdefault(flag, {}), path, values)
        elif flag in REPEATED and flag in flags:
            before = flags[flag]
            flags[flag] = [*(before if isinstance(before, list) else [before]), value]
        else:
            if flag in flags and flags[flag] != value:
                replaced(flag, flags[flag])
            flags[flag] = value
    for flag, mapping in nested.items():
        if flag in flags:
            replaced(flag, flags[flag])
        flags[flag] = mapping
    return _model_first(flags), said


def _model_first(flags: dict[str, JsonValue]) -> dict[str, JsonValue]:
    return {"model-path": flags["model"], **{k: v for k, v in flags.items() if k != "model"}} if "model" in flags else flags


def _given(engine: Engine, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with its values. A word before the first flag is the model, as in `vllm serve MODEL`."""
    name, values = "model", list[str]()
    for word in words:
        if not FLAG.match(word):
            values.append(word)
            continue
        if values or name != "model":
            yield name, values
        key, equals, value = word.partition("=")
        if engine == "vllm" and (level := re.fullmatch(r"-O(\w+)", key)):
            name, values = LEVEL, [level[1]]
        else:
            name, values = _whole(engine, key), [value] if equals else []
    if values or name != "model":
        yield name, values


def _whole(engine: Engine, key: str) -> str:
    name, dot, path = key.lstrip("-").partition(".")
    name = name.replace("_", "-")
    return ALIASES[engine].get(name, name) + dot + path


def _nest(mapping: dict[str, Any], path: str, words: Sequence[str]) -> None:
    """Puts the value of `--flag.a.b value` to its place; `--flag.a+ value` adds to a list."""
    *outer, last = path.removesuffix("+").split(".")
    for key in outer:
        if not isinstance(mapping.get(key), dict):
            mapping[key] = {}
        mapping = mapping[key]
    if path.endswith("+"):
        held = mapping.get(last)
        mapping[last] = [*(held if isinstance(held, list) else []), *(each for word in words for each in word.split(","))]
        return
    try:
        mapping[last] = json.loads(" ".join(words))
    except ValueError:
        mapping[last] = _value(words)


def _take_config(launch: Launch, file: Callable[[str], str | None]) -> None:
    """Takes the flags of a `--config` file; those of the command line go before them, as in both engines."""
    path = launch.flags.pop("config", None)
    if path is None:
        return
    text = file(str(path))
    try:
        documents = plain_documents(text or "")
    except YAMLError:
        documents = []
    keys = documents[0] if len(documents) == 1 else None
    if not isinstance(keys, Mapping):
        why = "it could not be read here" if text is None else "it is no mapping in YAML"
        launch.said.append(("left out", spelt("config", path), "", f"{why}; write its keys under the role's args"))
        return
    launch.said.append(("changed", spelt("config", path), "args", "its keys are those of the command line"))
    own = {_whole(launch.engine, str(key)): _scalar(each) if isinstance(each, str) else each for key, each in keys.items()}
    own = _model_first(own)
    for flag in sorted(own.keys() & launch.flags.keys()):
        if own[flag] != launch.flags[flag]:
            launch.said.append(("left out", f"{spelt(flag, own[flag])} of {path}", "", "the command line says otherwise"))
    launch.flags = own | launch.flags


def spelt(flag: str, value: JsonValue) -> str:
    """The flag as a person would write it."""
    dashed = flag if flag.startswith("-") else f"--{flag}"
    return dashed if value is True else f"{dashed} {json.dumps(value) if isinstance(value, dict) else value}"


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
