"""The commands; each is a thin front to the module that does the work."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Expert-parallel all-to-all for vLLM and SGLang: deployments, checks and a demo that needs no GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

File = Annotated[Path, typer.Argument(help="the deployment file", show_default=False)]


def main() -> None:
    app()


def fail(error: Exception) -> typer.Exit:
    print(f"ep-backend: {error}", file=sys.stderr)
    return typer.Exit(1)


@app.command()
def checkpoint(
    out: Annotated[Path, typer.Argument(help="the folder to write", show_default=False)],
    seed: Annotated[int, typer.Option(help="the same seed writes the same bytes", min=0)] = 0,
) -> None:
    """Write a small random DeepSeek-V3 checkpoint with tokenizer and chat template."""
    from ep_backend.checkpoint import write_checkpoint

    parameters = write_checkpoint(out, seed)
    print(f"{out}: DeepseekV3ForCausalLM, {parameters / 1e6:.2f} M parameters, seed {seed}")


@app.command()
def up(
    file: File,
    detach: Annotated[bool, typer.Option("--detach", help="return once it serves; `down` stops it")] = False,
) -> None:
    """Start a deployment on this machine and serve until ctrl-C."""
    from ep_backend.deployment import commands
    from ep_backend.deployment.problems import DeploymentError
    from ep_backend.deployment.supervisor import InstanceFailed
    from ep_backend.deployment.view import make_console

    console = make_console()
    try:
        if detach:
            commands.up_detached(file, console)
        else:
            commands.up(file, console)
    except (DeploymentError, InstanceFailed, OSError) as error:
        raise fail(error) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def down(file: File) -> None:
    """Stop a deployment and remove what it left in shared memory."""
    from ep_backend.deployment import commands
    from ep_backend.deployment.load import load
    from ep_backend.deployment.problems import DeploymentError

    try:
        name = load(file).deployment.name
    except DeploymentError as error:
        raise fail(error) from None
    print(f"{name} is down" if commands.down(name) else f"{name} was not running")


@app.command()
def status(
    file: File,
    as_json: Annotated[bool, typer.Option("--json", help="the ranks' answers as JSON")] = False,
) -> None:
    """Show what every rank's buffer did: the mode executed, calls, records and bytes per path."""
    from ep_backend.deployment import commands
    from ep_backend.deployment.agents import all_statuses
    from ep_backend.deployment.load import load
    from ep_backend.deployment.problems import DeploymentError
    from ep_backend.deployment.view import print_status

    try:
        state = commands.running(load(file).deployment.name)
    except (DeploymentError, commands.NotRunning) as error:
        raise fail(error) from None
    statuses = all_statuses(state)
    if as_json:
        print(json.dumps([rank.model_dump() for rank in statuses], indent=2))
    else:
        print_status(state, statuses)
    if any(rank.error or rank.failed for rank in statuses):
        raise typer.Exit(1)


@app.command()
def ask(
    file: File,
    prompt: Annotated[str, typer.Argument(help="what to ask", show_default=False)],
    max_tokens: Annotated[int, typer.Option(help="the longest answer", min=1)] = 32,
) -> None:
    """Send one prompt through the deployment's router and print the answer."""
    import httpx

    from ep_backend.deployment import commands
    from ep_backend.deployment.client import chat
    from ep_backend.deployment.load import load
    from ep_backend.deployment.problems import DeploymentError

    try:
        print(chat(commands.running(load(file).deployment.name), prompt, max_tokens))
    except (DeploymentError, commands.NotRunning) as error:
        raise fail(error) from None
    except httpx.HTTPError as error:
        raise fail(RuntimeError(f"no answer: {error}; `ep-backend status {file}` tells more")) from None


@app.command()
def demo(
    break_combine: Annotated[
        bool, typer.Option("--break-combine", help="corrupt combine's output, to show that the check catches it")
    ] = False,
) -> None:
    """Serve a small DeepSeek-V3 without a GPU, in all four modes, and compare every token with transformers."""
    from ep_backend.demo import run_demo

    raise typer.Exit(0 if run_demo(break_combine=break_combine) else 1)
