"""Reads the flags and environment variables that an engine version knows from its source, without importing it.

    python -m ep_backend.deployment.engines vllm-0.33.0-....whl sglang-0.5.23-....whl nvidia_nvshmem_cu13-3.4.5-....whl

writes one table a wheel beside this file. The same code reads an installed engine whose version has no table.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ep_backend.deployment.engines import values
from ep_backend.deployment.engines.values import BOOLEAN, SIZE_PARSERS, SWITCH, Declared, Takes

FOLDER = Path(__file__).parent
SHORTEST_NAME = 4
Read = Callable[[str], str]


@dataclass(frozen=True)
class Table:
    """What one version of an engine or library accepts. Flags are written without their leading dashes, with what they take.

    `inside`: of flags that take JSON for one of the engine's own classes, the keys and what those take.
    """

    name: str
    version: str
    torch: str | None
    flags: dict[str, Takes]
    env: list[str]
    inside: dict[str, dict[str, Takes]] = field(default_factory=dict)


def from_wheel(wheel: Path) -> Table:
    """The table of a wheel; ValueError if it is none of vllm, sglang or nvidia-nvshmem."""
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if name.startswith("nvidia_nvshmem"):
            return Table("nvshmem", version, None, {}, sorted(_nvshmem_env(archive)))

        def read(path: str) -> str:
            return archive.read(path).decode("utf-8")

        metadata = read(next(path for path in names if path.endswith(".dist-info/METADATA")))
        return from_source(name.replace("_cpu", ""), version, names, read, metadata)


def from_source(name: str, version: str, names: list[str], read: Read, metadata: str) -> Table:
    """The table of an engine whose files are `names`, paths from the folder that holds the package."""
    readers = {"vllm": (_vllm_flags, _vllm_env), "sglang": (_sglang_flags, _sglang_env)}
    if name not in readers:
        raise ValueError(f"{name} is none of {', '.join(readers)}, nvidia-nvshmem")
    flags, env = readers[name]
    pin = re.search(r"^Requires-Dist: torch==([\d.]+)", metadata, re.MULTILINE)
    found = dict(sorted(flags(names, read).items()))
    inside = _vllm_inside(found, names, read) if name == "vllm" else {}
    return Table(name, version, pin.group(1) if pin else None, found, sorted(env(read)), inside)


def _vllm_flags(names: list[str], read: Read) -> dict[str, Takes]:
    """Literals of add_argument, and the fields of the front end's dataclasses, which it adds in a loop."""
    front = next(path for path in names if re.fullmatch(r"vllm/entrypoints/\w+/cli_args.py", path))
    trees = [ast.parse(read(path)) for path in ("vllm/engine/arg_utils.py", front)]
    configs = [ast.parse(read(path)) for path in names if re.fullmatch(r"vllm/config/\w+\.py", path)]
    declared, words = Declared.of([*configs, *trees]), values.in_words(trees[0])
    classes, changed = values.kwargs_of_classes(trees[0]), values.reworked(trees[0]) | values.reworked(trees[1])

    def of_field(config: str, name: str) -> Takes:
        annotation = declared.fields.get(config, {}).get(name)
        if annotation is None or name in changed:
            return None
        takes = declared.takes(annotation)
        return words.get(name, takes) if takes == values.INTEGER else takes

    flags: dict[str, Takes] = {}
    for tree in trees:
        for names_of, call in _add_arguments(tree):
            made_of = values.spread(call)
            given = of_field(classes[made_of[0]], made_of[1]) if made_of and made_of[0] in classes else None
            takes = values.of_call(call, declared, given)
            certain = all(keyword.arg is not None for keyword in call.keywords)
            for name in names_of:
                flags |= _with_negation(name, takes, certain=certain)
    for node in ast.walk(trees[1]):
        if isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            for name, _ in values.fields_of(node):
                flags |= _with_negation(_dashed(name), of_field(node.name, name), certain=False)
    return flags


def _vllm_inside(flags: Iterable[str], names: list[str], read: Read) -> dict[str, dict[str, Takes]]:
    """Fields of the class that a flag is named after (--eplb-config: EPLBConfig); vLLM's decorator forbids any other key."""
    trees = [ast.parse(read(path)) for path in names if re.fullmatch(r"vllm/config/\w+\.py", path)]
    declared = Declared.of(trees)
    flag_of = {flag.replace("-", ""): flag for flag in flags}
    found: dict[str, dict[str, Takes]] = {}
    for tree in trees:
        rewritten = values.before_validation(tree)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.bases and any(map(_forbids_others, node.decorator_list)):
                flag = flag_of.get(node.name.lower())
                if flag is not None:
                    found[flag] = {
                        name: None if name in rewritten else declared.takes(of)
                        for name, of in values.fields_of(node)
                        if not ast.unparse(of).startswith("ClassVar")
                    }
    return dict(sorted(found.items()))


