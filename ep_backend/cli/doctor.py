"""`ep-backend doctor`: is this host fit for a role?"""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    file: Annotated[Path | None, typer.Option("-f", "--file", help="a deployment file", show_default=False)] = None,
    role: Annotated[str | None, typer.Option(help="check only what one host of that role needs", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="also list the checks that were skipped, and why")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON; docs/doctor.md lists the keys")] = False,
) -> None:
    """Check this host: GPUs, NICs, limits, software. Exit 1 if a check fails. Needs no root and changes nothing."""
    from typing import get_args

    from ep_backend.cli.app import fail
    from ep_backend.console import make_console
    from ep_backend.deployment.problems import DeploymentError
    from ep_backend.deployment.schema import RoleName
    from ep_backend.doctor.examine import examine
    from ep_backend.doctor.host import Host
    from ep_backend.doctor.report import as_json as json_of
    from ep_backend.doctor.report import print_report

    name = next((known for known in get_args(RoleName) if known == role), None)
    if role is not None and name is None:
        raise fail(ValueError(f"--role {role} is none of {', '.join(get_args(RoleName))}"))
    try:
        report = examine(Host(), file, name)
    except (DeploymentError, ValueError) as error:
        raise fail(error) from None
    if as_json:
        print(json_of(report))
    else:
        print_report(report, make_console(), every)
    if report.failed:
        raise typer.Exit(1)
