"""The main job without a GPU, end to end: a small DeepSeek-V3, served by a real engine through each of the four modes."""

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from ruamel.yaml import YAML

from ep_backend.checkpoint import write_checkpoint
from ep_backend.console import make_console
from ep_backend.control.client import ControlClient, ControlFailed
from ep_backend.deployment.agents import rank_statuses
from ep_backend.deployment.client import TIMEOUT_S, stream
from ep_backend.deployment.commands import Interrupted, down, up_detached
from ep_backend.deployment.load import load
from ep_backend.deployment.problems import DeploymentError
from ep_backend.deployment.processes import free_ports
from ep_backend.deployment.rank_status import ModeCounters, RankStatus
from ep_backend.deployment.state import InstanceState, RunState, unusable
from ep_backend.deployment.view import counters_table
from ep_backend.modes import Mode
from ep_backend.reference import greedy_reference
from ep_backend.stats import PATHS

PRESET = Path(__file__).parents[1] / "deploy" / "local-cpu.yaml"
NAME = "demo"
ROUNDS = (("direct", "low_latency"), ("normal", "hybrid"))
PROMPTS, SHORTEST, LONGEST = 16, 17, 200
NEW_TOKENS = 32
AT_ONCE = 8
READINGS = 100  # of ranks at work, at most


@dataclass(frozen=True)
class Round:
    """What one pair of modes gave."""

    prefill: str
    decode: str
    answers: list[list[int]]
    seconds: float
    deltas: list[tuple[RankStatus, str, ModeCounters]]
    silent: list[str]


def run_demo(break_combine: bool) -> bool:
    """True if every token of every round is the reference's and every rank's counters moved."""
    started = time.monotonic()
    console = make_console()
    folder = Path.cwd() / ".ep" / NAME
    checkpoint = folder / "checkpoint"
    try:
        if checkpoint.exists():  # an earlier version's may be unknown to this one
            shutil.rmtree(checkpoint)
        parameters = write_checkpoint(checkpoint)
    except OSError as error:
        _say(console, f"failed: {unusable(checkpoint, error)}")
        return False
    _say(console, f"wrote {checkpoint}: DeepseekV3ForCausalLM, {parameters / 1e6:.1f} M random parameters, seed 0")
    prompts = make_prompts()
    with _bar(console, "reference: transformers, float32, greedy", len(prompts)) as advance:
        reference = greedy_reference(checkpoint, prompts, NEW_TOKENS, advance)
    _say(
        console, f"reference has {PROMPTS} x {NEW_TOKENS} tokens; the closest two logits are {reference.least_margin:.4f} apart"
    )
    rounds = []
    try:
        with _taken_down():
            (prefill, decode), *later = ROUNDS[:1] if break_combine else ROUNDS
            file = write_deployment(folder, checkpoint, prefill, decode, break_combine)
            _say(console, f"up {file}: prefill {prefill}, decode {decode}, two ranks each")
            state = up_detached(file, console)
            rounds.append(_run_round(console, state, prompts, prefill, decode))
            for prefill, decode in later:
                rounds.append(_run_round(console, state, prompts, prefill, decode, flip_file=file))
    except (DeploymentError, ControlFailed, Interrupted) as error:
        _say(console, f"failed: {error}")
        return False
    console.print(_tokens_table(prompts, reference.tokens, rounds))
    for result in rounds:
        console.print(
            counters_table(f"prefill {result.prefill}, decode {result.decode}: what the prompts moved", result.deltas)
        )
    return verdict(console, reference.tokens, rounds, break_combine, time.monotonic() - started)


