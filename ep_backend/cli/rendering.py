"""render and migrate: from a deployment file to what starts it elsewhere, and from what started an engine before to a file."""

import sys
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
    for command in (render,):
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
    except DeploymentError as error:
        raise _fail(error) from None
    except (rendering.FolderRefused, OSError) as error:
        raise _fail(error) from None
    for name in rendered.files:
        print(out / name)
    if rendered.warnings:
        print(f"{len(rendered.warnings)} warning(s): `ep-backend lint {file}` explains them", file=sys.stderr)


def _fail(error: Exception) -> typer.Exit:
    print(f"ep-backend: {error}", file=sys.stderr)
    return typer.Exit(1)
