"""What a deployment file may say. The only model of it: later features extend this one."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ep_backend.config import MAX_COUNT, TIMEOUT_S
from ep_backend.deployment.engines.traits import TRAITS, Engine, Traits
from ep_backend.deployment.presets import models, topologies
from ep_backend.modes import MODES, Family, Mode
from ep_backend.plan.calibration import calibrations
from ep_backend.values import HOST, KEY, NAME, Host, Key, Name, Port, Positive, Rate, Seconds, Strict

ModeName = Literal["auto", "normal", "direct", "low_latency", "hybrid"]
RoleName = Literal["prefill", "decode", "unified"]
TargetKind = Literal["local", "shell", "slurm", "lws", "disaggregatedset"]
KUBERNETES: tuple[TargetKind, ...] = ("lws", "disaggregatedset")
ENV_NAME, HCA = r"^[A-Za-z_][A-Za-z0-9_]*$", r"^[A-Za-z0-9_.-]+(:[1-9][0-9]*)?$"
MOUNT, NAMESPACE = r"^/.*[^/]$", r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
PATTERNS = {
    NAME: "1 to 63 of a-z, 0-9, `.`, `_` and `-`, the first a letter or digit",
    ENV_NAME: "letters, digits and `_`, the first no digit",
    HOST: "a host name or an address",
    KEY: "visible ASCII characters, for it travels in an HTTP header",
    HCA: "a device such as mlx5_0, or mlx5_0:1 with its port",
    MOUNT: "a path that begins with `/` and does not end with it",
    NAMESPACE: "1 to 63 of a-z, 0-9 and `-`, the first and last a letter or digit",
}
"""What texts of these forms are, in words."""
EnvName = Annotated[str, Field(pattern=ENV_NAME)]
Hca = Annotated[str, Field(pattern=HCA, examples=["mlx5_0:1"])]
SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LEAST_BYTES = 1 << 20  # a smaller number lacks its unit
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(value: object) -> object:
    """A size such as 64GiB, or bytes."""
    if isinstance(value, str):
        number, unit = value.strip(), 1
        for name, factor in UNITS.items():
            if number.endswith(name):
                number, unit = number.removesuffix(name), factor
                break
        try:
            value = int(float(number) * unit)
        except (ValueError, OverflowError):
            choices = ", ".join(UNITS)
            raise PydanticCustomError("size", "must be a size such as 64GiB ({choices})", {"choices": choices}) from None
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < LEAST_BYTES:
        raise PydanticCustomError("bytes", "is a number of bytes, must be at least 1 MiB", {})
    return value


Bytes = Annotated[
    int, BeforeValidator(_bytes), Field(gt=0), WithJsonSchema({"type": ["string", "integer"], "examples": ["64GiB"]})
]


@dataclass(frozen=True)
class Named:
    """A name of a table that ships with the package."""

    kind: str
    table: Callable[[], Mapping[str, Any]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema) | {"enum": list(self.table())}

    def _known(self, name: str) -> str:
        if name not in self.table():
            context = {"kind": self.kind, "names": list(self.table())}
            raise PydanticCustomError("preset", "is no {kind} preset", context)
        return name


TopologyPreset = Annotated[str, Named("topology", topologies)]
ModelPreset = Annotated[str, Named("model", models)]
CalibrationName = Annotated[str, Named("calibration", calibrations)]


class Nic(Strict):
    """A GPU's port to other nodes."""

    gbs: Rate = Field(description="effective GB/s (1e9 bytes) a GPU, one direction")
    kind: Literal["ib", "roce", "efa"] = "ib"
    fabric: Literal["full", "rail_only"] = Field(
        default="full", description="rail_only: a NIC reaches only NICs of its own index on other nodes"
    )
    devices: list[Hca] = Field(
        default=[], description="HCA and port of each GPU of a host, in nvidia-smi's order; default: NVSHMEM takes the nearest"
    )


class Topology(Strict):
    """The machines: a preset, and numbers that replace the preset's.

    `gpus_per_node` below the real number makes virtual nodes, to run both hops on one host.
    """

    preset: TopologyPreset | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    nodes: Positive = 1
    gpus_per_node: Positive | None = None
    gpu: str | None = None
    sms: Positive | None = Field(default=None, description="streaming multiprocessors of a GPU")
    hbm: Bytes | None = Field(default=None, description="memory of a GPU")
    nvlink_domain: Positive | None = Field(default=None, description="GPUs joined by NVLink; default: those of a node")
    nvlink_gbs: Rate | None = Field(default=None, description="effective GB/s that a GPU sends over NVLink")
    nic: Nic | None = None
    calibration: CalibrationName | None = Field(default=None, description="of the cost model; default: the preset's")
    bench: Path | None = Field(default=None, description="JSON lines of `ep-backend bench` that replace what they measured")


