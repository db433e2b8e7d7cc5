#!/usr/bin/env python3
"""Measures a deployment of one role on this machine: are its tokens those of the engine's own all-to-all, and how fast is it?

    measure.py equality FILE --out R.json [--modes normal,hybrid]   tokens and log-probabilities in each mode, flips between
    measure.py timing FILE --out R.json [--modes ...]               throughput, time of a step, kernels of a profile
    measure.py timing FILE --out B.json --baseline                  the same of the engine's own all-to-all
    measure.py compare R.json B.json

FILE is a deployment with a `unified` role, such as deploy/h200x2-vllm-decode.yaml; its model is replaced: by a checkpoint with
real weights for equality, by one of DeepSeek-V3's widths with invented weights for timing; `--set enforce-eager=true` changes
an argument of the engine. The engine's own all-to-all is allgather_reducescatter in vLLM, and no expert parallelism in SGLang.
With `overlap` in FILE a measurement fails unless the engine ran two micro-batches. Python finds the engine by its path or
environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from ruamel.yaml import YAML

from ep_backend.bench import origin
from ep_backend.bench.traces import all_to_all, between, first_trace, steps
from ep_backend.checkpoint import write_checkpoint, write_shape
from ep_backend.console import make_console
from ep_backend.control.client import ControlClient
from ep_backend.demo import make_prompts
from ep_backend.deployment.agents import all_statuses
from ep_backend.deployment.commands import down, up_detached
from ep_backend.deployment.instances import engine_instances
from ep_backend.deployment.load import load
from ep_backend.deployment.processes import free_ports, stop_sessions
from ep_backend.deployment.rank_status import ModeCounters, RankStatus
from ep_backend.deployment.state import RunState, run_dir
from ep_backend.modes import parse_mode
from ep_backend.policy import AUTO

OWN = {"vllm": ("--all2all-backend", "allgather_reducescatter"), "sglang": ("--moe-a2a-backend", "none")}
NEEDS_OURS = {"--enable-dbo", "--enable-two-batch-overlap"}  # refused, or without effect, with the engine's own
RUNNER = "--moe-runner-backend"
UNIFORM = {
    "vllm": {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"},
    "sglang": {"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"},
}
# Python's side of a trace would slow what is measured.
LEAN_PROFILE = {
    "profiler": "torch",
    "torch_profiler_with_stack": False,
    "torch_profiler_dump_cuda_time_total": False,
    "ignore_frontend": True,
}
QUALIFIED = 0.9  # least share of positions whose reference is sure of its token
MARGIN = 4.0  # sure: the two best are further apart than so many times the noise; so much may log-probabilities differ
ONE_GPU = Path(__file__).resolve().parents[2] / "kernels/scripts/one_gpu"
# With --one-gpu: room for every rank's cache, few sizes of graphs, and ranks that are hosts of their own to NCCL.
ONE_GPU_ARGS = {
    "vllm": {"kv-cache-memory-bytes": 4 << 30, "max-cudagraph-capture-size": 32},
    "sglang": {"max-total-tokens": 65_536, "cuda-graph-max-bs": 32, "disable-custom-all-reduce": True},
}
ONE_GPU_ENV = {
    "vllm": {"NCCL_SOCKET_IFNAME": "lo"},
    "sglang": {
        "NCCL_SOCKET_IFNAME": "lo",
        "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "true",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
    },
}
SHORT, LONG = 32, 160  # tokens of an answer; the difference of both is steps alone
PROMPT, LONG_PROMPT = 16, 480  # tokens of a prompt
SPLIT = 0.4  # least share of rounds in two micro-batches: while requests come and go, a rank may have too few for two
START_S, ANSWER_S = 400.0, 120.0  # most that a start, and an answer, may take: kernels are compiled at their first use

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
File = Annotated[Path, typer.Argument(help="a deployment with a unified role", show_default=False)]
Out = Annotated[Path, typer.Option(help="the JSON to write")]
Modes = Annotated[str, typer.Option(help="the mode to start with, and those to flip to, with commas; default: the file's")]
Seconds = Annotated[int, typer.Option(help="give up after so long, with what there is, and stop the engine", min=1)]
Model = Annotated[Path | None, typer.Option(help="a checkpoint instead of the one that would be written")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="an argument of the engine, for this run")]


class GivenUp(Exception):
    """The time is over, or somebody asked to stop."""


@dataclass
class Served:
    """A running engine."""

    engine: str
    url: str
    name: str
    ranks: int
    state: RunState | None  # None: without this backend


@dataclass
class Answer:
    """A greedy continuation: ids, their log-probabilities, and how far the best stands before the second."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]


