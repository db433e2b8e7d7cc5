"""render and migrate: from a deployment file to what starts it elsewhere, and from what started an engine before to a file."""

import json
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class For(str, Enum):
    SHELL = "shell"
    SLURM = "slurm"
    LWS = "lws"
    DISAGGREGATEDSET = "disaggregatedset"


def register(app: typer.Typer) -> None:
    for command in (render, migrate):
        app.command()(command)


def render(
    file: Annotated[Path, typer.Argument(help="the deployment file", show_default=False)],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="a folder of render's own: new, or rendered before", show_default=False)
    ],
    targets: Annotated[
        list[For] | None,
        typer.Option("--for", help="what to write, also several times; default: target.kind", show_default=False),
    ] = None,
) -> None:
    """Write what starts a deployment elsewhere: launch scripts, engine configurations, manifests or a batch job."""
    from ep_backend.deployment import render as rendering
    from ep_backend.deployment.problems import DeploymentError

    try:
        rendered = rendering.render(file, [target.value for target in targets or []])
        rendering.write(rendered, out)
    except (DeploymentError, rendering.FolderRefused) as error:
        raise _fail(error) from None
    except OSError as error:
        raise _fail(_unwritable(out, error)) from None
    for name in rendered.files:
        print(out / name, flush=True)
    for warning in rendered.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(rendered.listens, file=sys.stderr)


class RoleName(str, Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


def migrate(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="files with shell commands, or LeaderWorkerSet or DisaggregatedSet manifests, of one deployment; - is stdin",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="the file to write, a new one; default, and -: stdout", show_default=False),
    ] = None,
    name: Annotated[str | None, typer.Option(help="of the deployment", show_default=False)] = None,
    role: Annotated[
        RoleName | None,
        typer.Option(help="of a command that does not tell, such as kv_both; one that tells keeps its own", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="a model preset, where no name tells which model it is", show_default=False)
    ] = None,
    topology: Annotated[
        str | None, typer.Option(help="a topology preset: commands say nothing of it", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="file, changes and findings as JSON; docs/json.md lists the keys")
    ] = False,
) -> None:
    """Turn commands or manifests that start SGLang or vLLM into a deployment file. Exit 1 if lint still finds errors in it."""
    from ep_backend.deployment.lint.report import is_error
    from ep_backend.deployment.migrate import as_rows
    from ep_backend.deployment.migrate import migrate as migrated
    from ep_backend.deployment.migrate.notes import Unmovable
    from ep_backend.deployment.presets import models, topologies

    out = None if out == Path("-") else out
    try:
        _among("--model", model, models())
        _among("--topology", topology, topologies())
        texts = [("stdin", sys.stdin.read()) if str(path) == "-" else (str(path), _text(path)) for path in inputs]
        made = migrated(
            texts,
            name=name,
            role=role.value if role else None,
            model=model,
            topology=topology,
            file=out or Path("deployment.yaml"),
        )
    except Unmovable as error:
        raise _fail(error) from None
    if out is not None:
        try:
            _write_new(out, made.text)
        except OSError as error:
            raise _fail(_unwritable(out, error)) from None
    errors = [finding for finding in made.findings if is_error(finding)]
    if as_json:
        lint = [str(finding) for finding in made.findings]
        print(json.dumps({"file": made.text, "changes": as_rows(made.notes), "lint": lint}, indent=2))
    elif out is None:
        print(made.text, end="")
    if not as_json:
        for note in made.notes:
            became = f" -> {note.became}" if note.became else ""
            print(f"{note.kind:8}  {note.role:8}  {note.what}{became}: {note.why}", file=sys.stderr)
        for finding in errors:
            print(f"still to do: {finding}", file=sys.stderr)
    if errors:
        raise typer.Exit(1)


def _text(path: Path) -> str:
    from ep_backend.deployment.migrate.notes import Unmovable
    from ep_backend.files import read_text

    try:
        return read_text(path)
    except OSError as error:
        raise Unmovable(f"{path} cannot be read: {error.strerror}; give a shell script or a manifest") from None
    except UnicodeDecodeError:
        raise Unmovable(f"{path} is no text in UTF-8; give a shell script or a manifest") from None


def _write_new(file: Path, text: str) -> None:
    """Whole or not at all, for a second run would take what is there for somebody's own."""
    opened = file.open("x", encoding="utf-8")
    try:
        with opened:
            opened.write(text)
    except OSError:
        file.unlink()
        raise


def _unwritable(out: Path, error: OSError) -> OSError:
    return OSError(f"--out {out} cannot be written: {error.strerror}; choose another")


def _among(option: str, value: str | None, known: Iterable[str]) -> None:
    from ep_backend.deployment.migrate.notes import Unmovable

    if value is not None and value not in known:
        raise Unmovable(f"{option} {value} is no preset; choose one of {', '.join(known)}")


def _fail(error: Exception) -> typer.Exit:
    print(f"ep-backend: {error}", file=sys.stderr)
    return typer.Exit(1)
