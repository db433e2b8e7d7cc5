"""A launch in this package's words: which of its flags the file's own keys say, and which stay the engine's."""

import re
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import JsonValue

from ep_backend.deployment.engines.traits import TRAITS, Engine
from ep_backend.deployment.flags import EXTRA, LEASE, NIXL, further_transfer
from ep_backend.deployment.migrate.launches import Launch, spelt
from ep_backend.deployment.migrate.notes import Kind, Note, Unmovable
from ep_backend.deployment.schema import ModeName, RoleName
from ep_backend.values import HOST

# Their values are where something runs, which is decided where it is started.
PLACES = {
    "sglang": ("host", "port", "node-rank", "dist-init-addr", "disaggregation-bootstrap-port"),
    "vllm": (
        *("host", "port", "headless", "data-parallel-address", "data-parallel-rpc-port", "data-parallel-start-rank"),
        *("data-parallel-rank", "node-rank", "master-addr", "master-port", "data-parallel-supervisor-port"),
    ),
}
BALANCERS = ("data-parallel-hybrid-lb", "data-parallel-external-lb", "data-parallel-multi-port-external-lb")
RENAMED = {
    "sglang": {"cuda-graph-bs": "cuda-graph-bs-decode", "cuda-graph-max-bs": "cuda-graph-max-bs-decode"},
    "vllm": {"max-seq-len-to-capture": "max-cudagraph-capture-size"},
}
DECODE_GRAPHS = ("cuda-graph-bs", "cuda-graph-max-bs")
CAPACITY = {
    "sglang": ("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"),
    "vllm": (),
}
DYNAMO_ROLES: dict[str, RoleName] = {"is-prefill-worker": "prefill", "is-decode-worker": "decode"}
# Keys of --kv-transfer-config that are not carried, and why.
TRANSFER_LOST = {
    "kv_buffer_device": "topology.device decides it",
    **dict.fromkeys(("engine_id", "kv_port"), "the engine chooses it where it is started"),
    **dict.fromkeys(("kv_ip", "kv_rank", "kv_parallel_size", "kv_buffer_size"), "today's engine has no such key"),
}
VLLM_MODES = {"deepep_high_throughput": "normal", "deepep_low_latency": "low_latency"}


@dataclass
class Draft:
    """A role as it will stand in the file."""

    name: RoleName
    engine: Engine
    nodes: int
    data_parallel: int
    model: str
    served: str
    ep: dict[str, Any] = field(default_factory=dict)
    args: dict[str, JsonValue] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    listens: tuple[str | None, int | None] = (None, None)
    image: str | None = None

    @property
    def ranks(self) -> int:
        traits = TRAITS[self.engine]
        tensor_parallel = self.args.get(traits.tensor_parallel_flag)
        if traits.tensor_parallel_is_all:
            return tensor_parallel if isinstance(tensor_parallel, int) else self.data_parallel
        return self.data_parallel * (tensor_parallel if isinstance(tensor_parallel, int) else 1)

    def note(self, kind: Kind, what: str, became: str, why: str) -> None:
        self.notes.append(Note(kind, self.name, what, became, why))


def draft(launch: Launch, role: RoleName | None) -> Draft:
    """The role of a launch. `role`: which one, where the command does not tell. Raises Unmovable."""
    flags = dict(launch.flags)
    name = told_role(launch) or role or _guessed_role(launch)
    for flag in ("disaggregation-mode", *DYNAMO_ROLES):
        flags.pop(flag, None)
    made = Draft(name, launch.engine, 1, 1, "", "", env=dict(launch.env), image=launch.image)
    for said in launch.said:
        made.note(*said)
    model = flags.pop("model-path", None)
    if not isinstance(model, str):
        raise Unmovable(f"the {launch.engine} command names no model; add --{TRAITS[launch.engine].model_flag} PATH_OR_ID")
    made.model = model
    served = flags.pop("served-model-name", None)
    # Without the flag both engines serve under the model as it was given; clients keep asking for that name.
    made.served = str(served[0] if isinstance(served, list) else served) if served is not None else model
    for other in served[1:] if isinstance(served, list) else ():
        made.note("left out", spelt("served-model-name", other), "", "model.served_name is one name")
    host, port = flags.get("host"), flags.get("port")
    named = isinstance(host, str) and re.fullmatch(HOST, host)
    made.listens = (str(host) if named else None, port if isinstance(port, int) else None)
    for flag in PLACES[launch.engine]:
        if flag in flags and not (name == "unified" and flag in ("host", "port") and flags[flag] in made.listens):
            made.note("left out", spelt(flag, flags[flag]), "", "`up` and `render` set it where it is started")
        flags.pop(flag, None)
    for variable in CAPACITY[launch.engine]:
        if variable in made.env:
            made.ep["max_tokens"] = _integer(variable, made.env.pop(variable))
    if launch.program.startswith("dynamo.") and flags.pop("skip-tokenizer-init", False):
        made.note("left out", "--skip-tokenizer-init", "", "Dynamo's front end made tokens of texts; now the engine does")
    (_sglang if launch.engine == "sglang" else _vllm)(made, flags)
    for old, new in RENAMED[launch.engine].items():
        if old in flags:
            value = flags.pop(old)
            if old in DECODE_GRAPHS and name == "prefill":
                made.note("left out", spelt(old, value), "", "sizes of decode graphs, which a prefill role does not capture")
            else:
                flags[new] = value
                made.note("changed", spelt(old, value), f"args.{new}", "the engine renamed it")
    made.args |= flags
    if launch.before:
        made.note("left out", " ".join(launch.before), "", "what came before the engine's program is the target's")
    return made