@app.command()
def equality(
    file: File,
    out: Out,
    modes: Modes = "",
    model: Model = None,
    reference: Annotated[Path | None, typer.Option(help="an earlier result, whose reference is taken")] = None,
    tokens: Annotated[int, typer.Option(help="of each answer", min=1)] = 64,
    profile: Annotated[bool, typer.Option(help="with profiles of each mode: prompts, and decoding")] = False,
    engine_route: Annotated[
        bool, typer.Option(help="flips by SGLang's own /set_internal_state, not by the control service")
    ] = False,
    arguments: Set = None,
    one_gpu: Annotated[bool, typer.Option(help="all ranks on the first GPU, which they use by turns")] = False,
    seconds: Seconds = 540,
) -> None:
    """Fails if a token differs where the reference is sure of it, or a log-probability by more than its noise explains."""
    _give_up_after(seconds)
    folder = _folder(out)
    path = model or folder / "checkpoint"
    if model is None:
        write_checkpoint(path, model="deepseek-v3-100m")
    document = _document(file, path, arguments)
    wanted = _modes(modes, document)
    if engine_route and _role(document)["engine"] != "sglang":
        raise typer.BadParameter(f"--engine-route: {_role(document)['engine']} has no route for flips; leave it out")
    if one_gpu:
        _share_one_gpu(document)
    if profile:
        _prepare_profiles(document, folder)
    result = _facts(file, document) | {"one_gpu": one_gpu}
    prompts = make_prompts()
    # 16 a rank where batches are split: one with half of another's tokens would leave its second half empty.
    copies = _role(document)["data_parallel"] if _overlaps(document) else 1
    try:
        if reference is not None:
            first, again = ([Answer(**a) for a in answers] for answers in json.loads(reference.read_text())["reference"])
        else:
            with baseline(document, folder) as served:
                result["baseline_start_s"] = _since(result)
                first = answers(served, prompts, tokens, at_once=len(prompts))
                again = answers(served, prompts, tokens, at_once=1)
        result["reference"] = [[asdict(a) for a in answers] for answers in (first, again)]
        _role(document)["ep"]["mode"] = wanted[0]
        with deployed(document, folder) as served:
            result["start_s"] = _since(result)
            for number, mode in enumerate(wanted):
                entry = result["modes"].setdefault(mode, {})
                if engine_route and number:
                    entry["flip"] = flip_by_engine(served, mode, number)
                else:
                    entry["flip"] = flip(served, document, folder, mode)
                looks = [_look(served)]
                for length in (1, tokens) if copies > 1 else (tokens,):  # prompts alone first: are they split, too?
                    found = answers(served, prompts * copies, length, at_once=copies * len(prompts))
                    looks.append(_look(served))
                entry |= judge(first * copies, again * copies, found) | {"ranks": _executed(looks[0], looks[-1], mode)}
                if copies > 1:
                    entry["split"] = {"prompts": _split(*looks[:2]), "decoding": _split(*looks[1:])}
                    entry["micro_batched"] = entry["split"]["prompts"] > 0 and entry["split"]["decoding"] >= SPLIT
                print(f"{mode}: {json.dumps({key: value for key, value in entry.items() if key != 'ranks'})}", flush=True)
                _save(result, out)
                if profile:
                    entry["profile"] = profiled(served, document, folder, 32, PROMPT, SHORT)
                    entry["profile_of_prompts"] = profiled(served, document, folder, 16, LONG_PROMPT, 1)
                    _save(result, out)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    _finish(result, out, folder)
    if "error" in result or not all(entry["equal"] and _went_as_asked(entry) for entry in result["modes"].values()):
        raise typer.Exit(1)


