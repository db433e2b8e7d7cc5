"""plan, lint, explain, diff and schema: what a deployment file says, before anything is started."""

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(help="the deployment file", show_default=False)]


class Format(str, Enum):
    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


def register(app: typer.Typer) -> None:
    for command in (plan, lint, explain, diff, schema):
        app.command()(command)


def plan(
    file: File,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON; docs/plan.md lists the keys")] = False,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="also write a picture of step time over batch size", show_default=False)
    ] = None,
) -> None:
    """Show copies, bytes, time and memory of every role and mode, and which mode auto picks, without a GPU."""
    from ep_backend.deployment.load import load
    from ep_backend.deployment.problems import DeploymentError
    from ep_backend.deployment.resolve import ModelUnknown
    from ep_backend.plan.planner import plan as make_plan

    try:
        deployment = load(file).deployment
        made = make_plan(deployment)
        if picture is not None:
            from ep_backend.plan.plot import plot

            try:
                plot(deployment, picture)
            except OSError as error:
                raise _fail(ValueError(f"--plot {picture} cannot be written: {error.strerror}; choose another")) from None
    except (DeploymentError, ModelUnknown, ValueError) as error:
        raise _fail(error) from None
    if as_json:
        print(json.dumps(made.as_dict(), indent=2))
        return
    from ep_backend.console import make_console
    from ep_backend.plan.report import print_plan

    print_plan(made, make_console())


def lint(
    files: Annotated[list[Path], typer.Argument(help="deployment files", show_default=False)],
    output: Annotated[
        Format, typer.Option("--format", help="json: docs/json.md lists the keys; github: annotations of a workflow run")
    ] = Format.TEXT,
    engine: Annotated[
        bool, typer.Option("--engine", help="also let the engine installed here parse every role's flags (slow)")
    ] = False,
) -> None:
    """Report every mistake of the files at once, each with its line, code, reason and fix. Exit 1 if one is an error."""
    from ep_backend.deployment.lint.report import RENDER, findings_of, is_error

    found = [finding for file in files for finding in findings_of(file, engine)]
    print(RENDER[output.value](found), end="")
    if any(is_error(finding) for finding in found):
        raise typer.Exit(1)


def explain(
    code: Annotated[str | None, typer.Argument(help="for example EP101; without it, a list", show_default=False)] = None,
) -> None:
    """Say what a code of lint means, why it matters, how to fix it and where that is known from."""
    from ep_backend.deployment.lint.texts import rules

    if code is None:
        for rule in rules().values():
            print(f"{rule.code}  {rule.severity:7}  {rule.title}")
        return
    found = rules().get(code.upper())
    if found is None:
        raise _fail(ValueError(f"{code} is no code; `ep-backend explain` lists them"))
    print(f"{found.code} ({found.severity}): {found.title}\n\nWhy: {found.why}\nFix: {found.fix}\nFrom: {found.source}")


def diff(
    old: File,
    new: File,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON; docs/json.md lists the keys")] = False,
) -> None:
    """Compare two deployments: each change is hot, drain, restart or redeploy, and why."""
    from ep_backend.deployment.changes import changes
    from ep_backend.deployment.load import load
    from ep_backend.deployment.problems import DeploymentError
    from ep_backend.deployment.spelling import in_yaml

    try:
        found = changes(load(old).deployment, load(new).deployment)
    except DeploymentError as error:
        raise _fail(error) from None
    if as_json:
        keys = ("role", "old", "new", "kind", "why")
        print(json.dumps([{"place": ".".join(c.place)} | {k: getattr(c, k) for k in keys} for c in found], indent=2))
        return
    for change in found:
        print(f"{change.kind:8}  {'.'.join(change.place)}: {in_yaml(change.old)} -> {in_yaml(change.new)}; {change.why}")
    if not found:
        print("no difference")


def schema(
    out: Annotated[Path | None, typer.Option("--out", help="write it there", show_default=False)] = None,
) -> None:
    """Print the JSON schema of a deployment file, for editors."""
    from ep_backend.deployment.schema import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if out is None:
        print(text, end="")
    else:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _fail(ValueError(f"{out} cannot be written: {error.strerror}; choose another --out")) from None


def _fail(error: Exception) -> typer.Exit:
    print(f"ep-backend: {error}", file=sys.stderr)
    return typer.Exit(1)
