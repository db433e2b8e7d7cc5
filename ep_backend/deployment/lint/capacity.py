"""Rules on what a rank may dispatch, and on the memory that takes."""

from collections.abc import Iterator
from pathlib import Path

from ep_backend.deployment.batches import batch_limit, chunk, eager, largest_bucket, tokens_a_sequence, whole_prompts
from ep_backend.deployment.buffers import buffer_config
from ep_backend.deployment.lint.view import RoleView, problem
from ep_backend.deployment.problems import Problem
from ep_backend.deployment.resolve import limited_as_grouped
from ep_backend.deployment.schema import Deployment
from ep_backend.layout import COUNT_BITS, COUNT_MASK, MAX_TOP_K, SCALE_GROUP
from ep_backend.plan.calibration import calibrations, read_counts, recalibrated
from ep_backend.plan.memory import memory

WASTE = 4
CHUNK, CHUNK_FLAG = 2048, "chunked-prefill-size"
HIGHEST_FRACTION = 0.95


def check_engine_limits(view: RoleView) -> Iterator[Problem]:
    """What vLLM compares at start; limits that are not given follow the others."""
    role = view.role
    batch = role.number("max-num-batched-tokens")
    if role.engine != "vllm" or batch is None:
        return
    least = {"max-num-seqs": role.number("max-num-seqs") or 0}
    if whole_prompts(role):
        least["max-model-len"] = role.number("max-model-len") or 0
    for flag, number in least.items():
        if batch < number:
            also = ", which must fit whole without chunked prefill" if flag == "max-model-len" else ""
            what = f"is {batch}, but {flag} is {number}{also}"
            it = "it and ep.max_tokens" if number > (role.ep.max_tokens or number) else "it"
            yield problem("EP123", view.flag_place("max-num-batched-tokens"), what, f"set {it} to {number}, or lower {flag}")


def check_chunk(view: RoleView) -> Iterator[Problem]:
    """SGLang takes -1 for prompts that are never cut, and slots are made for a batch that has an end."""
    if _without_end(view):
        given, ranks, rows = view.role.number(CHUNK_FLAG), view.role.data_parallel, view.role.ep.max_tokens or CHUNK
        what = f"is {given}, which is no limit to what each of {ranks} ranks may dispatch in a step"
        yield problem("EP102", view.flag_place(CHUNK_FLAG), what, f"set it to {rows * ranks}, {rows} a rank")


def _without_end(view: RoleView) -> bool:
    """Nothing bounds the role's prompts, so that no capacity follows from them."""
    given = view.role.number(CHUNK_FLAG)
    prefills = view.role.engine == "sglang" and view.name != "decode"
    return prefills and given is not None and given < view.role.data_parallel