@app.command()
def timing(
    file: File,
    out: Out,
    modes: Modes = "",
    model: Model = None,
    own: Annotated[bool, typer.Option("--baseline", help="the engine's own all-to-all")] = False,
    sequences: Annotated[str, typer.Option(help="requests at once, a rank")] = "128,64,32",
    windows: Annotated[int, typer.Option(min=1)] = 3,
    profile: Annotated[bool, typer.Option(help="with a profile of each load at the end of each mode")] = True,
    prompts: Annotated[bool, typer.Option(help="with a profile of prompts alone, too")] = False,
    arguments: Set = None,
    seconds: Seconds = 540,
) -> None:
    """Windows of requests at once on one start; a step is what a longer answer takes more, a token."""
    _give_up_after(seconds)
    folder = _folder(out)
    path = model or folder / "shape"
    document = _document(file, path, arguments)
    engine = _role(document)["engine"]
    if model is None:
        write_shape(path, "deepseek-v3-shape-fp8" if engine == "sglang" else "deepseek-v3-shape")
    _role(document)["args"]["load-format"] = "dummy"
    _role(document)["env"] |= UNIFORM[engine]
    counts = [int(count) for count in sequences.split(",")]
    if profile:
        _prepare_profiles(document, folder)
    if engine == "sglang":
        _role(document)["ep"]["fp8"] = True
    wanted = [OWN[engine][1]] if own else _modes(modes, document)
    if not own:
        _role(document)["ep"]["mode"] = wanted[0]
    result = _facts(file, document)
    try:
        with (baseline if own else deployed)(document, folder) as served:
            result["start_s"] = _since(result)
            for mode in wanted:
                entry = result["modes"].setdefault(mode, {})
                if not own:
                    entry["flip"] = flip(served, document, folder, mode)
                entry["finite"] = all(abs(p) < 1e4 for p in answers(served, ["warm"], SHORT, 1)[0].logprobs)
                load_all(served, max(counts) * served.ranks, SHORT)  # what is compiled at its first use is, now
                before = _look(served)
                entry["windows"] = []
                for turn in range(windows):
                    for count in counts:
                        entry["windows"].append({"turn": turn, **window(served, count)})
                        print(mode, json.dumps(entry["windows"][-1]), flush=True)
                    _save(result, out)
                if not own:
                    entry["ranks"] = _executed(before, now := _look(served), mode)
                    if _overlaps(document):
                        entry["split"] = {"decoding": _split(before, now)}
                        entry["micro_batched"] = entry["split"]["decoding"] >= SPLIT
                if profile:
                    entry["profiles"] = [profiled(served, document, folder, count, PROMPT, SHORT) for count in counts]
                    if prompts:
                        entry["profile_of_prompts"] = profiled(served, document, folder, 16, LONG_PROMPT, 1)
                _save(result, out)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    _finish(result, out, folder)
    if "error" in result or not (own or all(_went_as_asked(entry) for entry in result["modes"].values())):
        raise typer.Exit(1)


@app.command()
def compare(ours: Path, own: Path) -> None:
    """Steps and all-to-all of each mode beside the engine's own: is a layer's half, and is what was saved seen in a step?"""
    base = next(iter(json.loads(own.read_text())["modes"].values()))
    its_steps, its_profiles = _steps(base), _profiles(base)
    for mode, entry in json.loads(ours.read_text())["modes"].items():
        for count, step in _steps(entry).items():
            print(f"{mode}, {count} sequences a rank: step {step:.3f} ms, the engine's own {its_steps[count]:.3f} ms")
        for count, one in _profiles(entry).items():
            parts = {"us_a_layer": "us of all-to-all a layer", "step_us": "us a step", "graph_us": "us of them in its graph"}
            for key, unit in parts.items():
                found, other = (each.get(key) for each in (one, its_profiles[count]))
                print(f"{mode}, {count} sequences a rank, in CUDA graphs: {found} {unit}, the engine's own {other}")


# Serving.


@contextmanager
def deployed(document: dict[str, Any], folder: Path) -> Iterator[Served]:
    file = _write(document, folder)
    name = document["name"]
    try:
        state = up_detached(file, make_console())
        yield Served(_role(document)["engine"], state.url, state.served_name, _role(document)["data_parallel"], state)
    finally:
        _keep_logs(run_dir(name), folder)
        down(name)


