"""The commands; each is a thin front to the module that does the work."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ep_backend.bench import cli as bench
from ep_backend.cli import doctor, modes, planning, rendering
from ep_backend.cli.output import guarded_output
from ep_backend.config import MAX_COUNT

app = typer.Typer(
    help="Expert-parallel all-to-all for vLLM and SGLang: deployments, checks and a demo that needs no GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

File = Annotated[Path, typer.Argument(help="the deployment file", show_default=False)]


planning.register(app)
modes.register(app)
rendering.register(app)
doctor.register(app)
app.add_typer(bench.app, name="bench")


def main() -> None:
    with guarded_output():
        app()


def fail(error: Exception) -> typer.Exit:
    print(f"ep-backend: {str(error).removeprefix('ep-backend: ')}", file=sys.stderr)
    return typer.Exit(1)


@app.command()
def checkpoint(
    # No Path, which would take an empty word for the current folder.
    out: Annotated[str, typer.Argument(help="the folder to write: new, empty, or of an earlier run", show_default=False)],
    seed: Annotated[int, typer.Option(help="the same seed writes the same bytes", min=0)] = 0,
    model: Annotated[
        Literal["deepseek-v3", "qwen3-moe", "deepseek-v3-100m", "deepseek-v3-shape", "deepseek-v3-shape-fp8"],
        typer.Option(help="qwen3-moe: for SGLang on a CPU; 100m: for GPUs; shapes have no weights: --load-format dummy"),
    ] = "deepseek-v3",
) -> None:
    """Write a small random checkpoint with tokenizer and chat template."""
    from ep_backend.checkpoint import FolderRefused, write_checkpoint, write_shape

    try:
        if not out:
            raise FolderRefused("OUT is empty, must name a folder; `.` is the current one")
        if model == "deepseek-v3-shape" or model == "deepseek-v3-shape-fp8":
            write_shape(Path(out), model)
            facts = "without weights"
        else:
            facts = f"{write_checkpoint(Path(out), seed, model) / 1e6:.2f} M parameters, seed {seed}"
    except FolderRefused as error:
        raise fail(error) from None
    except OSError as error:
        raise fail(OSError(f"{out} cannot be written: {error.strerror}; choose another folder")) from None
    print(f"{out}: {model}, {facts}")


@app.command()
def up(
    file: File,
    detach: Annotated[bool, typer.Option("--detach", help="return once it serves; `down` stops it")] = False,
) -> None:
    """Start a deployment on this machine and serve until ctrl-C."""
    from ep_backend.console import make_console
    from ep_backend.deployment import commands
    from ep_backend.deployment.problems import DeploymentError
    from ep_backend.deployment.supervisor import InstanceFailed

    console = make_console()
    try:
        if detach:
            commands.up_detached(file, console)
        else:
            commands.up(file, console)
    except (DeploymentError, InstanceFailed, OSError) as error:
        raise fail(error) from None
    except commands.Interrupted as error:
        fail(error)
        raise typer.Exit(128 + error.number) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def down(file: File) -> None:
    """Stop a deployment and remove what it left in shared memory."""
    from ep_backend.deployment import commands
    from ep_backend.deployment.load import name_in
    from ep_backend.deployment.problems import DeploymentError

    try:
        name = name_in(file)
        stopped = commands.down(name)
    except DeploymentError as error:
        raise fail(error) from None
    print(f"{name} is down" if stopped else f"{name} was not running: {commands.not_here(name)}")


@app.command()
def status(
    file: File,
    as_json: Annotated[bool, typer.Option("--json", help="the control service's answer as JSON; see docs/json.md")] = False,
) -> None:
    """Show what every rank's buffer did: the mode desired and executed, calls, records and bytes per path.

    Exit status 1 if a rank failed, does not answer, or is stopped.
    """
    from ep_backend.control.client import ControlClient, ControlFailed
    from ep_backend.control.ranks import silence
    from ep_backend.deployment import commands
    from ep_backend.deployment.load import name_in
    from ep_backend.deployment.problems import DeploymentError
    from ep_backend.deployment.view import print_status

    try:
        state = commands.running(name_in(file))
        with ControlClient(state) as control:
            now = control.status()
    except (DeploymentError, commands.NotRunning, ControlFailed) as error:
        raise fail(error) from None
    if as_json:
        print(now.model_dump_json(indent=2))
    else:
        print_status(now, state.control_url or "")
    ranks = [rank for role in now.roles if role.role not in now.starting for rank in role.ranks]
    if any(rank.error or rank.failed or silence(rank) for rank in ranks):
        raise typer.Exit(1)


@app.command()
def flip(
    file: File,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would happen; change nothing")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="restart roles where a change needs it")] = False,
) -> None:
    """Make a running deployment what its edited file says: modes at run time, other changes by restarting roles."""
    from ep_backend.control.client import ControlClient, ControlFailed
    from ep_backend.deployment import commands
    from ep_backend.deployment.load import load
    from ep_backend.deployment.problems import DeploymentError
    from ep_backend.deployment.spelling import call
    from ep_backend.deployment.view import print_applied

    try:
        wanted = load(file)
        with ControlClient(commands.running(wanted.deployment.name)) as control:
            applied = control.apply(wanted, dry_run=dry_run, restart=restart)
    except (DeploymentError, commands.NotRunning, ControlFailed) as error:
        raise fail(error) from None
    except KeyboardInterrupt:
        fail(RuntimeError(f"no longer waiting; what was asked for goes on, and `{call('status', file)}` follows it"))
        raise typer.Exit(130) from None
    print_applied(applied)


@app.command()
def ask(
    file: File,
    prompt: Annotated[str, typer.Argument(help="what to ask", show_default=False)],
    max_tokens: Annotated[int, typer.Option(help="the longest answer", min=1, max=MAX_COUNT)] = 32,
) -> None:
    """Send one prompt through the deployment's router and print the answer."""
    from ep_backend.control.client import ControlClient, ControlFailed
    from ep_backend.deployment import commands
    from ep_backend.deployment.load import name_in
    from ep_backend.deployment.problems import DeploymentError
    from ep_backend.deployment.spelling import call

    try:
        with ControlClient(commands.running(name_in(file))) as control:
            print(control.ask(prompt, max_tokens))
    except ControlFailed as error:
        raise fail(RuntimeError(f"no answer: {error}; `{call('status', file)}` tells more")) from None
    except (DeploymentError, commands.NotRunning) as error:
        raise fail(error) from None


@app.command()
def demo(
    break_combine: Annotated[
        bool, typer.Option("--break-combine", help="corrupt combine's output, to show that the check catches it")
    ] = False,
) -> None:
    """Serve a small DeepSeek-V3 without a GPU, in all four modes, and compare every token with transformers."""
    from ep_backend.demo import run_demo

    raise typer.Exit(0 if run_demo(break_combine=break_combine) else 1)
