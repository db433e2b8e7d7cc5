"""`ep-backend bench`: starts the ranks, prints one JSON line a case and a table at the end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ep_backend.bench.suites import SUITES

app = typer.Typer(add_completion=False)
console = Console(stderr=True)


@app.callback(invoke_without_command=True)
def bench(
    ranks: Annotated[int, typer.Option(help="processes, one a GPU (more than GPUs: they share)")] = 0,
    suite: Annotated[str, typer.Option(help="cases: " + ", ".join(SUITES))] = "all",
    fabric: Annotated[str, typer.Option(help="nvshmem or host")] = "nvshmem",
    rounds: Annotated[int, typer.Option(help="timed rounds a case")] = 200,
    output: Annotated[Path | None, typer.Option(help="append the JSON lines to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="write a bar chart of the medians (needs matplotlib)")] = None,
) -> None:
    """Time dispatch and combine from all inputs ready to all outputs ready, and check the results on the timed buffers."""
    if suite not in SUITES:
        raise typer.BadParameter(f"{suite!r} is none of {', '.join(SUITES)}", param_hint="--suite")
    lines = run(ranks or _gpus() or 2, {"fabric": fabric, "suite": suite, "rounds": rounds})
    if output is not None:
        with output.open("a") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
    console.print(table(lines))
    if plot is not None:
        draw(lines, plot)


def run(ranks: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Start the ranks with torchrun; their JSON lines, which also go to standard output."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *("-m", "ep_backend.bench.worker", json.dumps(options)),
    ]
    lines = []
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("{"):
                lines.append(json.loads(text))
                sys.stdout.write(text)
                sys.stdout.flush()
            else:
                sys.stderr.write(text)
    if process.returncode != 0:
        raise typer.Exit(process.returncode)
    return lines


def table(lines: list[dict[str, Any]]) -> Table:
    """Medians and tails in microseconds, remote GB/s and the ceiling of the same run."""
    result = Table("case", "ranks", "dispatch p50", "p99", "GB/s", "combine p50", "p99", "GB/s", "ceiling")
    for line in lines:
        cells = [f"{line[op][key]:g}" for op in ("dispatch", "combine") for key in ("p50_us", "p99_us", "remote_gb_s")]
        result.add_row(line["name"], str(line["ranks"]), *cells, f"{line.get('ceiling_gb_s') or 0:g}")
    return result


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Medians by case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(lines) + 1.5))
    places = range(len(lines))
    for shift, op in ((-0.2, "dispatch"), (0.2, "combine")):
        axes.barh([p + shift for p in places], [line[op]["p50_us"] for line in lines], 0.4, label=op)
    axes.set_yticks(list(places), [line["name"] for line in lines])
    axes.set_xlabel("median of the slowest rank, microseconds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def _gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


if __name__ == "__main__":
    app()
