"""up, down, ask and status, as the command line and the demo use them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from ep_backend.deployment.checks import check_startable
from ep_backend.deployment.lint import lint
from ep_backend.deployment.lint.texts import rules
from ep_backend.deployment.load import Loaded, load
from ep_backend.deployment.problems import DeploymentError
from ep_backend.deployment.processes import session_members, shared_memory_of, signals_noted, start_ticks, stop_sessions
from ep_backend.deployment.state import RunState, read_state, remove_state, run_dir, state_file
from ep_backend.deployment.supervisor import Supervisor
from ep_backend.deployment.view import Progress

POLL_S = 0.2


class NotRunning(Exception):
    """The deployment that a command is for does not run."""


class Interrupted(Exception):
    """A signal came before the deployment served; what had been started is stopped."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} came before {name} served; it is stopped")
        self.number = number


def up(file: Path, console: Console) -> None:
    """Runs the deployment until ctrl-C. Raises DeploymentError before loading, InstanceFailed after."""
    loaded = load(file)
    state = read_state(loaded.deployment.name)
    if state is not None and state.phase != "failed":
        lives = _supervised(state)
        what = f"runs already (process {state.pid})" if lives else f"lost its supervisor (process {state.pid})"
        raise DeploymentError([f"{state.name} {what}; `ep-backend down {file}` {'stops it' if lives else 'cleans up'}"])
    if problems := check_startable(loaded.deployment):
        raise loaded.error(problems)
    _print_doubts(loaded, console)
    with Progress(console) as progress:
        Supervisor(loaded, progress.update).run()


def up_detached(file: Path, console: Console) -> RunState:
    """Starts the deployment in the background and returns once it serves. Raises as `up` does, and Interrupted."""
    loaded = load(file)
    deployment = loaded.deployment
    _print_doubts(loaded, console)
    folder = run_dir(deployment.name)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "up.log"
    noted: list[int] = []
    with signals_noted(noted.append):
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "ep_backend", "up", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            with Progress(console) as progress:
                while child.poll() is None:
                    if noted:
                        raise Interrupted(deployment.name, noted[0])
                    state = read_state(deployment.name)
                    if state is not None and state.pid == child.pid:
                        progress.update(state)
                        if state.phase == "ready":
                            return state
                    time.sleep(POLL_S)
        except BaseException:
            child.send_signal(signal.SIGTERM)
            limit = deployment.target.stop_timeout_s + 15.0
            try:
                child.wait(limit)
            except subprocess.TimeoutExpired:
                what = f"{deployment.name} (process {child.pid}) did not stop in {limit:g} s; `ep-backend down {file}` does it"
                raise DeploymentError([what]) from None
            raise
    state = read_state(deployment.name)
    if state is not None and state.pid == child.pid and state.error is not None:
        raise DeploymentError([state.error])
    raise DeploymentError([log.read_text(errors="replace").strip() or f"up ended with status {child.returncode}"])


def _print_doubts(loaded: Loaded, console: Console) -> None:
    """What lint says of a file that has no error of its own; the engine may refuse it, or it may be slow."""
    for finding in loaded.findings(lint(loaded.deployment)):
        severity = rules()[finding.problem.code].severity
        console.print(f"{severity}: {finding}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def down(name: str) -> bool:
    """Stops a deployment, also one whose supervisor was killed. False if none ran."""
    state = read_state(name)
    if state is None:
        return False
    leaders = [instance.pid for instance in state.instances]
    if _supervised(state):
        os.kill(state.pid, signal.SIGTERM)
        deadline = time.monotonic() + 60.0
        while _supervised(state) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    stop_sessions(leaders, shared_memory_of(session_members(leaders)), grace_s=20.0)
    remove_state(name)
    return True


def not_here(name: str) -> str:
    """Why a deployment that runs may not be found."""
    return f"there is no {state_file(name)}; one is known in the folder where it was started"


def running(name: str) -> RunState:
    state = read_state(name)
    if state is None:
        raise NotRunning(f"deployment {name} does not run ({not_here(name)}); start it with `ep-backend up FILE`")
    if state.phase == "failed":
        raise NotRunning(f"deployment {name} failed: {state.error}")
    if not _supervised(state):
        raise NotRunning(f"deployment {name} lost its supervisor (process {state.pid}); `ep-backend down FILE` cleans up")
    return state


def _supervised(state: RunState) -> bool:
    """Does the process that started the deployment still run?"""
    return start_ticks(state.pid) == state.start_ticks