@contextmanager
def baseline(document: dict[str, Any], folder: Path) -> Iterator[Served]:
    """The very command of the deployment, but for the all-to-all."""
    deployment = load(_write(document, folder)).deployment
    engine = _role(document)["engine"]
    launch = engine_instances(deployment, folder / "baseline")[0]
    flag, own = OWN[engine]
    command = [word for word in launch.command if word not in NEEDS_OURS]
    command[command.index(flag) + 1] = own
    if RUNNER in command:  # for the formats of an all-to-all
        command[command.index(RUNNER) + 1] = "auto"
    log = folder / "baseline.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **launch.env}, start_new_session=True
        )
    try:
        _await_health(process, launch.health or "", log)
        url = (launch.health or "").removesuffix("/health")
        yield Served(engine, url, deployment.model.served_name, _role(document)["data_parallel"], None)
    finally:
        _keep_logs(folder / "baseline.log", folder)
        stop_sessions([process.pid], set(), 20.0)
        process.poll()


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the baseline ended with status {process.returncode}: {_tail(log)}")
        try:
            if httpx.get(url, timeout=5.0, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1.0)
    raise RuntimeError(f"the baseline did not serve within {START_S:g} s: {_tail(log)}")


def flip(served: Served, document: dict[str, Any], folder: Path, mode: str) -> dict[str, Any] | None:
    """Makes the running role use the mode; None where it does."""
    if _role(document)["ep"]["mode"] == mode:
        return None
    _role(document)["ep"]["mode"] = mode
    file = _write(document, folder)
    assert served.state is not None
    started = time.monotonic()
    with ControlClient(served.state) as control:
        applied = control.apply(load(file), dry_run=False, restart=False)
    return {"seconds": round(time.monotonic() - started, 2), "flips": [f.model_dump() for f in applied.flips]}


def flip_by_engine(served: Served, mode: str, token: int) -> dict[str, Any]:
    """By SGLang's own admin route, whose ranks change at a dispatch that carries the proposal on all of them."""
    from server_plugins.sglang import NAME
    from server_plugins.sglang.state import MODE, MODES, TOKEN

    def states() -> list[dict[str, Any]]:
        found = httpx.get(f"{served.url}/server_info", timeout=ANSWER_S, trust_env=False).raise_for_status().json()
        return [state[NAME] for state in found["internal_states"]]

    started = time.monotonic()
    took = _post(served, "/set_internal_state", {"server_args": {TOKEN: token, MODE: MODES.index(mode)}})
    if not all(took):
        raise RuntimeError(f"/set_internal_state: {took}: {[state['refused'] for state in states()]}")
    while any(state["mode_desired"] != mode for state in states()):
        if time.monotonic() - started > ANSWER_S:
            raise RuntimeError(f"no flip to {mode} within {ANSWER_S:g} s: {states()}")
        scored(served, "a dispatch", 2)
    return {"seconds": round(time.monotonic() - started, 2), "route": "/set_internal_state", "took": took}


def _look(served: Served) -> list[RankStatus]:
    """What every rank's buffer says; nothing without this backend."""
    return [] if served.state is None else all_statuses(served.state)


def _executed(before: list[RankStatus], now: list[RankStatus], mode: str) -> list[dict[str, Any]]:
    """What every rank's buffer did between two looks."""
    keys = ("rank", "mode_desired", "mode_executed", "epoch", "failed", "error", "max_tokens", "expert_rows", "sms", "graphs")
    found = []
    for was, status in zip(before, now, strict=True):
        since = {name: c.since(was.modes.get(name, ModeCounters())).dispatches for name, c in status.modes.items()}
        dispatches = {name: count for name, count in since.items() if count}
        # Not its last one's mode: a unified SGLang runs both families.
        ran = bool(dispatches) if mode == AUTO else mode in dispatches
        asked = ran and not status.failed and not status.error
        rounds = _rounds(was, status)
        keep = status.model_dump(include=set(keys))
        found.append({**keep, "dispatches": dispatches, "lane_rounds": rounds, "as_asked": asked})
    return found


