"""What `up` and `status` print."""

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from ep_backend.console import make_console
from ep_backend.control.models import Applied, DeploymentStatus, RoleStatus
from ep_backend.deployment.logs import last_line
from ep_backend.deployment.rank_status import ModeCounters, RankStatus
from ep_backend.deployment.schema import serves_both_families
from ep_backend.deployment.state import RunState, seconds_since
from ep_backend.modes import Mode
from ep_backend.stats import PATHS

NOTE_WIDTH = 70


class Progress:
    """Follows a deployment on a console: a live table on a terminal, a line a change elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, refresh_per_second=4, transient=True)
        self.said: set[str] = set()

    def __enter__(self) -> "Progress":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.live.stop()

    def update(self, state: RunState) -> None:
        for instance in state.instances:
            self._say(f"{instance.name}: starting, log {instance.log}")
            if instance.ready_after_s is not None:
                self._say(f"{instance.name}: serves after {instance.ready_after_s:.0f} s")
        if state.phase == "ready":
            self._say(f"{state.name} is ready at {state.url} after {seconds_since(state.started_at):.0f} s")
            self.live.stop()
        elif state.phase == "stopping":
            self._say("stopping")
            self.live.stop()
        elif self.live.is_started:
            self.live.update(_loading(state))

    def _say(self, text: str) -> None:
        key = text.partition(" after ")[0]
        if key not in self.said:
            self.said.add(key)
            self.console.print(escape(text), highlight=False, soft_wrap=True)


def _loading(state: RunState) -> Table:
    table = Table.grid(padding=(0, 2))
    for instance in state.instances:
        if instance.ready_after_s is None:
            elapsed = f"{seconds_since(state.started_at):.0f} s"
            table.add_row(Spinner("dots", instance.name), elapsed, escape(last_line(instance.log)[:NOTE_WIDTH]))
    return table


def counters_table(title: str, rows: list[tuple[RankStatus, str, ModeCounters]]) -> Table:
    """One row a rank and mode: calls, then records and bytes of each path."""
    table = Table(title=title, title_justify="left")
    for heading in ("role", "rank", "mode", "dispatches", "combines", *(path.replace("_", "-") for path in PATHS)):
        table.add_column(heading, justify="left" if heading in ("role", "mode") else "right")
    for status, mode, counters in rows:
        paths = [_amount(counters.records.get(path, 0), counters.bytes.get(path, 0)) for path in PATHS]
        table.add_row(
            *[status.role or "?", f"{status.rank}/{status.world_size}", mode],
            *[str(counters.dispatches), str(counters.combines), *paths],
        )
    table.caption = "per path: records, bytes"
    return table


def _amount(records: int, size: int) -> str:
    return f"{records:,}  {human_bytes(size)}" if records else "0"


def human_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def modes_in_words(role: RoleStatus) -> str:
    """Desired and executed; of a role that serves both families, the last batch may have been of the other one."""
    desired, executed = role.mode_desired, role.mode_executed
    words = f"mode {desired}, executed {executed or 'none, or not the same on all ranks'}"
    if not executed or desired == "auto" or not serves_both_families(role.role, role.engine):
        return words
    family = Mode(executed).spec.family
    other = family is not Mode(desired).spec.family
    return words + (f" last, for a batch of {family.value}, which {desired} is not for" if other else "")


def print_status(now: DeploymentStatus, control_url: str) -> None:
    console = make_console()

    def say(line: str, style: str | None = None) -> None:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)

    say(f"{now.name}: {now.phase} at {now.url}, control service at {control_url}")
    for instance in now.instances:
        say(f"  {instance.name}: process {instance.pid}, log {instance.log}")
        if instance.starting_s is not None:
            doing = last_line(instance.log)[:NOTE_WIDTH] or "nothing logged yet"
            say(f"  {instance.name}: starting for {instance.starting_s:.0f} s: {doing}", "yellow")
    rows = []
    for role in now.roles:
        if role.role in now.starting:
            continue
        say(f"  {role.role}: {modes_in_words(role)}")
        if role.pending:
            say(f"  {role.role}: a change to {role.pending.mode} is pending", "yellow")
        for line in role.drift:
            say(f"  {role.role}: {line}", "yellow")
        for status in role.ranks:
            if status.failed:
                say(f"  {status.agent}: {status.failed}", "red")
            rows += [(status, _marked(mode, status), counters) for mode, counters in status.modes.items()]
    for change in now.drift:
        say(f"  the file differs: {change}", "yellow")
    if now.file_error:
        say(f"  the file cannot be compared: {now.file_error}", "yellow")
    if rows:
        console.print(counters_table("counters since start; * marks the mode executed last", rows))


def print_applied(applied: Applied) -> None:
    console = make_console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    if not applied.changes:
        say("the file says what runs; nothing to do")
    for change in applied.changes:
        say(str(change))
    for flip in applied.flips:
        epoch = f" after epoch {flip.epoch} on {flip.ranks} ranks, {flip.seconds:.2f} s" if flip.epoch else ""
        say(f"{flip.role}: {flip.before} -> {flip.mode}: {flip.outcome}{epoch}")
    for role in applied.restarted:
        say(f"{role}: restarted")
    if applied.dry_run:
        say("dry run: nothing was changed")


def _marked(mode: str, status: RankStatus) -> str:
    return f"{mode} *" if mode == status.mode_executed else mode