def _sglang(made: Draft, flags: dict[str, JsonValue]) -> None:
    tensor_parallel = _integer("--tp-size", flags.pop("tp-size", 1))
    replicas, attention = flags.pop("dp-size", None), flags.pop("attn-dp-size", None)
    if flags.pop("enable-dp-attention", False):
        made.note("changed", "--enable-dp-attention", "data_parallel", "rendered as the version's own flag")
        attention = attention or replicas
    elif replicas not in (None, 1):
        why = "without --enable-dp-attention these are independent replicas; start the deployment that many times"
        made.note("left out", spelt("dp-size", replicas), "", why)
    made.data_parallel = _integer("--attn-dp-size", attention or 1)
    made.nodes = _integer("--nnodes", flags.pop("nnodes", 1))
    if tensor_parallel != made.data_parallel:
        made.args["tp-size"] = tensor_parallel
    if (size := flags.pop("ep-size", tensor_parallel)) not in (1, tensor_parallel):
        made.note("left out", spelt("ep-size", size), "", f"experts are spread over all {tensor_parallel} ranks here")
    backend = flags.pop("moe-a2a-backend", None)
    if any([flags.pop("enable-deepep-moe", False), flags.pop("enable-ep-moe", False)]) and backend is None:
        backend = "deepep"
    made.note("changed", f"MoE all-to-all {backend or 'none'}", "ep", "ep_backend takes its place")
    wished = [flags.pop("deepep-mode", None), flags.pop("deepep-v2-mode", None)]
    made.ep["mode"] = next((mode for mode in wished if mode in get_args(ModeName)), "auto")
    config = flags.pop("deepep-config", None)
    if isinstance(config, dict):
        dispatch = config.get("normal_dispatch")
        sms = dispatch.get("num_sms") if isinstance(dispatch, dict) else None
        if isinstance(sms, int):
            made.ep["sms"] = sms
        made.note("changed", "--deepep-config", f"ep.sms: {sms}", "its buffer and chunk sizes have no counterpart here")
    elif config is not None:
        made.note("left out", spelt("deepep-config", config), "", "a file that is not here; its num_sms would be ep.sms")
    if flags.pop("enable-two-batch-overlap", False):
        made.ep |= {"overlap": "tbo", "lanes": 2}
    redundant = flags.pop("ep-num-redundant-experts", None)
    if redundant:
        made.ep["redundant_experts"] = _integer("--ep-num-redundant-experts", redundant)
    if flags.pop("prefill-round-robin-balance", False):
        why = "it is gone: `load-balance-method: round_robin` in the prefill role does it"
        made.note("left out", "--prefill-round-robin-balance", "", why)
    if made.name != "unified" and "disaggregation-transfer-backend" not in flags:
        flags["disaggregation-transfer-backend"] = "mooncake"
        made.note("added", "KV transfer", "args.disaggregation-transfer-backend: mooncake", "SGLang's default; here it is nixl")
    if flags.get("disable-cuda-graph") and made.name == "prefill":
        flags.pop("disable-cuda-graph")
        made.note("left out", "--disable-cuda-graph", "", "a prefill role captures no decode graphs")