def _rounds(was: RankStatus, now: RankStatus) -> list[int]:
    """Rounds of each micro-batch between two looks at a rank."""
    return [after - before for before, after in zip(was.lane_rounds, now.lane_rounds, strict=False)]  # none: no answer


def _split(before: list[RankStatus], now: list[RankStatus]) -> float:
    """The share of batches, a layer each, that ran as two micro-batches: the second has lane 1, all else lane 0."""
    shares = []
    for was, status in zip(before, now, strict=True):
        first, *second = _rounds(was, status) or [0]
        shares.append(sum(second) / first if first else 0.0)
    return round(min(shares, default=0.0), 4)


def _went_as_asked(entry: dict[str, Any]) -> bool:
    """Every rank ran the mode; where two micro-batches were asked for, there were two."""
    return all(rank["as_asked"] for rank in entry["ranks"]) and entry.get("micro_batched", True)


# Equality.


def answers(served: Served, prompts: list[str], tokens: int, at_once: int) -> list[Answer]:
    pool = ThreadPoolExecutor(at_once)
    try:
        return list(pool.map(lambda prompt: scored(served, prompt, tokens), prompts))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an engine that hangs must not keep this process from stopping it


def scored(served: Served, prompt: str, tokens: int) -> Answer:
    if served.engine == "sglang":
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
        meta = _post(served, "/generate", body)["meta_info"]
        chosen = meta["output_token_logprobs"]
        best = [sorted((entry[0] for entry in each), reverse=True) for each in meta["output_top_logprobs"]]
        return Answer([entry[1] for entry in chosen], [entry[0] for entry in chosen], [b[0] - b[1] for b in best])
    body = {
        **{"model": served.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True},
        **{"logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True},
    }
    choice = _post(served, "/v1/completions", body)["choices"][0]
    found = choice["logprobs"]
    best = [sorted(each.values(), reverse=True) for each in found["top_logprobs"]]
    return Answer(choice["token_ids"], found["token_logprobs"], [b[0] - b[1] for b in best])


def judge(first: list[Answer], again: list[Answer], found: list[Answer]) -> dict[str, Any]:
    """Compares answers with a reference, each as far as its context is the same.

    Noise is what batching changes in the reference: the largest difference between its answers at once and one by one. A
    position qualifies where its margin exceeds MARGIN times that; there, tokens must be equal. What is lost or goes astray
    shows first in the log-probabilities, of tokens that both chose after the same text: they may differ by MARGIN times the
    noise at most.
    """
    noise = max((abs(a - b) for a, b in _same_context(first, again)), default=0.0)
    margins = [margin for answer in first for margin in answer.margins]
    sure = [margin > MARGIN * noise for margin in margins]
    wrong, unsure, compared = [], 0, 0
    for number, (a, b) in enumerate(zip(first, found, strict=True)):
        at = _parting(a, b)
        compared += min(at + 1, len(a.tokens))
        if at == len(a.tokens):
            continue
        if a.margins[at] > MARGIN * noise:
            wrong.append({"prompt": number, "position": at, "margin": a.margins[at], "tokens": [a.tokens[at], b.tokens[at]]})
        else:
            unsure += 1
    share = sum(sure) / len(sure)
    difference = max((abs(a - b) for a, b in _same_context(first, found)), default=0.0)
    equal = not wrong and share >= QUALIFIED and difference <= MARGIN * noise
    return {
        **{"equal": equal, "wrong": wrong, "parted_where_unsure": unsure, "compared": compared},
        **{"positions": len(margins), "qualified": round(share, 4), "noise": noise, "max_logprob_difference": difference},
    }


def _same_context(first: list[Answer], second: list[Answer]) -> Iterator[tuple[float, float]]:
    """Log-probabilities of tokens that both chose after the same text."""
    for a, b in zip(first, second, strict=True):
        yield from list(zip(a.logprobs, b.logprobs, strict=True))[: _parting(a, b)]


def _parting(a: Answer, b: Answer) -> int:
    """The first position with another token; the length if there is none."""
    pairs = zip(a.tokens, b.tokens, strict=True)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), len(a.tokens))


# Time.


