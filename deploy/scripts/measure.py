#!/usr/bin/env python3
"""Measures a deployment of one role on this machine: are its tokens those of the engine's own all-to-all, and how fast is it?

    measure.py equality FILE --out R.json [--modes normal,hybrid]   tokens and log-probabilities in each mode, flips between
    measure.py timing FILE --out R.json [--modes ...]               throughput, time of a step, kernels of a profile
    measure.py timing FILE --out B.json --baseline                  the same of the engine's own all-to-all
    measure.py compare R.json B.json

FILE is a deployment with a `unified` role, such as deploy/h200x2-vllm-decode.yaml; its model is replaced: by a checkpoint with
real weights for equality, by one of DeepSeek-V3's widths with invented weights for timing. The engine's own all-to-all is
allgather_reducescatter in vLLM, and no expert parallelism in SGLang. Python finds the engine by its path or environment.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
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

from ep_backend.checkpoint import write_checkpoint, write_shape
from ep_backend.control.client import ControlClient
from ep_backend.demo import make_prompts
from ep_backend.deployment.agents import all_statuses
from ep_backend.deployment.commands import down, up_detached
from ep_backend.deployment.instances import engine_instances
from ep_backend.deployment.load import load
from ep_backend.deployment.processes import stop_sessions
from ep_backend.deployment.state import RunState, run_dir
from ep_backend.deployment.view import make_console
from ep_backend.fabric.nvshmem.launch import IMAGE_KERNELS

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
SHORT, LONG = 32, 160  # tokens of an answer; the difference of both is steps alone
START_S = 400.0
OURS = re.compile("|".join(f"^ep_{name}$" for names in IMAGE_KERNELS.values() for name in names))
# The kernel that begins a dispatch, one a layer and micro-batch.
BEGINS = re.compile("^ep_(dispatch|send|rail_send|ring_dispatch|expert_send)$")
COLLECTIVE = re.compile("nccl|all_?gather|reduce_?scatter|all_?reduce|cross_device", re.IGNORECASE)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
File = Annotated[Path, typer.Argument(help="a deployment with a unified role", show_default=False)]
Out = Annotated[Path, typer.Option(help="the JSON to write")]
Modes = Annotated[str, typer.Option(help="the mode to start with, and those to flip to, with commas; default: the file's")]
Seconds = Annotated[int, typer.Option(help="give up after so long, with what there is, and stop the engine", min=1)]
Model = Annotated[Path | None, typer.Option(help="a checkpoint instead of the one that would be written")]


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
    seconds: Seconds = 540,
) -> None:
    """Fails if a token differs where the reference is sure of it, or a log-probability by more than its noise explains."""
    _give_up_after(seconds)
    folder = _folder(out)
    path = model or folder / "checkpoint"
    if model is None:
        write_checkpoint(path, model="deepseek-v3-100m")
    document = _document(file, path)
    result = _facts(file, document)
    prompts = make_prompts()
    try:
        if reference is not None:
            first, again = ([Answer(**a) for a in answers] for answers in json.loads(reference.read_text())["reference"])
        else:
            with baseline(document, folder) as served:
                result["baseline_start_s"] = _since(result)
                first = answers(served, prompts, tokens, at_once=len(prompts))
                again = answers(served, prompts, tokens, at_once=1)
        result["reference"] = [[asdict(a) for a in answers] for answers in (first, again)]
        _role(document)["ep"]["mode"] = (wanted := _modes(modes, document))[0]
        with deployed(document, folder) as served:
            result["start_s"] = _since(result)
            for mode in wanted:
                entry = result["modes"].setdefault(mode, {})
                entry["flip"] = flip(served, document, folder, mode)
                found = answers(served, prompts, tokens, at_once=len(prompts))
                entry |= judge(first, again, found) | {"ranks": _executed(served, mode)}
                _save(result, out)
                print(f"{mode}: {json.dumps({key: value for key, value in entry.items() if key != 'ranks'})}", flush=True)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    _finish(result, out, folder)
    if "error" in result or not all(entry["equal"] and entry["executed"] for entry in _flat(result)):
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
    profile: Annotated[bool, typer.Option(help="with a profile at the end of each mode")] = True,
    seconds: Seconds = 540,
) -> None:
    """Windows of requests at once on one start; a step is what a longer answer takes more, a token."""
    _give_up_after(seconds)
    folder = _folder(out)
    path = model or folder / "shape"
    engine = _role(_document(file, path))["engine"]
    if model is None:
        write_shape(path, "deepseek-v3-shape-fp8" if engine == "sglang" else "deepseek-v3-shape")
    document = _document(file, path)
    _role(document)["args"]["load-format"] = "dummy"
    _role(document)["env"] |= UNIFORM[engine]
    traces = folder / "traces"
    if profile and engine == "vllm":
        _role(document)["args"]["profiler-config"] = {**LEAN_PROFILE, "torch_profiler_dir": str(traces)}
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
                load_all(served, 8 * served.ranks, SHORT)
                entry["windows"] = []
                for turn in range(windows):
                    for count in map(int, sequences.split(",")):
                        entry["windows"].append({"turn": turn, **window(served, count)})
                        print(mode, json.dumps(entry["windows"][-1]), flush=True)
                if profile:
                    entry["profile"] = profiled(served, traces)
                if not own:
                    entry["ranks"] = _executed(served, mode)
                _save(result, out)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    _finish(result, out, folder)
    if "error" in result:
        raise typer.Exit(1)


@app.command()
def compare(ours: Path, own: Path) -> None:
    """Steps and all-to-all of each mode beside the engine's own: is a layer's half, and is what was saved seen in a step?"""
    base = next(iter(json.loads(own.read_text())["modes"].values()))
    for mode, entry in json.loads(ours.read_text())["modes"].items():
        for count, step in _steps(entry).items():
            print(f"{mode}, {count} sequences a rank: step {step:.3f} ms, the engine's own {_steps(base)[count]:.3f} ms")
        for name, found in (("it", entry), ("the engine's own", base)):
            print(f"{mode}: all-to-all of {name}, us a layer: {found.get('profile', {}).get('us_a_layer')}")


# Serving.


@contextmanager
def deployed(document: dict[str, Any], folder: Path) -> Iterator[Served]:
    file = _write(document, folder)
    state = up_detached(file, make_console())
    try:
        yield Served(_role(document)["engine"], state.url, state.served_name, _role(document)["data_parallel"], state)
    finally:
        _keep_logs(run_dir(state.name), folder)
        down(state.name)


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
        applied = control.apply(load(file).deployment, file.read_text(), dry_run=False, restart=False)
    return {"seconds": round(time.monotonic() - started, 2), "flips": [f.model_dump() for f in applied.flips]}


def _executed(served: Served, mode: str) -> list[dict[str, Any]]:
    """What every rank's buffer says."""
    assert served.state is not None
    keys = ("rank", "mode_desired", "mode_executed", "epoch", "failed", "error", "max_tokens", "expert_rows", "sms", "graphs")
    found = []
    for status in all_statuses(served.state):
        dispatches = {name: counters.dispatches for name, counters in status.modes.items() if counters.dispatches}
        # Not its last one's mode: a unified SGLang runs both families.
        ran = bool(dispatches) if mode == "auto" else mode in dispatches
        asked = ran and not status.failed and not status.error
        found.append({**status.model_dump(include=set(keys)), "dispatches": dispatches, "as_asked": asked})
    return found