def check_capacity(view: RoleView) -> Iterator[Problem]:
    role, capacity = view.role, view.role.ep.max_tokens
    if capacity is None or _without_end(view):
        return
    place = (*view.place, "ep", "max_tokens")
    batch, each = batch_limit(view.deployment, view.name, role), tokens_a_sequence(role)
    bucket_flag, bucket = largest_bucket(role)
    flag, sequences = _sequences(view)
    if role.engine == "vllm" and batch > capacity:
        flag_rules = role.arg("max-num-batched-tokens") == batch
        fix = f", or max-num-batched-tokens to {capacity}" if view.deployment.topology.device == "cuda" else ""
        yield problem(
            "EP102",
            place,
            f"is {capacity}, but {'max-num-batched-tokens' if flag_rules else 'the batch of vLLM'} is {batch} tokens a rank, "
            "and one step may dispatch them all",
            f"set max_tokens to {batch}{fix}",
        )
    elif role.engine == "sglang" and view.name != "decode" and (tokens := chunk(view.deployment, role)) > capacity:
        yield problem(
            "EP102",
            place,
            f"is {capacity}, but chunked-prefill-size over {role.data_parallel} ranks is {tokens} tokens a rank",
            f"set max_tokens to {tokens}, or chunked-prefill-size to {capacity * role.data_parallel}",
        )
    elif sequences * each > capacity and not any(check_engine_limits(view)):  # else the fault is told there
        times = f" of {each} tokens each" if each > 1 else ""
        yield problem(
            "EP103",
            place,
            f"is {capacity}, but {flag} is {sequences}{times}, and a decode step dispatches "
            f"{'one token a sequence' if each == 1 else f'{sequences * each} tokens'}",
            f"set max_tokens to {sequences * each}, or lower {flag.split()[0]}",
        )
    if bucket > capacity:
        yield problem(
            "EP101",
            view.flag_place(bucket_flag, "compilation-config", "cudagraph-capture-sizes"),
            f"captures a batch of {bucket} tokens, but ep.max_tokens is {capacity}",
            f"set max_tokens to {bucket}, or a largest bucket of {capacity // (each if role.engine == 'sglang' else 1)}",
        )
    elif role.engine == "sglang" and view.name != "prefill" and not bucket and not eager(role):
        what = f"is {capacity}, but no flag bounds the decode graphs: SGLang chooses their buckets by GPU memory"
        yield problem("EP109", place, what, f"set cuda-graph-max-bs-decode: {capacity // each}")
    most = max(batch, sequences * each, bucket)
    if role.engine == "vllm" and WASTE * most < capacity <= _countable(view):
        yield problem("EP105", place, f"is {capacity}, but no batch has more than {most} tokens", f"set max_tokens to {most}")


def check_lanes(view: RoleView) -> Iterator[Problem]:
    ep = view.role.ep
    if ep.overlap != "none" and ep.lanes != 2:
        yield problem(
            "EP210",
            (*view.place, "ep", "lanes"),
            f"is 1, but overlap: {ep.overlap} runs two micro-batches",
            "set lanes: 2",
        )
    if ep.overlap == "none" and ep.lanes == 2:
        yield problem("EP106", (*view.place, "ep", "lanes"), "is 2, but nothing overlaps", "set lanes: 1, or overlap")


def check_payload(view: RoleView) -> Iterator[Problem]:
    ep, shape = view.role.ep, view.shape
    on_gpus = view.deployment.topology.device != "cpu"
    if on_gpus and shape is not None and shape.fp8_experts and "fp8" not in ep.model_fields_set:
        what = "has no fp8, but the model's experts take FP8 rows"
        yield problem("EP215", (*view.place, "ep"), what, "set fp8: true, or fp8: false if bf16 rows are wanted")


def check_shape(view: RoleView) -> Iterator[Problem]:
    """The buffer's own rules; the two that have their own code first."""
    shape, ep = view.shape, view.role.ep
    if shape is None or view.group is None or (shape.experts + ep.redundant_experts) % view.group.ranks:
        return
    if _without_end(view):
        return
    if shape.top_k > MAX_TOP_K:
        yield problem(
            "EP107", ("model",), f"picks {shape.top_k} experts a token, must be at most {MAX_TOP_K}", "choose another"
        )
    elif shape.hidden % (SCALE_GROUP if ep.fp8 else 8):
        group = SCALE_GROUP if ep.fp8 else 8
        where = (*view.place, "ep", "fp8") if ep.fp8 else ("model",)
        what = f"has rows of {shape.hidden}, no multiple of {group}"
        yield problem("EP108", where, what, "set fp8: false" if ep.fp8 else "pad the hidden size")
    elif view.capacity > (most := _countable(view)):
        what = f"is {view.capacity}, must be at most {most}: counts have {COUNT_BITS} bits, token indices of all ranks 31"
        yield problem("EP104", (*view.place, "ep", "max_tokens"), what, f"set max_tokens to {most} or less")
    else:
        try:
            buffer_config(view.deployment, view.name, view.role, shape, view.capacity)
        except ValueError as error:
            what, _, fix = str(error).partition("; ")
            yield problem("EP104", (*view.place, "ep"), what, fix or "change one of these numbers")