def window(served: Served, sequences: int) -> dict[str, Any]:
    """So many requests a rank at once, with short and with long answers."""
    count = sequences * served.ranks
    short, long = load_all(served, count, SHORT), load_all(served, count, LONG)
    step = (long - short) / (LONG - SHORT)
    return {
        "sequences_a_rank": sequences,
        "step_ms": round(step * 1e3, 4),
        "short_s": round(short, 3),
        "long_s": round(long, 3),
        "tokens_s": round(count * LONG / long, 1),
        "steady_tokens_s": round(count / step, 1),
    }


def load_all(served: Served, count: int, tokens: int, prompt_tokens: int = PROMPT) -> float:
    """Seconds until all of so many requests sent at once are answered with so many tokens."""

    async def run() -> float:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=ANSWER_S, trust_env=False) as client:

            async def one(number: int) -> None:
                prompt = f"{number:08d} is what".ljust(prompt_tokens, "?")  # a byte is a token
                body: dict[str, Any]
                if served.engine == "sglang":
                    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
                    route, body = "/generate", {"text": prompt, "sampling_params": sampling}
                else:
                    route, body = "/v1/completions", {"model": served.name, "prompt": prompt, "max_tokens": tokens}
                    body |= {"temperature": 0, "ignore_eos": True}
                (await client.post(route, json=body)).raise_for_status()

            started = time.monotonic()
            await asyncio.gather(*map(one, range(count)))
            return time.monotonic() - started

    return asyncio.run(run())


def profiled(
    served: Served, document: dict[str, Any], folder: Path, sequences: int, prompt_tokens: int, tokens: int
) -> dict[str, Any]:
    """Kernels of a load, as the first rank's trace has them. What goes wrong here costs the profile alone."""
    traces = folder / "traces"
    shutil.rmtree(traces, ignore_errors=True)
    traces.mkdir(parents=True)
    load = {"sequences_a_rank": sequences, "prompt_tokens": prompt_tokens, "tokens": tokens}
    body = {"output_dir": str(traces), "activities": ["GPU"], "with_stack": False} if served.engine == "sglang" else {}
    load_all(served, sequences * served.ranks, tokens, prompt_tokens)  # what is compiled at its first use
    before = _look(served)
    try:
        httpx.post(f"{served.url}/start_profile", json=body or None, timeout=120.0, trust_env=False).raise_for_status()
        load_all(served, sequences * served.ranks, tokens, prompt_tokens)
        now = _look(served)
        httpx.post(f"{served.url}/stop_profile", timeout=120.0, trust_env=False).raise_for_status()
        path, kernels = first_trace(traces)
    except (httpx.HTTPError, OSError, ValueError) as error:
        return {**load, "error": f"{type(error).__name__}: {error}"}
    rounds = [sum(_rounds(was, status)) for was, status in zip(before, now, strict=True)]
    config = json.loads(Path(document["model"]["path"], "config.json").read_text())
    in_graphs = steps(kernels, config["num_hidden_layers"] - config["first_k_dense_replace"])
    found = {**load, "trace": path.name, "in_graphs": in_graphs, **all_to_all(kernels, rounds[0] if rounds else None)}
    if _overlaps(document):
        found["between"] = between(kernels)
    summary = {key: value for key, value in found.items() if key != "kernels"}
    print(f"profile: {json.dumps(summary)}", flush=True)
    return found


# Files.


def _document(file: Path, model: Path, arguments: list[str] | None) -> dict[str, Any]:
    document: dict[str, Any] = YAML(typ="safe").load(file)
    document["model"]["path"] = str(model.resolve())
    document["router"] = {"port": free_ports(1)}  # others may measure beside it
    document["roles"]["unified"].setdefault("env", {})
    args = document["roles"]["unified"].setdefault("args", {})
    for argument in arguments or []:
        name, is_there, value = argument.partition("=")
        if not is_there:
            raise typer.BadParameter(f"--set {argument}: give NAME=VALUE")
        args[name] = YAML(typ="safe").load(value)
    return document


def _share_one_gpu(document: dict[str, Any]) -> None:
    role = _role(document)
    path = os.pathsep.join(filter(None, [str(ONE_GPU), os.environ.get("PYTHONPATH")]))
    role["env"] |= ONE_GPU_ENV[role["engine"]] | {"PYTHONPATH": path}
    role["args"] |= ONE_GPU_ARGS[role["engine"]]