# Equality.


def answers(served: Served, prompts: list[str], tokens: int, at_once: int) -> list[Answer]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: scored(served, prompt, tokens), prompts))


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


def load_all(served: Served, count: int, tokens: int) -> float:
    """Seconds until all of so many requests sent at once are answered with so many tokens."""

    async def run() -> float:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=300.0, trust_env=False) as client:

            async def one(number: int) -> None:
                prompt = f"{number:08d} is what"
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


def profiled(served: Served, traces: Path) -> dict[str, Any]:
    """Kernels of a load of 64 sequences a rank, as the first rank's trace has them."""
    shutil.rmtree(traces, ignore_errors=True)
    traces.mkdir(parents=True)
    body = {"output_dir": str(traces), "activities": ["GPU"]} if served.engine == "sglang" else {}
    httpx.post(f"{served.url}/start_profile", json=body or None, timeout=120.0, trust_env=False).raise_for_status()
    load_all(served, 64 * served.ranks, SHORT)
    httpx.post(f"{served.url}/stop_profile", timeout=240.0, trust_env=False).raise_for_status()
    deadline, found = time.monotonic() + 60.0, []
    while time.monotonic() < deadline and not (found := sorted(p for p in traces.rglob("*.json*") if p.stat().st_size)):
        time.sleep(1.0)
    time.sleep(3.0)  # the last one may still be written
    for path in found:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if kernels := [e for e in json.loads(text)["traceEvents"] if e.get("cat") == "kernel"]:
            return {"trace": path.name, **all_to_all(kernels)}
    return {"error": f"no kernels in {[p.name for p in found]}"}