def _countable(view: RoleView) -> int:
    """Tokens a rank that the words of the protocol can count."""
    return min(COUNT_MASK, ((1 << 31) - 1) // view.role.ep_size)


def check_memory(view: RoleView) -> Iterator[Problem]:
    if view.shape is None or view.group is None or view.machine.hbm is None or view.deployment.topology.device == "cpu":
        return
    try:
        need = memory(view.deployment, view.name, view.role, view.shape, view.capacity)
    except ValueError:
        return
    place = (*view.place, "ep", "max_tokens")
    if need.kv_bytes <= 0:
        yield problem(
            "EP120",
            place,
            f"leaves nothing: weights {need.gib(need.weight_bytes)} + buffer {need.gib(need.buffer_bytes)} + reserve "
            f"{need.gib(need.reserve_bytes)} exceed {need.fraction:.2f} of {need.gib(need.hbm_bytes)}",
            f"use a capacity of at most {need.largest_capacity}" if need.largest_capacity else "use more ranks",
        )
    elif need.context and need.sequences == 0:
        yield problem(
            "EP121",
            place,
            f"leaves {need.gib(need.kv_bytes)} for KV, less than one sequence of {need.context} tokens",
            "lower the context length or max_tokens",
        )
    if need.fraction > HIGHEST_FRACTION:
        what = f"is {need.fraction}, above {HIGHEST_FRACTION}"
        yield problem("EP122", view.flag_place(view.role.traits.fraction_flag), what, f"use {HIGHEST_FRACTION} or less")


def check_measurements(deployment: Deployment, views: list[RoleView]) -> Iterator[Problem]:
    """Files and numbers that the cost model was told to use."""
    routing = deployment.model.routing
    given = [value for value in (routing.nodes_per_token, routing.expert_counts) if value is not None]
    if (routing.kind == "measured") != bool(given) or len(given) > 1:
        what = f"is {routing.kind} with {len(given)} measurements"
        yield problem("EP130", ("model", "routing", "kind"), what, "give nodes_per_token or expert_counts with measured only")
    spans = [view.group.nodes for view in views if view.group is not None]
    if routing.nodes_per_token is not None and spans and routing.nodes_per_token > max(spans):
        what = f"is {routing.nodes_per_token:g}, but the roles span {max(spans)} NVLink domain(s) at most"
        yield problem("EP130", ("model", "routing", "nodes_per_token"), what, f"give a mean of {max(spans)} or less")
    for place, file in (
        (("model", "routing", "expert_counts"), routing.expert_counts),
        (("topology", "bench"), deployment.topology.bench),
    ):
        for fault in _faults(place[-1], file, views) if file is not None else ():
            yield problem("EP131", place, fault, "see docs/plan.md")
    for view in views:
        if routing.kind != "group_limited" or view.shape is None or view.group is None:
            continue
        if not limited_as_grouped(view.shape, view.group, view.role.ep.redundant_experts):
            what = f"is group_limited, but {view.name}'s {view.group.ranks} ranks do not line up with the groups"
            yield problem("EP132", ("model", "routing", "kind"), what, "use uniform")


def _sequences(view: RoleView) -> tuple[str, int]:
    if view.role.engine == "sglang":
        running = view.role.number("max-running-requests") or 0
        return f"max-running-requests over {view.role.data_parallel} ranks", running // view.role.data_parallel
    return "max-num-seqs", view.role.number("max-num-seqs") or 0


def _faults(kind: str, file: Path, views: list[RoleView]) -> Iterator[str]:
    try:
        if kind == "bench":
            recalibrated(calibrations()["link-rate"], file)
            return
        counted = len(read_counts(file)[0])
    except UnicodeDecodeError:
        yield f"{file} is no text in UTF-8"
        return
    except ValueError as error:
        yield str(error)
        return
    for view in views:
        slots = (view.experts or counted) + view.role.ep.redundant_experts
        if counted != slots:
            yield f"{file} counts {counted} experts, but {view.name} has {slots}"
