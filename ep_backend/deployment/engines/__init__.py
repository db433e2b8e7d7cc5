"""Which flags and environment variables a version of an engine knows: from the tables here, or its installed source."""

import json
import tomllib
from functools import cache
from importlib import metadata
from importlib.resources import files
from pathlib import Path

from ep_backend.deployment.engines.extract import Table, from_source

# Versions whose seams the plug-ins know: the first, and the first that they do not know any more.
SUPPORTED = {"vllm": ("0.26", "0.34"), "sglang": ("0.5.17", "0.5.24")}
NVSHMEM_BUILT = "3.4.5"
GLOBS = (
    "vllm/entrypoints/*/cli_args.py",
    "vllm/config/*.py",
    "sglang/srt/arg_groups/*.py",
    "sglang/srt/arg_groups/fields/*.py",
)


@cache
def table(engine: str, version: str | None) -> Table:
    """The table of that version, else the installed engine's if it is that version, else the nearest older (or oldest)."""
    shipped = sorted(_versions(engine), key=number)
    if version is None:
        return _read(engine, shipped[-1])
    if version in shipped:
        return _read(engine, version)
    if installed(engine) == version:
        return _installed_table(engine, version)
    older = [candidate for candidate in shipped if number(candidate) <= number(version)]
    return _read(engine, older[-1] if older else shipped[0])


@cache
def replaced(engine: str) -> dict[str, dict[str, str]]:
    """Removed and renamed flags, values and variables of an engine, with what to write instead."""
    text = files(__name__).joinpath("replaced.toml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, dict[str, str]]] = tomllib.loads(text)
    return tables[engine]


def installed(package: str) -> str | None:
    """The version of a package in this environment, without its local part (2.14.0+cpu is 2.14.0)."""
    try:
        return metadata.version(package).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def number(version: str) -> tuple[int, ...]:
    """A version's numbers, for comparison; what follows them (rc1, post2, +cpu) does not count."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _versions(engine: str) -> list[str]:
    names = (file.name for file in files(__name__).iterdir())
    return [name.removeprefix(f"{engine}-").removesuffix(".json") for name in names if name.startswith(f"{engine}-")]


def _read(engine: str, version: str) -> Table:
    text = files(__name__).joinpath(f"{engine}-{version}.json").read_text(encoding="utf-8")
    return Table(**json.loads(text))


def _installed_table(engine: str, version: str) -> Table:
    found = metadata.distribution(engine)
    package = Path(str(found.locate_file(engine)))
    root = package.parent
    names = [str(file.relative_to(root)) for glob in GLOBS for file in root.glob(glob)]
    return from_source(
        engine, version, names, lambda path: (root / path).read_text(encoding="utf-8"), found.read_text("METADATA") or ""
    )