class Routing(Strict):
    """How tokens choose experts, for the cost model. Copies per token follow from it."""

    kind: Literal["uniform", "group_limited", "measured"] = "uniform"
    nodes_per_token: Rate | None = Field(default=None, description="measured: mean distinct nodes of a token")
    expert_counts: Path | None = Field(default=None, description="measured: JSON with `expert_counts`, a row a layer")


class Model(Strict):
    """A checkpoint, or a preset to plan with; numbers given here replace what its config.json says."""

    path: Path | None = None
    preset: ModelPreset | None = None
    source: str | None = Field(
        default=None, min_length=1, description="what rendered commands load: a folder on the nodes, or an id of a hub"
    )
    served_name: str = "model"
    hidden: Positive | None = None
    experts: Positive | None = None
    top_k: Positive | None = None
    groups: Positive | None = None
    top_groups: Positive | None = None
    moe_layers: Positive | None = None
    routing: Routing = Routing()


class Ep(Strict):
    """One role's expert-parallel backend."""

    mode: ModeName = "auto"
    max_tokens: Positive | None = Field(default=None, description="rows a rank may dispatch; default: the batch limit")
    sms: Positive | None = Field(default=None, description="SMs that a kernel may use; default: the mode's own choice")
    overlap: Literal["none", "dbo", "tbo"] = Field(default="none", description="two micro-batches: dbo in vLLM, tbo in SGLang")
    fp8: bool = False
    layout: Literal["masked", "compact"] | None = Field(
        default=None, description="of the rows that vLLM's decode modes give its experts; default: by the experts it has"
    )
    lanes: Literal[1, 2] = 1
    redundant_experts: int = Field(default=0, ge=0, le=MAX_COUNT, description="replicas that the load balancer may place")
    gpus_per_node: Positive | None = Field(default=None, description="default: the topology's")
    rail: Literal["put"] | None = Field(
        default=None,
        description="put: hybrid, then the role's only mode, reaches other domains by NVSHMEM's puts; default: stores to peers",
    )
    timeout_s: Seconds = TIMEOUT_S


class Image(Strict):
    """A container image, and the versions of packages in it that matter to a check."""

    name: str | None = None
    packages: dict[str, str] = Field(default={}, description="for example {vllm: 0.33.0, torch: 2.14.0}")


class Role(Strict):
    engine: Engine = "vllm"
    nodes: Positive = 1
    data_parallel: Positive
    ep: Ep = Ep()
    args: dict[str, JsonValue] = Field(default={}, description="further flags of the engine, spelled as it spells them")
    env: dict[EnvName, str] = Field(default={})
    image: Image | None = Field(default=None, description="default: the target's")

    @field_validator("args")
    @classmethod
    def _json_as_mappings(cls, args: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """A mapping in a string, as a command line has it, is looked into like any other."""
        return {flag: _parsed(value) for flag, value in args.items()}

    def arg(self, flag: str) -> JsonValue | None:
        """The value of an engine flag, however its words are joined."""
        return self.flags.get(flag)

    @property
    def flags(self) -> dict[str, JsonValue]:
        """Flags by their dashed names; `flag.key` is a key of the flag's mapping, as in vLLM's parser.

        A `no-flag` that is on is the flag, off.
        """
        flags: dict[str, JsonValue] = {}
        for key, value in sorted(self.args.items(), key=lambda item: "." in item[0]):
            flag, *path = key.lstrip("-").split(".")
            flag = flag.replace("_", "-")
            if value is True and flag.startswith("no-"):
                flag, value = flag.removeprefix("no-"), False
            flags[flag] = _with_key(flags.get(flag), path, value) if path else value
        return flags

    def number(self, *flags: str) -> int | None:
        """The value of the first of these flags that is given as a whole number."""
        given = (whole_number(self.arg(flag)) for flag in flags)
        return next((value for value in given if value is not None), None)

    @property
    def ep_size(self) -> int:
        """Ranks."""
        tensor_parallel = self.number("tensor-parallel-size", "tp-size", "tp")
        if self.traits.tensor_parallel_is_all:
            return tensor_parallel or self.data_parallel
        return self.data_parallel * (tensor_parallel or 1)

    @property
    def traits(self) -> Traits:
        return TRAITS[self.engine]


def _with_key(mapping: JsonValue | None, path: list[str], value: JsonValue) -> JsonValue:
    """The mapping, with another value where the path leads."""
    if not path:
        return value
    held = mapping if isinstance(mapping, dict) else {}
    return {**held, path[0]: _with_key(held.get(path[0]), path[1:], value)}


def _parsed(value: JsonValue) -> JsonValue:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            parsed: JsonValue = json.loads(value)
            return parsed
    return value


def whole_number(value: JsonValue | None) -> int | None:
    """A number, also as the engines accept it in words: "8192", "8k" (8000), "8K" (8192)."""
    if isinstance(value, str) and (found := re.fullmatch(r"([+-]?\d{1,18}(?:\.\d{1,18})?)([kKmMgG]?)", value)):
        return int(float(found[1]) * SUFFIXES[found[2]])
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def decimal(value: JsonValue | None) -> float | None:
    """A number, also as the engines accept it in words: "0.9", ".9"."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value):
        return float(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


class Roles(Strict):
    """Either prefill and decode, or unified."""

    prefill: Role | None = None
    decode: Role | None = None
    unified: Role | None = None

    def items(self) -> list[tuple[RoleName, Role]]:
        pairs: list[tuple[RoleName, Role | None]] = [
            ("prefill", self.prefill),
            ("decode", self.decode),
            ("unified", self.unified),
        ]
        return [(name, role) for name, role in pairs if role is not None]


class Router(Strict):
    """The address that clients use; before a prefill/decode pair vllm-router listens there."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    hold: bool = Field(
        default=False,
        description="a door before it keeps requests waiting while a role restarts; all bytes then pass through Python",
    )