def make_prompts() -> list[str]:
    """Different prompts of SHORTEST to LONGEST bytes; the checkpoint's tokenizer makes one token of each byte."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz     "
    lengths = [SHORTEST + (LONGEST - SHORTEST) * index // (PROMPTS - 1) for index in range(PROMPTS)]
    return ["".join(rng.choices(letters, k=length)) for length in lengths]


def write_deployment(folder: Path, checkpoint: Path, prefill: str, decode: str, break_combine: bool) -> Path:
    """The shipped preset with these modes."""
    if not PRESET.exists():
        raise DeploymentError([f"{PRESET} is not there: run the demo from a checkout of the repository, with ./ep demo"])
    yaml = YAML(typ="safe")
    yaml.representer.ignore_aliases = lambda _: True
    document: dict[str, Any] = yaml.load(PRESET)
    document["name"] = NAME
    document["model"]["path"] = str(checkpoint)
    document["router"]["port"] = free_ports(1)
    for role, mode in (("prefill", prefill), ("decode", decode)):
        document["roles"][role]["ep"]["mode"] = mode
        if break_combine:
            document["roles"][role]["env"]["EP_BACKEND_FAULT"] = "combine"
    file = folder / f"{prefill}-{decode}.yaml"
    yaml.dump(document, file)
    return file


def _flip(console: Console, state: RunState, file: Path, prefill: str, decode: str) -> None:
    """Edits the file and applies it to what runs. Raises ControlFailed if a rank does not follow."""
    yaml = YAML(typ="safe")
    document = yaml.load(file)
    for role, mode in (("prefill", prefill), ("decode", decode)):
        document["roles"][role]["ep"]["mode"] = mode
    yaml.dump(document, file)
    with ControlClient(state) as control:
        applied = control.apply(load(file), dry_run=False, restart=False)
    for flip in applied.flips:
        _say(console, f"flip: {flip.role} {flip.before} -> {flip.mode} on {flip.ranks} ranks after epoch {flip.epoch}")


def _run_round(
    console: Console, state: RunState, prompts: list[str], prefill: str, decode: str, flip_file: Path | None = None
) -> Round:
    """Sends all prompts, and counts what they moved in these modes. With ``flip_file`` those are flipped to while answers
    stream; the ranks count each mode by itself."""
    streaming = threading.Event()
    before = even_statuses(state)
    started = time.monotonic()
    with (
        _bar(console, f"{AT_ONCE} prompts at once through {state.url}", len(prompts)) as advance,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):

        def answer(prompt: str) -> list[int]:
            tokens: list[int] = []
            try:
                for token in stream(state, prompt, NEW_TOKENS):
                    tokens.append(token)
                    streaming.set()
            except httpx.HTTPError as error:
                _say(console, f"no answer to a prompt: {error}")
            advance()
            return tokens

        running = [pool.submit(answer, prompt) for prompt in prompts]
        if flip_file is not None:
            streaming.wait(TIMEOUT_S)
            _flip(console, state, flip_file, prefill, decode)
        answers = [one.result() for one in running]
    seconds = time.monotonic() - started
    after = even_statuses(state)
    deltas, silent = deltas_of(before, after, {"prefill": prefill, "decode": decode})
    return Round(prefill, decode, answers, seconds, deltas, silent)


def even_statuses(state: RunState) -> list[RankStatus]:
    """What every rank did, those of a role up to the same dispatch: while they are at work, they are asked until it is so."""
    return [status for instance in state.instances for status in _even(instance, state.key)]


def _even(instance: InstanceState, key: str | None) -> list[RankStatus]:
    for _ in range(READINGS):
        statuses = rank_statuses(instance, key)
        done = [{mode: (one.dispatches, one.combines) for mode, one in status.modes.items()} for status in statuses]
        if any(status.error for status in statuses) or all(one == done[0] for one in done):
            break
    return statuses


def deltas_of(
    before: list[RankStatus], after: list[RankStatus], modes: dict[str, str]
) -> tuple[list[tuple[RankStatus, str, ModeCounters]], list[str]]:
    """What each rank counted in its role's mode, and which of those counters stood still."""
    deltas, silent = [], []
    for old, new in zip(before, after, strict=True):
        mode = modes[new.role or ""]
        who = f"{new.role} rank {new.rank}"
        if new.error:
            silent.append(f"{who}: {new.error}")
            continue
        delta = new.modes.get(mode, ModeCounters()).since(old.modes.get(mode, ModeCounters()))
        deltas.append((new, mode, delta))
        counts = {"dispatches": delta.dispatches, "combines": delta.combines}
        for path in _paths(new, Mode(mode)):
            counts[f"{path} records"] = delta.records.get(path, 0)
            counts[f"{path} bytes"] = delta.bytes.get(path, 0)
        silent += [f"{who}, {mode}: no {counter}" for counter, count in counts.items() if count <= 0]
        if new.mode_executed != mode:
            silent.append(f"{who}: executed {new.mode_executed}, not {mode}")
    return deltas, silent


def _paths(status: RankStatus, mode: Mode) -> list[str]:
    """Over which records of the rank must go, some each."""
    nodes = status.world_size > status.gpus_per_node
    taken = {"local": True, "scale_up": status.gpus_per_node > 1, "scale_out": nodes, "forwarded": nodes and mode.spec.two_hops}
    return [path for path in PATHS if taken[path]]


def _tokens_table(prompts: list[str], expected: list[list[int]], rounds: list[Round]) -> Table:
    table = Table(title="greedy tokens equal to the reference", title_justify="left")
    table.add_column("prompt tokens", justify="right")
    for result in rounds:
        table.add_column(f"{result.prefill} + {result.decode}", justify="right")
    for index, prompt in enumerate(prompts):
        cells = []
        for result in rounds:
            equal = _equal_tokens(expected[index], result.answers[index])
            cells.append(f"[{'green' if equal == NEW_TOKENS else 'red'}]{equal}/{NEW_TOKENS}")
        table.add_row(str(len(prompt)), *cells)
    return table


def verdict(console: Console, expected: list[list[int]], rounds: list[Round], break_combine: bool, seconds: float) -> bool:
    passed = True
    for result in rounds:
        same = sum(answer == wanted for answer, wanted in zip(result.answers, expected, strict=True))
        passed = passed and same == len(expected) and not result.silent
        _say(
            console,
            f"prefill {result.prefill}, decode {result.decode}: {same} of {len(expected)} prompts equal, "
            f"{result.seconds:.1f} s for the prompts",
        )
        for line in result.silent:
            _say(console, line)
    if break_combine:
        caught = "the check caught" if not passed else "the check did NOT catch"
        _say(console, f"{caught} the corrupted combine")
    _say(console, f"{'passed' if passed else 'FAILED'} in {seconds:.0f} s")
    return passed


def _equal_tokens(expected: list[int], answer: list[int]) -> int:
    return sum(wanted == given for wanted, given in zip(expected, answer, strict=False))


@contextmanager
def _taken_down() -> Iterator[None]:
    """Stops the deployment however the block ends, SIGTERM included."""
    before = signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        yield
    finally:
        down(NAME)
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _bar(console: Console, text: str, total: int) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
