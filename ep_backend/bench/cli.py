"""`ep-backend bench`: starts the ranks, prints a line a case and a table with targets at the end."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ep_backend.bench import origin, results
from ep_backend.bench.suites import SUITES, Case
from ep_backend.deployment.processes import signals_noted

SILENCE_S = 90.0  # longest that one case may take
GRACE_S = 30.0  # for the case under way when the time is up
STARTS = 6  # of the ranks, after cases that ended them
FABRICS = ("nvshmem", "host")
CHARTS = (".png", ".svg", ".pdf")

app = typer.Typer(add_completion=False)
console = Console(stderr=True, soft_wrap=True, width=None if sys.stderr.isatty() else 150)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    ranks: Annotated[
        int | None, typer.Option(help="processes, one a GPU (more than GPUs: they share); default: the GPUs, or 2")
    ] = None,
    suite: Annotated[str, typer.Option(help="cases: " + ", ".join(SUITES))] = "all",
    only: Annotated[str, typer.Option(help="names of the suite's cases, with commas between")] = "",
    fabric: Annotated[str, typer.Option(help=" or ".join(FABRICS))] = FABRICS[0],
    rounds: Annotated[int, typer.Option(help="timed rounds a case")] = 200,
    sms: Annotated[int | None, typer.Option(help="most SMs of a kernel; default: the mode's own choice")] = None,
    seconds: Annotated[float, typer.Option(help="begin no case later; the most telling come first")] = 500.0,
    profile: Annotated[bool, typer.Option("--profile", help="also time each kernel; that disturbs later cases")] = False,
    commit: Annotated[str, typer.Option(help="of this code, where there is no git to ask")] = "",
    output: Annotated[Path | None, typer.Option(help="append the JSON lines to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="write a bar chart of the medians (needs matplotlib)")] = None,
) -> None:
    """Time dispatch and combine from all inputs ready to all outputs ready, and check the results on the timed buffers.

    A case that fails is a line with its error; exit status 1 says that there is one.
    """
    if context.invoked_subcommand is not None:
        return
    for option, value in (("--ranks", ranks), ("--rounds", rounds), ("--sms", sms), ("--seconds", seconds)):
        if value is not None and not value >= 1:
            raise _refused(f"{option} {value:g}: give at least 1")
    if fabric not in FABRICS:
        raise _refused(f"--fabric {fabric}: there is no such fabric; choose {' or '.join(FABRICS)}")
    named = _named(suite, only)
    if plot is not None:
        _check_plot(plot)
    gpus = _gpus()
    if fabric == "nvshmem" and not gpus:
        raise _refused("--fabric nvshmem: there is no CUDA device here; use --fabric host")
    ranks = ranks or gpus or 2
    cases = [replace(c, sms=sms) for c in _runnable(named, ranks)]
    for option, file in (("--output", output), ("--plot", plot)):
        if file is not None:
            _check_writable(option, file)
    if output is not None:
        _end_cut_line(output)
    given = sys.argv[1:]
    facts = {
        "commit": commit or origin.commit(),
        "command": shlex.join(["ep-backend", "bench", *(given[1:] if given[:1] == ["bench"] else given)]),
    }
    options = {"fabric": fabric, "rounds": rounds, "profile": profile, "facts": facts}
    lines, stopped = run(ranks, options, cases, seconds, output)
    console.print(results.table([[line] for line in lines]))
    _print_failures(lines)
    if left := [c.name for c in cases if c.name not in {line["name"] for line in lines}]:
        console.print(f"{stopped} {', '.join(left)}", markup=False, highlight=False)
    if not lines:
        raise _refused(f"--seconds {seconds:g}: nothing was measured before they were over; give more", 1)
    if plot is not None:
        results.draw(lines, plot)
    if any("error" in line for line in lines):
        raise typer.Exit(1)


@app.command("table")
def several_starts(
    files: Annotated[list[Path], typer.Argument(help="files of JSON lines, one or more starts in each", show_default=False)],
    markdown: Annotated[Path | None, typer.Option(help="write the table there in Markdown")] = None,
) -> None:
    """Merge process starts into one table: the median of the medians, their range, target and verdict."""
    from ep_backend.bench.reading import read

    lines = []
    for file in files:
        try:
            found, notes = read(file)
        except ValueError as error:
            raise _refused(str(error)) from None
        lines += found
        for note in notes:
            console.print(note, markup=False, highlight=False)
    groups = results.merge(lines)
    console.print(results.table(groups))
    _print_failures(lines)
    if markdown is not None:
        _check_writable("--markdown", markdown)
        markdown.write_text(results.markdown(groups), encoding="utf-8")


def run(
    ranks: int, options: dict[str, Any], cases: list[Case], seconds: float, output: Path | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Start the ranks with torchrun, and again without the case that ended them.

    Every line, as it comes also to ``output``, and what to say of cases that have none.
    """
    lines: list[dict[str, Any]] = []
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        for start in range(STARTS):
            done = {line["name"] for line in lines}
            left = [c for c in cases if c.name not in done]
            if not left or time.monotonic() > deadline:
                return lines, "no time was left for"
            file, log = Path(folder, f"{start}.jsonl"), Path(folder, f"{start}.log")
            asked = {**options, "cases": [c.as_dict() for c in left], "deadline": deadline, "results": str(file)}
            ended = _start(ranks, asked, file, log, lines, output)
            if ended is None:
                return lines, "no time was left for"
            if len(lines) == len(done):  # they ended without a word on the case
                text = f"{ended}: {_said_by_ranks(log.read_text(errors='replace'))[-1500:]}"
                if not start and not file.stat().st_size:
                    raise _refused(f"no case can begin: {text}", 1)
                _keep({**left[0].as_dict(), "ranks": ranks, "error": text, **options["facts"]}, lines, output)
    return lines, f"the ranks ended {STARTS} times and were not started again for"


