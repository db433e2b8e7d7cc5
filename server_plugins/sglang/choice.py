"""What SGLang's arguments and the deployment's settings ask of the backend; refuses what cannot work.

SGLang checks none of this for a DeepEP-class backend: it fails at graph capture, or under load.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from ep_backend.config import BufferConfig
from ep_backend.fabric import require_supported
from ep_backend.modes import Family, Mode
from ep_backend.policy import AUTO, Role, decide, family_of, modes_of
from ep_backend.settings import SETTINGS_VARIABLE, Settings, load_settings
from server_plugins.sglang import NAME
from server_plugins.sglang.plan import Plan, serves

FLAG = f"--moe-a2a-backend {NAME}"
CAPACITY_VARIABLE = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
DECODE_TOKENS = 128  # SGLang's own default of that variable
ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
DEEPEP_MODES = {(Family.PREFILL,): "normal", (Family.DECODE,): "low_latency"}


@dataclass(frozen=True)
class Arguments:
    """Those of SGLang's arguments that matter here, as resolved so far."""

    tp_size: int
    attn_dp_size: int
    nnodes: int
    pp_size: int
    moe_dp_size: int
    device: str
    disaggregation_mode: str
    deepep_mode: str
    deepep_config: str | None
    deepep_dispatcher_output_dtype: str
    chunked_prefill_size: int | None
    max_prefill_tokens: int
    enable_dynamic_chunking: bool
    enable_mixed_chunk: bool
    max_running_requests: int | None
    graph_max_bs: int
    """Largest batch of a decode graph, 0 without graphs."""
    draft_tokens: int
    """Most tokens a request takes in a decode batch, also in one of a draft: 1 without speculative decoding."""
    moe_a2a_backend: str
    speculative_moe_a2a_backend: str | None
    elastic_ep_backend: str | None
    enable_single_batch_overlap: bool
    enable_two_batch_overlap: bool

    @property
    def scatter(self) -> int:
        """Ranks over which the tokens of one attention-DP group are spread before they are dispatched."""
        return max(1, self.tp_size // self.attn_dp_size)


@dataclass(frozen=True)
class Choice:
    """Role and families, known before SGLang resolves its CUDA graphs."""

    settings: Settings
    role: Role
    families: tuple[Family, ...]

    @property
    def deepep_mode(self) -> str:
        return DEEPEP_MODES.get(self.families, "auto")


def require_names(a: Arguments) -> None:
    """The first check: of flags that name backends. ValueError says which to change."""
    ours, draft = a.moe_a2a_backend == NAME, a.speculative_moe_a2a_backend
    if draft == NAME and not ours:
        raise ValueError(
            f"--speculative-moe-a2a-backend {NAME} needs {FLAG} too, this is --moe-a2a-backend {a.moe_a2a_backend}; "
            "give both the same, or drop the speculative one"
        )
    if ours and draft not in (None, NAME, "none"):
        raise ValueError(
            f"--speculative-moe-a2a-backend {draft} cannot run beside {FLAG}: both would own the DeepEP formats; "
            f"use {NAME} or none, or drop the flag"
        )
    if ours and a.deepep_config:
        raise ValueError(
            f"--deepep-config {a.deepep_config!r} tunes DeepEP, which does not run here; drop it, and give sms in the "
            f"settings ({SETTINGS_VARIABLE})"
        )


def choose(a: Arguments) -> Choice:
    """Read the settings against the arguments; ValueError for what no batch could work with."""
    settings = load_settings()
    if a.elastic_ep_backend is not None:
        raise ValueError(
            f"--elastic-ep-backend {a.elastic_ep_backend} resizes a running EP group, which {NAME} does not; "
            "drop the flag, or use --moe-a2a-backend nixl"
        )
    if a.enable_single_batch_overlap:
        raise ValueError(
            f"--enable-single-batch-overlap starts combine while the experts still write, and {NAME}'s combine reads no "
            "signals of theirs (on SM90 SGLang refuses it as well); drop it, or use --enable-two-batch-overlap"
        )
    if a.enable_two_batch_overlap and settings.lanes == 1:
        raise ValueError("lanes=1 leaves no room for --enable-two-batch-overlap's second micro-batch; set lanes to 2")
    if settings.layout is not None:
        raise ValueError(
            f"layout={settings.layout.value} is for vLLM; SGLang's layout follows from each batch: remove it from the settings "
            f"({SETTINGS_VARIABLE})"
        )
    taken = ("auto", "bf16", "fp8") if settings.fp8 else ("auto", "bf16")
    if a.deepep_dispatcher_output_dtype not in taken:
        why = "rows travel as bf16 or FP8" if settings.fp8 else "the settings say fp8=false"
        raise ValueError(
            f"--deepep-dispatcher-output-dtype {a.deepep_dispatcher_output_dtype} must be one of {', '.join(taken)}: {why}; "
            "change the flag" + ("" if settings.fp8 else f", or fp8 in the settings ({SETTINGS_VARIABLE})")
        )
    if a.pp_size > 1 and settings.agent_port is not None:
        raise ValueError(
            f"--pp-size {a.pp_size} makes an EP group of each stage, and a deployment's agents "
            f"(agent_port={settings.agent_port}) are those of one group; use --pp-size 1, or remove agent_port from the "
            f"settings ({SETTINGS_VARIABLE})"
        )
    _require_layout(a)
    role = _role(a, settings)
    # With both families a mode is for batches of its own, as after a flip; the other's stay with auto.
    families = (Family.PREFILL, Family.DECODE) if role is Role.UNIFIED else (family_of(role, settings.mode),)
    return Choice(settings, role, _narrowed(families, a.deepep_mode, role, settings))


def plan_for(choice: Choice, a: Arguments, top_k: int) -> Plan:
    """Capacities, from the settings or from SGLang's own limits; ValueError where SGLang's batches would not fit."""
    limits: dict[Family, int] = {}
    if a.disaggregation_mode != "decode":
        limits[Family.PREFILL] = prefill_tokens(a)
    if a.disaggregation_mode != "prefill":
        decodes = Family.DECODE in choice.families
        limits[Family.DECODE] = decode_tokens(choice, a) if decodes else _tokens(decode_requests(a), a)
    per_node = choice.settings.gpus_per_node or _gpus_per_node(a)
    if a.tp_size % per_node:
        raise ValueError(f"gpus_per_node={per_node} does not divide --tp-size {a.tp_size}; set gpus_per_node to a divisor")
    plan = Plan(
        role=choice.role,
        families=choice.families,
        capacity={},
        tokens={},
        lanes=choice.settings.lanes or (2 if a.enable_two_batch_overlap else 1),
        ranks=a.tp_size,
        gpus_per_node=per_node,
        decode_graphs=a.graph_max_bs > 0,
        fabric="host" if a.device == "cpu" else "nvshmem",
    )
    capacity: dict[Mode, int] = {}
    tokens: dict[Family, int] = {}
    for family in choice.families:
        # One family alone serves every batch.
        tokens[family] = limits[family] if len(choice.families) > 1 else max(limits.values())
        capacity.update(_capacity(choice, plan, family, tokens[family], top_k, a))
    return plan.model_copy(update={"capacity": capacity, "tokens": tokens})


def prefill_tokens(a: Arguments) -> int:
    """Most tokens a rank dispatches in an extend batch. chunked_prefill_size counts for one attention-DP group."""
    chunk = a.chunked_prefill_size or 0
    if chunk <= 0:
        raise ValueError(
            f"--chunked-prefill-size {a.chunked_prefill_size} sets no limit to what a rank dispatches in one batch, "
            f"and {NAME}'s buffers have a fixed size; give it a number of tokens"
        )
    if a.enable_dynamic_chunking and a.pp_size > 1:  # chunks grow up to the other limit, and are tried at 1.25 times their size
        chunk = max(chunk, a.max_prefill_tokens, math.ceil(chunk * 1.25))
    if a.enable_mixed_chunk:
        chunk += decode_requests(a) * a.draft_tokens
    return -(-chunk // a.scatter)


def decode_requests(a: Arguments) -> int:
    """Most requests in one attention-DP group's decode batch, by SGLang's arguments; 0 if they do not say."""
    return max(1, a.max_running_requests // a.attn_dp_size) if a.max_running_requests else 0


def decode_tokens(choice: Choice, a: Arguments) -> int:
    """Most tokens a rank dispatches in a decode batch. ValueError if graphs or requests exceed the capacity given."""
    given = _given_decode_capacity(choice)
    requests = decode_requests(a)
    if a.graph_max_bs and (not requests or a.graph_max_bs <= requests):
        _require_fit(a.graph_max_bs, a, given, "--cuda-graph-max-bs-decode", "decode graphs of")
    if requests:
        _require_fit(requests, a, given, "--max-running-requests", "decode batches of")
        return _tokens(requests, a)
    if given is not None:
        return given
    return _tokens(a.graph_max_bs or DECODE_TOKENS // a.draft_tokens, a)


def max_running_requests(plan: Plan, a: Arguments) -> int | None:
    """The limit to give SGLang where it has none, so that no decode batch outgrows the buffers."""
    if a.max_running_requests or Family.DECODE not in plan.families:
        return None
    return max(1, plan.tokens[Family.DECODE] * a.scatter // a.draft_tokens) * a.attn_dp_size


def require_room(plan: Plan, hidden: int, num_experts: int, top_k: int, dtype: str, settings: Settings) -> None:
    """Apply the buffer's own rules to the model's shape, before weights are loaded."""
    if settings.rail == "put" and (others := plan.capacity.keys() - {Mode.HYBRID}):
        names = ", ".join(mode.value for mode in others)
        raise ValueError(
            f"rail put in the settings ({SETTINGS_VARIABLE}) leaves hybrid alone, but this instance runs {names}, too; serve "
            "prompts and decoding apart (--disaggregation-mode), or remove rail"
        )
    arguments = buffer_arguments(plan, settings, hidden, num_experts, top_k, (payload_of(dtype, plan),))
    require_supported(BufferConfig.make(plan.ranks, **arguments))


def buffer_arguments(
    plan: Plan, settings: Settings, hidden: int, num_experts: int, top_k: int, payloads: tuple[str, ...]
) -> dict[str, Any]:
    """Arguments of an EpBuffer of this instance, and of its BufferConfig."""
    return {
        "hidden": hidden,
        "num_experts": num_experts,
        "top_k": top_k,
        "max_tokens": {mode.value: n for mode, n in plan.capacity.items()},
        "lanes": plan.lanes,
        "payloads": payloads,
        "gpus_per_node": plan.gpus_per_node,
        "rail": settings.rail,
        "timeout_s": settings.timeout_s,
        "fabric": plan.fabric,
    }


def payload_of(dtype: str, plan: Plan) -> str:
    """What unquantised rows of the model's dtype are on the wire."""
    allowed = {"bfloat16": "bf16"} | ({"float32": "fp32"} if plan.fabric == "host" else {})
    if dtype not in allowed:
        raise ValueError(f"--dtype {dtype} cannot be dispatched; use {' or '.join(allowed)}")
    return allowed[dtype]


def _require_layout(a: Arguments) -> None:
    if a.moe_dp_size > 1:
        raise ValueError(
            f"--moe-data-parallel-size {a.moe_dp_size} splits the experts' ranks into groups, and {NAME} spans all of "
            f"--tp-size {a.tp_size}; leave it at 1"
        )
    if a.device == "cpu" and a.attn_dp_size != a.tp_size:
        raise ValueError(
            f"--attn-dp-size {a.attn_dp_size} with --tp-size {a.tp_size}: on a CPU SGLang cannot scatter the tokens of an "
            f"attention group over its ranks; use --attn-dp-size {a.tp_size}"
        )


def _role(a: Arguments, settings: Settings) -> Role:
    """The PD role and the settings must not contradict each other."""
    from_engine = ROLES.get(a.disaggregation_mode)
    if settings.role is None:
        return from_engine or Role.UNIFIED
    if from_engine not in (None, settings.role):
        raise ValueError(
            f"role {settings.role.value} contradicts --disaggregation-mode {a.disaggregation_mode}; "
            f"set role to {from_engine.value}, or change --disaggregation-mode"
        )
    return settings.role


def _narrowed(families: tuple[Family, ...], deepep_mode: str, role: Role, settings: Settings) -> tuple[Family, ...]:
    if deepep_mode == "auto":
        return families
    wish = settings.mode
    narrowed = tuple(f for f in families if DEEPEP_MODES[(f,)] == deepep_mode)
    if not narrowed or (wish != AUTO and not serves(Mode(wish), narrowed)):
        needed = families[0] if wish == AUTO else Mode(wish).spec.family
        raise ValueError(
            f"--deepep-mode {deepep_mode} contradicts role {role.value} with mode {getattr(wish, 'value', wish)}, which needs "
            f"{DEEPEP_MODES[(needed,)]}; leave --deepep-mode at auto, or change role or mode"
        )
    return narrowed


def _gpus_per_node(a: Arguments) -> int:
    return max(1, a.tp_size // max(1, a.nnodes // a.pp_size))


def _tokens(requests: int, a: Arguments) -> int:
    return -(-requests * a.draft_tokens // a.scatter)


def _given_decode_capacity(choice: Choice) -> int | None:
    given = [
        n
        for mode, n in choice.settings.max_tokens.items()
        if mode in modes_of(Family.DECODE) and (len(choice.families) == 1 or mode.spec.family is Family.DECODE)
    ]
    wish = choice.settings.mode
    if wish != AUTO and wish in choice.settings.max_tokens and serves(Mode(wish), choice.families) == (Family.DECODE,):
        return choice.settings.max_tokens[Mode(wish)]
    if given:
        return max(given)
    variable = os.environ.get(CAPACITY_VARIABLE)
    if variable and not (variable.isdecimal() and int(variable) > 0):
        raise ValueError(f"{CAPACITY_VARIABLE}={variable!r} must be a number of tokens above 0; change it, or unset it")
    return int(variable) if variable else None


def _require_fit(requests: int, a: Arguments, capacity: int | None, flag: str, what: str) -> None:
    need = _tokens(requests, a)
    if capacity is None or need <= capacity:
        return
    each = f"{a.draft_tokens} tokens a request"
    spread = f" over {a.scatter} ranks" if a.scatter > 1 else ""
    fits = capacity * a.scatter // a.draft_tokens
    total = fits * (a.attn_dp_size if flag == "--max-running-requests" else 1)
    raise ValueError(
        f"{what} {requests} requests x {each}{spread} make {need} tokens a rank, more than the capacity of {capacity}; "
        f"lower {flag} to {total}, or raise max_tokens of the decode modes ({SETTINGS_VARIABLE}, or {CAPACITY_VARIABLE}) "
        f"to {need}"
    )


def _capacity(choice: Choice, plan: Plan, family: Family, limit: int, top_k: int, a: Arguments) -> dict[Mode, int]:
    """max_tokens of the modes that the family's batches may use."""
    settings = choice.settings
    given = {m: n for m, n in settings.max_tokens.items() if family in serves(m, choice.families)}
    wish = plan.wish_for(family, settings.mode)
    if wish != AUTO:
        given.setdefault(Mode(wish), limit)
    if not given:
        every = {mode: limit for mode in modes_of(family) if family in serves(mode, choice.families)}
        return {decide(plan.situation(family, AUTO, limit, every, top_k, settings)).mode: limit}
    room = given[Mode(wish)] if wish != AUTO else max(given.values())
    if room < limit:
        names = ", ".join(f"{m.value}={n}" for m, n in given.items())
        raise ValueError(
            f"max_tokens ({names}) is less than the {limit} tokens that a rank dispatches in one prefill chunk; raise "
            f"max_tokens to {limit}, or lower --chunked-prefill-size to {room * a.scatter * a.attn_dp_size}"
        )
    return given