class Control(Strict):
    """The control service, and the agents in the engine's ranks that it asks."""

    host: Host = "127.0.0.1"
    port: Port | None = Field(default=None, description="of the service; default: a free one, which `status` names")
    key: Key | None = Field(default=None, description="needed where others can reach the host")
    flip_timeout_s: Seconds = Field(default=30.0, description="how long a change of mode may take before it is abandoned")


STOP_TIMEOUT_S = 20.0
RENDERED_MOUNTS = ("/dev/shm", "/etc/ep-backend")
"""Where render mounts memory, and the files of a role."""


class Volume(Strict):
    """A volume that every pod of the engines mounts."""

    mount: Annotated[str, Field(pattern=MOUNT, description="a folder in the container")]
    source: dict[str, JsonValue] = Field(
        min_length=1, max_length=1, description="as Kubernetes spells it, as {persistentVolumeClaim: {claimName: models}}"
    )
    read_only: bool = False


class Pod(Strict):
    """What a Kubernetes manifest or sbatch grants each worker."""

    namespace: Annotated[str, Field(pattern=NAMESPACE)] | None = None
    shm: Bytes | None = Field(default=None, description="size of /dev/shm")
    memory: Bytes | None = Field(default=None, description="limit of a container's memory, /dev/shm included")
    rdma: dict[str, Positive] = Field(default={}, description="RDMA resources a node, for example {rdma/ib: 8}")
    capabilities: list[str] = Field(default=[])
    host_network: bool = False
    volumes: list[Volume] = Field(
        default=[], description="a model's path below none of them is mounted from the folder of that name of each node"
    )

    @field_validator("volumes")
    @classmethod
    def _each_mount_once(cls, volumes: list[Volume]) -> list[Volume]:
        taken = [*RENDERED_MOUNTS]
        for volume in volumes:
            if volume.mount in taken:
                raise PydanticCustomError("mount", "has two volumes at {path}, must have one", {"path": volume.mount})
            taken.append(volume.mount)
        return volumes


class Target(Strict):
    """Where it runs: `up` starts local ones, `render` writes scripts or manifests for the others."""

    kind: TargetKind = "local"
    image: Image = Image()
    pod: Pod = Pod()
    namespaces: bool = Field(default=False, description="local: a role's launches in network namespaces, as nodes; needs root")
    start_timeout_s: Seconds = 600.0
    stop_timeout_s: Seconds = STOP_TIMEOUT_S
    drain_timeout_s: Seconds = Field(default=300.0, description="how long a restart waits for requests under way")


class Deployment(Strict):
    name: Name
    topology: Topology = Topology()
    model: Model
    roles: Roles
    router: Router = Router()
    control: Control = Control()
    target: Target = Target()


def json_schema() -> dict[str, Any]:
    """The schema that deploy/schema/deployment.json holds."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Deployment.model_json_schema()}


def modes_of(
    name: RoleName, mode: ModeName, several_nodes: bool = False, engine: Engine = "vllm", rail: str | None = None
) -> list[Mode]:
    """The modes that a role's buffer is made for: its whole family, so that a flip inside it needs no restart.

    Hybrid serves prefill too where there is a second node to save copies to. It alone can do without peers' memory.
    """
    if rail is not None:
        return [Mode.HYBRID]
    if name != "unified":
        families = [Family(name)]
    elif serves_both_families(name, engine):
        families = list(Family)
    elif mode == "auto":
        families = [Family.PREFILL]
    else:
        families = [MODES[Mode(mode)].family]
    return [each for each, spec in MODES.items() if spec.family in families or (each is Mode.HYBRID and several_nodes)]


def serves_both_families(name: RoleName, engine: Engine) -> bool:
    """In a unified role vLLM's experts keep one format; SGLang's take each batch's: a prompt's, or that of decoding.

    A mode is then of the batches of its family alone.
    """
    return name == "unified" and TRAITS[engine].both_families