def all_to_all(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """What a trace's kernels say of the all-to-all: ours if there are any, else the collectives.

    ``us_a_layer`` is all its kernels' time by the number of dispatches (collectives: of the rarest kind of kernel that there
    is a hundredth of). ``overlapped``: the share of its time in which another kernel ran, too.
    """
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel["name"]].append(kernel["dur"])
    ours = {name for name in by_name if OURS.match(name)}
    names = ours or {name for name in by_name if COLLECTIVE.search(name)}
    layers = sum(len(us) for name, us in by_name.items() if BEGINS.match(name))
    if names and not ours:
        counts = [len(by_name[name]) for name in names]
        layers = min(count for count in counts if count * 100 >= max(counts))
    total = sum(sum(by_name[name]) for name in names)
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:40]
    return {
        "layers": layers,
        "us_a_layer": round(total / layers, 2) if layers else None,
        "overlapped": _overlapped(kernels, names),
        "kernels": [{"name": n[:100], "calls": len(us), "median_us": statistics.median(us), "us": sum(us)} for n, us in top],
    }


def _overlapped(kernels: list[dict[str, Any]], names: set[str]) -> float | None:
    others = sorted((k["ts"], k["ts"] + k["dur"]) for k in kernels if k["name"] not in names)
    merged: list[list[float]] = []
    for begin, end in others:
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    total = both = 0.0
    at = 0
    for begin, end in sorted((k["ts"], k["ts"] + k["dur"]) for k in kernels if k["name"] in names):
        total += end - begin
        while at < len(merged) and merged[at][1] <= begin:
            at += 1
        for first, last in merged[at:]:
            if first >= end:
                break
            both += min(end, last) - max(begin, first)
    return round(both / total, 4) if total else None


# Files.


def _document(file: Path, model: Path) -> dict[str, Any]:
    document: dict[str, Any] = YAML(typ="safe").load(file)
    document["model"]["path"] = str(model.resolve())
    document["roles"]["unified"].setdefault("args", {})
    document["roles"]["unified"].setdefault("env", {})
    return document


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
    return modes.split(",") if modes else [_role(document)["ep"]["mode"]]


def _flat(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**entry, "executed": all(rank["as_asked"] for rank in entry["ranks"])} for entry in result["modes"].values()]


def _steps(entry: dict[str, Any]) -> dict[int, float]:
    """The median of the windows' steps in ms, by sequences a rank."""
    steps: dict[int, list[float]] = defaultdict(list)
    for one in entry["windows"]:
        steps[one["sequences_a_rank"]].append(one["step_ms"])
    return {count: statistics.median(values) for count, values in steps.items()}


def _facts(file: Path, document: dict[str, Any]) -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True).stdout.split("\n") if shutil.which("nvidia-smi") else []
    return {
        **{"file": str(file), "began": datetime.now(UTC).isoformat(timespec="seconds"), "gpus": [g for g in gpus if g]},
        **{"commit": os.environ.get("COMMIT") or _commit(), "deployment": json.loads(json.dumps(document))},
        **{"versions": {name: _version(name) for name in ("vllm", "sglang", "torch", "triton", "transformers")}, "modes": {}},
    }


def _commit() -> str | None:
    done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
    return done.stdout.strip() or None


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
        raise TimeoutError(f"not done after {seconds} s" if number == signal.SIGALRM else "asked to stop")

    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, stop)
    signal.alarm(seconds)


def _keep_logs(source: Path, folder: Path) -> None:
    """The ends of a run's logs."""
    for log in source.glob("*.log") if source.is_dir() else [source]:
        (folder / log.name).write_text(_tail(log, 200_000))


def _tail(log: Path, size: int = 3000) -> str:
    return log.read_text(errors="replace")[-size:]


def _post(served: Served, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{served.url}{route}", json=body, timeout=300.0, trust_env=False)
    if response.is_error:
        raise RuntimeError(f"{route}: status {response.status_code}: {response.text[:500]}")
    answer: dict[str, Any] = response.json()
    return answer


if __name__ == "__main__":
    app()
