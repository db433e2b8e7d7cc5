"""up, down, ask and status, as the command line and the demo use them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from io import BufferedWriter
from pathlib import Path

from rich.console import Console

from ep_backend.deployment.checks import check_startable
from ep_backend.deployment.claim import claimant, claimed, launches_in
from ep_backend.deployment.lint import lint
from ep_backend.deployment.lint.texts import rules
from ep_backend.deployment.load import Loaded, load
from ep_backend.deployment.problems import DeploymentError
from ep_backend.deployment.processes import (
    ended_as,
    session_members,
    shared_memory_of,
    signals_noted,
    start_ticks,
    stop_sessions,
)
from ep_backend.deployment.schema import STOP_TIMEOUT_S
from ep_backend.deployment.spelling import call
from ep_backend.deployment.state import RunState, StateUnreadable, read_state, remove_state, run_dir, state_file, unusable
from ep_backend.deployment.supervisor import Supervisor
from ep_backend.deployment.view import Progress

POLL_S = 0.2
ENDING_S = 30.0
STOPPING_S = 40.0  # of a supervisor, on top of what it gives its launches


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
    name = loaded.deployment.name
    _let_a_failed_one_end(name)
    with claimed(run_dir(name)) as mine:
        if not mine:
            _refuse_a_second(name, file)
            raise DeploymentError([f"{name} is being started or stopped by another `ep-backend up`; try again"])
        _refuse_remains(name, file)
        if problems := check_startable(loaded.deployment):
            raise loaded.error(problems)
        _print_doubts(loaded, console)
        with Progress(console) as progress:
            Supervisor(loaded, progress.update).run()


def up_detached(file: Path, console: Console) -> RunState:
    """Starts the deployment in the background and returns once it serves. Raises as `up` does, and Interrupted."""
    loaded = load(file)
    name = loaded.deployment.name
    _let_a_failed_one_end(name)
    _refuse_a_second(name, file)
    _refuse_remains(name, file)
    _print_doubts(loaded, console)
    folder = run_dir(name)
    # Until what is started here has the claim, up.log is another's.
    draft = folder / f"up.{os.getpid()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        output = draft.open("wb")
    except OSError as error:
        raise unusable(draft, error) from None
    try:
        with output:
            return _start_detached(loaded, console, output)
    finally:
        draft.unlink(missing_ok=True)


def _start_detached(loaded: Loaded, console: Console, output: BufferedWriter) -> RunState:
    deployment, file = loaded.deployment, loaded.file
    draft = Path(output.name)
    noted: list[int] = []

    def state_of_child() -> RunState | None:
        state = read_state(deployment.name)
        if state is None or state.pid != child.pid:
            return None
        if draft.exists():
            draft.replace(draft.with_name("up.log"))
        return state

    with signals_noted(noted.append):
        child = subprocess.Popen(
            [sys.executable, "-m", "ep_backend", "up", "--", str(file)],
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
                    if state := state_of_child():
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
                what = f"{deployment.name} (process {child.pid}) did not stop in {limit:g} s; `{call('down', file)}` does it"
                raise DeploymentError([what]) from None
            raise
    if (state := state_of_child()) and state.error is not None:
        raise DeploymentError([state.error])
    if child.returncode == 0:
        raise DeploymentError([f"{deployment.name} was stopped before it served, by `ep-backend down` or a signal"])
    said = draft.read_text(errors="replace").strip() if draft.exists() else ""
    raise DeploymentError([said or f"{deployment.name} {ended_as(child.returncode)} before it served"])


def _let_a_failed_one_end(name: str) -> None:
    """A deployment's state says that it failed before its process has ended."""
    deadline = time.monotonic() + ENDING_S
    while (state := read_state(name)) and state.phase == "failed" and _supervised(state) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _refuse_a_second(name: str, file: Path) -> None:
    """DeploymentError if the deployment runs already."""
    state = read_state(name)
    pid = state.pid if state is not None and _supervised(state) else claimant(run_dir(name))
    if pid is not None:
        raise DeploymentError([f"{name} runs already (process {pid}); `{call('down', file)}` stops it"])


def _refuse_remains(name: str, file: Path) -> None:
    """DeploymentError if the deployment's supervisor was killed: what that left must be cleaned up first."""
    state = read_state(name)
    if state is not None and state.phase != "failed":
        raise DeploymentError([f"{name} lost its supervisor (process {state.pid}); `{call('down', file)}` cleans up"])


def _print_doubts(loaded: Loaded, console: Console) -> None:
    """What lint says of a file that has no error of its own; the engine may refuse it, or it may be slow."""
    for finding in loaded.findings(lint(loaded.deployment)):
        severity = rules()[finding.problem.code].severity
        console.print(f"{severity}: {finding}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def down(name: str) -> bool:
    """Stops a deployment, also one whose supervisor was killed, or whose state is garbage or gone. False if none ran."""
    folder = run_dir(name)
    try:
        state, readable = read_state(name), True
    except StateUnreadable:
        state, readable = None, False
    if state is None:
        supervisor, leaders, grace_s = claimant(folder), launches_in(folder), STOP_TIMEOUT_S
        if readable and supervisor is None and not leaders:
            return False
    else:
        supervisor, grace_s = state.pid if _supervised(state) else None, state.stop_timeout_s
        # Of a launch whose first process is gone, others may be left; its number is free again only after them.
        leaders = {each.pid for each in state.instances if start_ticks(each.pid) in (each.start_ticks, None)}
    if supervisor is not None and (started := start_ticks(supervisor)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGTERM)
        deadline = time.monotonic() + grace_s + STOPPING_S
        while start_ticks(supervisor) == started and time.monotonic() < deadline:
            time.sleep(POLL_S)
    stop_sessions(leaders, shared_memory_of(session_members(leaders)), grace_s)
    remove_state(name)
    return True


def not_here(name: str) -> str:
    """Why a deployment that runs may not be found."""
    return f"there is no {state_file(name)}; one is known in the folder where it was started"


def running(name: str) -> RunState:
    state = read_state(name)
    if state is None and (pid := claimant(run_dir(name))) is not None:
        what = f"deployment {name} (process {pid}) has not started yet, or lost its {state_file(name)}"
        raise NotRunning(f"{what}; try again, or stop it with `ep-backend down FILE`")
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