def _said_by_ranks(log: str) -> str:
    """Without what torchrun adds about a rank that failed."""
    return log.partition("failed (exitcode")[0]


def _start(
    ranks: int, options: dict[str, Any], file: Path, log: Path, lines: list[dict[str, Any]], output: Path | None
) -> str | None:
    """One start. None if the ranks went through their cases or ran out of time, else how they ended."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *("-m", "ep_backend.bench.worker", json.dumps(options)),
    ]
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    file.touch()
    rest = ""  # of a line that is not whole yet
    noted: list[int] = []

    def keep(whole: list[str]) -> None:
        for one in filter(None, whole):
            _keep(json.loads(one), lines, output)

    with signals_noted(noted.append), log.open("wb") as said, file.open() as found:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=env)
        try:
            heard = time.monotonic()
            while (ended := process.poll()) is None and not noted:
                if time.monotonic() > min(heard + SILENCE_S, options["deadline"] + GRACE_S):
                    break
                time.sleep(0.1)
                *whole, rest = (rest + found.read()).split("\n")
                if whole:
                    heard = time.monotonic()
                keep(whole)
        finally:
            _stop(process)
        keep((rest + found.read()).split("\n")[:-1])
    if noted:
        raise typer.Exit(128 + noted[0])
    if ended is None:
        return None if time.monotonic() > options["deadline"] else f"no result within {SILENCE_S:g} s"
    return f"the ranks ended with status {ended}" if ended else None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """torchrun stops its ranks; should it not, they end with it."""
    process.terminate()
    try:
        process.wait(40.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _keep(line: dict[str, Any], lines: list[dict[str, Any]], output: Path | None) -> None:
    lines.append(line)
    if output is not None:
        try:
            with output.open("a") as f:
                f.write(json.dumps(line) + "\n")
        except OSError as error:
            raise _unwritable("--output", output, error, 1) from None
    else:
        print(json.dumps(line), flush=True)


def _print_failures(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if "error" in line:
            console.print(f"{line['name']}: {line['error']}", markup=False, highlight=False)


def _refused(text: str, status: int = 2) -> typer.Exit:
    print(f"ep-backend: {text}", file=sys.stderr)
    return typer.Exit(status)


def _named(suite: str, only: str) -> list[Case]:
    if suite not in SUITES:
        raise _refused(f"--suite {suite}: there is no such suite; choose {', '.join(SUITES)}")
    names = [c.name for c in SUITES[suite]]
    wanted = {name.strip() for name in only.split(",") if name.strip()}
    if wrong := sorted(wanted - set(names)):
        raise _refused(f"--only {', '.join(wrong)}: not in suite {suite}; it has {', '.join(names)}")
    return [c for c in SUITES[suite] if not wanted or c.name in wanted]


def _runnable(cases: list[Case], ranks: int) -> list[Case]:
    """Those that run on so many ranks; says why others do not."""
    found = [c for c in cases if c.hindrance(ranks) is None]
    hindered: dict[str, list[str]] = {}
    for case in cases:
        if why := case.hindrance(ranks):
            hindered.setdefault(why, []).append(case.name)
    if not found:
        raise _refused(f"--ranks {ranks}: no case runs, because {'; '.join(hindered)}; choose another number")
    for why, names in hindered.items():
        console.print(f"left out, because {why}: {', '.join(names)}", markup=False, highlight=False)
    return found


def _check_plot(file: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise _refused(f"--plot {file}: charts need matplotlib; install ep-backend[plot], or leave --plot out")
    if file.suffix.lower() not in CHARTS:
        raise _refused(f"--plot {file}: the chart's format follows from the file's ending; choose {', '.join(CHARTS)}")


def _check_writable(option: str, file: Path) -> None:
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        raise _unwritable(option, file, error) from None


def _end_cut_line(file: Path) -> None:
    """An interrupted run may have left one, and the next line must not become part of it."""
    if not file.is_file() or not file.stat().st_size:
        return
    with file.open("rb+") as f:
        f.seek(-1, os.SEEK_END)
        if f.read() != b"\n":
            f.write(b"\n")


def _unwritable(option: str, file: Path, error: OSError, status: int = 2) -> typer.Exit:
    return _refused(f"{option} {file}: it cannot be written ({error.strerror}); choose another file", status)


def _gpus() -> int:
    """As the ranks will see them."""
    try:
        import torch
    except ImportError as error:
        raise _refused(f"the bench needs PyTorch, which does not import here ({error}); install torch") from None
    return torch.cuda.device_count()


if __name__ == "__main__":
    app()