def _forbids_others(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "config"


def _with_negation(name: str, takes: Takes, *, certain: bool) -> dict[str, Takes]:
    """The flag, and its `--no-` form if it has one; where that is not certain, an unused spelling hides no mistake."""
    if takes == BOOLEAN:
        return {name: takes, f"no-{name}": SWITCH}
    return {name: takes} if certain or takes is not None else {name: None, f"no-{name}": None}


def _vllm_env(read: Read) -> set[str]:
    """Keys of the table `environment_variables`."""
    for node in ast.parse(read("vllm/envs.py")).body:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == "environment_variables":
            assert isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict)
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    raise ValueError("vllm/envs.py has no table environment_variables")


def _sglang_flags(names: list[str], read: Read) -> dict[str, Takes]:
    """Annotated fields `name: A[type, Arg(...)]` of the argument classes, and literals of add_argument."""
    folder = "sglang/srt/arg_groups/"
    others = [path for path in names if re.fullmatch(rf"{folder}(fields/\w+|choices)\.py", path)]
    trees = [ast.parse(read(path)) for path in ["sglang/srt/server_args.py", *others]]
    declared = Declared.of(trees)
    flags: dict[str, Takes] = {}
    for tree in trees:
        for names_of, call in _add_arguments(tree):
            for name in names_of:
                flags |= _with_negation(name, values.of_call(call, declared), certain=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for name, annotation in values.fields_of(node):
                    flags |= _sglang_field(name, annotation, declared)
    return flags


def _sglang_field(name: str, annotation: ast.expr, declared: Declared) -> dict[str, Takes]:
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated")):
        return {}
    keywords = {
        keyword.arg: keyword.value
        for call in ast.walk(annotation.slice)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Arg"
        for keyword in call.keywords
    }
    if "no_cli" in keywords:
        return {}
    named = _strings(keywords.get("cli_name")) or {_dashed(name)}
    of_type = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
    takes = _sglang_takes(of_type, keywords, declared)
    flags: dict[str, Takes] = {}
    for spelling in named | _strings(keywords.get("aliases")):
        flags |= _with_negation(spelling.lstrip("-"), takes, certain=True)
    return flags


def _sglang_takes(of_type: ast.expr, keywords: Mapping[str | None, ast.expr], declared: Declared) -> Takes:
    """SGLang's add_cli_args_from_dataclass: a plain bool is a switch, and its own parsers and choices come first."""
    if "action" in keywords:
        return values.of_action(keywords["action"])
    if "type_parser" in keywords:
        return SIZE_PARSERS.get(ast.unparse(keywords["type_parser"]))
    takes = declared.takes(of_type)
    if takes == BOOLEAN:
        return SWITCH
    if "nargs" in keywords:
        return None
    return declared.words(keywords["choices"]) if "choices" in keywords else takes


def _sglang_env(read: Read) -> set[str]:
    """Fields `NAME = EnvX(default)` of the registry, and the older names that some take as a fallback."""
    found = set[str]()
    for node in ast.walk(ast.parse(read("sglang/srt/environ.py"))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            found.add(node.targets[0].id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found if re.fullmatch(r"(SGLANG|SGL)_[A-Z0-9_]+", name)}


def _nvshmem_env(archive: zipfile.ZipFile) -> set[str]:
    """Capital strings of the host library and its transports: NVSHMEM stores most names without their prefix."""
    found = set[str]()
    for path in archive.namelist():
        if re.search(r"lib(nvshmem_host)?.*\.so", path):
            strings = re.findall(rb"(?<=\0)[A-Z][A-Z0-9_]+(?=\0)", archive.read(path))
            found |= {s.decode().removeprefix("NVSHMEM_") for s in strings if len(s) >= SHORTEST_NAME}
    return {f"NVSHMEM_{name}" for name in found}


def _add_arguments(tree: ast.AST) -> Iterator[tuple[set[str], ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
            if long := {name.removeprefix("--") for name in names if name.startswith("--")}:
                yield long, node


def _strings(node: ast.expr | None) -> set[str]:
    if node is None:
        return set()
    return {c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)}


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def main(wheels: list[str]) -> None:
    for wheel in wheels:
        table = from_wheel(Path(wheel))
        file = FOLDER / f"{table.name}-{table.version}.json"
        file.write_text(json.dumps(asdict(table), indent=0) + "\n", encoding="utf-8")
        print(f"{file.name}: {len(table.flags)} flags, {len(table.env)} variables, torch {table.torch}")
