"""`ep-backend bench`: starts the ranks, prints a line a case and a table with targets at the end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ep_backend.bench import results
from ep_backend.bench.suites import SUITES, Case
from ep_backend.deployment.processes import signals_noted

SILENCE_S = 90.0  # longest that one case may take
GRACE_S = 30.0  # for the case under way when the time is up
STARTS = 6  # of the ranks, after cases that ended them

app = typer.Typer(add_completion=False)
console = Console(stderr=True, soft_wrap=True, width=None if sys.stderr.isatty() else 150)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(help="processes, one a GPU (more than GPUs: they share)")] = 0,
    suite: Annotated[str, typer.Option(help="cases: " + ", ".join(SUITES))] = "all",
    only: Annotated[str, typer.Option(help="names of the suite's cases, with commas between")] = "",
    fabric: Annotated[str, typer.Option(help="nvshmem or host")] = "nvshmem",
    rounds: Annotated[int, typer.Option(help="timed rounds a case", min=1)] = 200,
    sms: Annotated[int | None, typer.Option(help="most SMs of a kernel; default: the mode's own choice", min=1)] = None,
    seconds: Annotated[float, typer.Option(help="begin no case later; the most telling come first", min=1)] = 500.0,
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
    if suite not in SUITES:
        raise typer.BadParameter(f"{suite!r} is none of {', '.join(SUITES)}", param_hint="--suite")
    ranks = ranks or _gpus() or 2
    cases = _chosen(suite, only, ranks, sms)
    given = sys.argv[1:]
    facts = {
        "commit": commit or _commit(),
        "command": shlex.join(["ep-backend", "bench", *(given[1:] if given[:1] == ["bench"] else given)]),
    }
    options = {"fabric": fabric, "rounds": rounds, "profile": profile, "facts": facts}
    lines = run(ranks, options, cases, seconds, output)
    console.print(results.table([[line] for line in lines]))
    _print_failures(lines)
    if left := [c.name for c in cases if c.name not in {line["name"] for line in lines}]:
        console.print(f"no time was left for {', '.join(left)}")
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
    lines = [json.loads(text) for file in files for text in file.read_text(encoding="utf-8").splitlines()]
    groups = results.merge(lines)
    console.print(results.table(groups))
    _print_failures(lines)
    if markdown is not None:
        markdown.write_text(results.markdown(groups), encoding="utf-8")


def run(
    ranks: int, options: dict[str, Any], cases: list[Case], seconds: float, output: Path | None = None
) -> list[dict[str, Any]]:
    """Start the ranks with torchrun, and again without the case that ended them; every line, as it comes also to ``output``."""
    lines: list[dict[str, Any]] = []
    deadline = time.time() + seconds
    with tempfile.TemporaryDirectory() as folder:
        for start in range(STARTS):
            done = {line["name"] for line in lines}
            left = [c for c in cases if c.name not in done]
            if not left or time.time() > deadline:
                break
            file, log = Path(folder, f"{start}.jsonl"), Path(folder, f"{start}.log")
            asked = {**options, "cases": [c.as_dict() for c in left], "deadline": deadline, "results": str(file)}
            ended = _start(ranks, asked, file, log, lines, output)
            if ended is None:
                break
            if len(lines) == len(done):  # they ended without a word on the case
                text = f"{ended}: {_said_by_ranks(log.read_text(errors='replace'))[-1500:]}"
                _keep({**left[0].as_dict(), "ranks": ranks, "error": text, **options["facts"]}, lines, output)
    return lines


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
    with signals_noted(noted.append), log.open("wb") as said, file.open() as found:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=env)
        try:
            heard = time.time()
            while (ended := process.poll()) is None and not noted:
                if time.time() > min(heard + SILENCE_S, options["deadline"] + GRACE_S):
                    break
                time.sleep(0.1)
                *whole, rest = (rest + found.read()).split("\n")
                for one in whole:
                    heard = time.time()
                    _keep(json.loads(one), lines, output)
        finally:
            _stop(process)
        for one in (rest + found.read()).split("\n")[:-1]:
            _keep(json.loads(one), lines, output)
    if noted:
        raise typer.Exit(128 + noted[0])
    if ended is None:
        return None if time.time() > options["deadline"] else f"no result within {SILENCE_S:g} s"
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
        with output.open("a") as f:
            f.write(json.dumps(line) + "\n")
    else:
        print(json.dumps(line), flush=True)


def _print_failures(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if "error" in line:
            console.print(f"{line['name']}: {line['error']}", markup=False, highlight=False)


def _chosen(suite: str, only: str, ranks: int, sms: int | None) -> list[Case]:
    names = {c.name for c in SUITES[suite]}
    wanted = set(only.split(",")) if only else names
    if wrong := wanted - names:
        raise typer.BadParameter(f"{', '.join(sorted(wrong))}: none of {', '.join(sorted(names))}", param_hint="--only")
    cases = [replace(c, sms=sms) for c in SUITES[suite] if c.name in wanted and c.runs_on(ranks)]
    if not cases:
        raise typer.BadParameter(f"none of these cases runs on {ranks} ranks", param_hint="--only")
    return cases


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


if __name__ == "__main__":
    app()