def _vllm(made: Draft, flags: dict[str, JsonValue]) -> None:
    made.data_parallel = _integer("--data-parallel-size", flags.pop("data-parallel-size", 1))
    local = flags.pop("data-parallel-size-local", None)
    nodes = flags.pop("nnodes", None)
    if local is not None:
        made.nodes = max(1, made.data_parallel // max(1, _integer("--data-parallel-size-local", local)))
    elif nodes is not None:
        made.nodes = _integer("--nnodes", nodes)
    if flags.get("tensor-parallel-size") == 1:
        flags.pop("tensor-parallel-size")
    flags.pop("enable-expert-parallel", None)
    named = [flags.pop("all2all-backend", None), made.env.pop("VLLM_ALL2ALL_BACKEND", None)]
    backend = next((str(each) for each in named if each), "none")
    made.note("changed", f"MoE all-to-all {backend}", "ep", "ep_backend takes its place")
    made.ep["mode"] = VLLM_MODES.get(backend, "auto")
    if flags.pop("enable-dbo", False):
        made.ep |= {"overlap": "dbo", "lanes": 2}
    for flag in BALANCERS:
        if flags.pop(flag, False):
            why = "the leader's API servers spread requests over all ranks"
            made.note("left out", f"--{flag}", "", why)
    _kv_transfer(made, flags.pop("kv-transfer-config", None))
    _redundant_experts(made, flags)


def _kv_transfer(made: Draft, given: JsonValue) -> None:
    """What the file does not decide of the transfer of KV blocks stays the engine's flag, which `engine_flags` completes."""
    if not isinstance(given, dict):
        return
    connector, unified = given.get("kv_connector"), made.name == "unified"
    if unified:
        made.note("left out", f"KV connector {connector}", "", "a unified role moves no KV blocks")
    elif connector != NIXL:
        made.note("changed", f"KV connector {connector}", NIXL, "the one that the router here speaks to")
    further, extra = further_transfer(given), given.get(EXTRA)
    lost = [(key, given[key], why) for key, why in TRANSFER_LOST.items() if key in given]
    further = {key: value for key, value in further.items() if key not in TRANSFER_LOST}
    if isinstance(extra, dict) and LEASE in extra:
        lost.append((f"{EXTRA}.{LEASE}", extra[LEASE], "control.flip_timeout_s and target.drain_timeout_s decide it"))
    if unified or connector != NIXL:
        lost += [(key, value, f"it is of {connector}") for key, value in further.items()]
    elif further:
        made.args["kv-transfer-config"] = further
    for key, value, why in lost:
        made.note("left out", spelt(f"kv-transfer-config.{key}", value), "", why)


def _redundant_experts(made: Draft, flags: dict[str, JsonValue]) -> None:
    config = flags.get("eplb-config")
    old = flags.pop("num-redundant-experts", None)
    given = config.get("num_redundant_experts") if isinstance(config, dict) else old
    if given is None:
        return
    number = _integer("num_redundant_experts", given, least=0)
    flags["eplb-config"] = {**(config if isinstance(config, dict) else {}), "num_redundant_experts": number}
    made.ep["redundant_experts"] = number
    if old is not None:
        made.note("changed", spelt("num-redundant-experts", old), "args.eplb-config", "the engine renamed it")


def told_role(launch: Launch) -> RoleName | None:
    """prefill or decode where the command itself says it. Raises Unmovable."""
    said = launch.flags.get("disaggregation-mode")
    said = next((name for flag, name in DYNAMO_ROLES.items() if launch.flags.get(flag)), said)
    transfer = launch.flags.get("kv-transfer-config")
    if transfer is not None and not isinstance(transfer, dict):
        raise Unmovable(f"--kv-transfer-config is {transfer!r}, must be a JSON object; quote it as '{{\"kv_connector\": ...}}'")
    part = transfer.get("kv_role") if isinstance(transfer, dict) else None
    if said in ("prefill", "decode"):
        return "prefill" if said == "prefill" else "decode"
    return {"kv_producer": "prefill", "kv_consumer": "decode"}.get(str(part))  # type: ignore[return-value]


def _guessed_role(launch: Launch) -> RoleName:
    """The role that names or the backend suggest; unified where nothing moves KV blocks."""
    transfer = launch.flags.get("kv-transfer-config")
    part = transfer.get("kv_role") if isinstance(transfer, dict) else None
    if part is None:
        return "unified"
    names = " ".join(launch.hints).lower()
    backend = str(launch.flags.get("all2all-backend") or launch.env.get("VLLM_ALL2ALL_BACKEND"))
    for name in ("prefill", "decode"):
        if name in names and ({"prefill": "decode", "decode": "prefill"}[name] not in names):
            return "prefill" if name == "prefill" else "decode"
    if backend in VLLM_MODES:
        return "prefill" if VLLM_MODES[backend] == "normal" else "decode"
    raise Unmovable(f"kv_role is {part}, which does not tell prefill from decode; give each command alone, with --role")


def _integer(name: str, value: JsonValue, least: int = 1) -> int:
    number = int(value) if isinstance(value, str) and value.isdigit() else value
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        rule = f"must be a whole number of at least {least}; write it, or set the variable before the command"
        raise Unmovable(f"{name} is {value!r}, {rule}")
    return number