def _prepare_profiles(document: dict[str, Any], folder: Path) -> None:
    """vLLM has to know from the start."""
    if _role(document)["engine"] == "vllm":
        _role(document)["args"]["profiler-config"] = {**LEAN_PROFILE, "torch_profiler_dir": str(folder / "traces")}


def _overlaps(document: dict[str, Any]) -> bool:
    return _role(document)["ep"].get("overlap", "none") != "none"


def _role(document: dict[str, Any]) -> dict[str, Any]:
    role: dict[str, Any] = document["roles"]["unified"]
    return role


def _write(document: dict[str, Any], folder: Path) -> Path:
    file = folder / "deployment.yaml"
    yaml = YAML(typ="safe")
    yaml.representer.ignore_aliases = lambda _: True
    yaml.dump(document, file)
    return file


def _folder(out: Path) -> Path:
    """For what a measurement writes beside its result."""
    folder = Path(".ep", "measure", out.stem).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _modes(modes: str, document: dict[str, Any]) -> list[str]:
    wanted = modes.split(",") if modes else [_role(document)["ep"]["mode"]]
    for mode in wanted:
        if mode != AUTO:
            parse_mode(mode)  # before minutes of a start
    return wanted


def _steps(entry: dict[str, Any]) -> dict[int, float]:
    """The median of the windows' steps in ms, by sequences a rank."""
    steps: dict[int, list[float]] = defaultdict(list)
    for one in entry["windows"]:
        steps[one["sequences_a_rank"]].append(one["step_ms"])
    return {count: statistics.median(values) for count, values in steps.items()}


def _profiles(entry: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What profiles say of the steps in graphs, by sequences a rank."""
    return {one["sequences_a_rank"]: one.get("in_graphs") or {} for one in entry.get("profiles", [])}


def _facts(file: Path, document: dict[str, Any]) -> dict[str, Any]:
    shown = json.loads(json.dumps(document))
    shown["model"]["path"] = Path(shown["model"]["path"]).name  # of no use on another machine, like these:
    _role(shown)["env"].pop("PYTHONPATH", None)
    _role(shown)["args"].pop("profiler-config", None)
    return {
        **{
            "file": str(file),
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "gpus": origin.gpus("name", "driver_version"),
        },
        **{"commit": os.environ.get("COMMIT") or origin.commit(), "deployment": shown},
        **{"versions": {name: _version(name) for name in ("vllm", "sglang", "torch", "triton", "transformers")}, "modes": {}},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _since(result: dict[str, Any]) -> float:
    return round((datetime.now(UTC) - datetime.fromisoformat(result["began"])).total_seconds(), 1)


def _finish(result: dict[str, Any], out: Path, folder: Path) -> None:
    signal.alarm(0)
    _save(result, out)
    if "error" in result:
        print(result["error"])
    for log in folder.glob("*.log"):
        shutil.copy(log, out.with_name(f"{out.stem}-{log.name}"))


def _save(result: dict[str, Any], out: Path) -> None:
    result["seconds"] = _since(result)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def _give_up_after(seconds: int) -> None:
    """An engine that outlives this process would keep the GPUs."""

    def stop(number: int, _: object) -> None:
        raise GivenUp(f"not done after {seconds} s" if number == signal.SIGALRM else "asked to stop")

    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, stop)
    signal.alarm(seconds)


def _keep_logs(source: Path, folder: Path) -> None:
    """The ends of a run's logs."""
    for log in [source] if source.suffix == ".log" else source.glob("*.log"):
        (folder / log.name).write_text(_tail(log, 200_000))


def _tail(log: Path, size: int = 3000) -> str:
    return log.read_text(errors="replace")[-size:]


def _post(served: Served, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{served.url}{route}", json=body, timeout=ANSWER_S, trust_env=False)
    if response.is_error:
        raise RuntimeError(f"{route}: status {response.status_code}: {response.text[:500]}")
    answer: dict[str, Any] = response.json()
    return answer


if __name__ == "__main__":
    app()
