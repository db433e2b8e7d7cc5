"""What a deployment file may say. The only model of it: later features extend this one."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ep_backend.modes import MODES, Family, Mode

ModeName = Literal["auto", "normal", "direct", "low_latency", "hybrid"]
RoleName = Literal["prefill", "decode", "unified"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Topology(Strict):
    """The machines. `gpus_per_node` below the real number makes virtual nodes, to run both hops on one host."""

    device: Literal["cuda", "cpu"] = "cuda"
    nodes: Positive = 1
    gpus_per_node: Positive | None = None


class Model(Strict):
    path: Path
    served_name: str = "model"


class Ep(Strict):
    """One role's expert-parallel backend."""

    mode: ModeName = "auto"
    max_tokens: Positive | None = Field(default=None, description="rows a rank may dispatch; default: the batch limit")
    overlap: Literal["none", "dbo"] = "none"
    fp8: bool = False
    lanes: Literal[1, 2] = 1
    gpus_per_node: Positive | None = Field(default=None, description="default: the topology's")
    timeout_s: float = Field(default=60.0, gt=0)


class Role(Strict):
    engine: Literal["vllm"] = "vllm"
    nodes: Positive = 1
    data_parallel: Positive
    ep: Ep = Ep()
    args: dict[str, JsonValue] = Field(default={}, description="further flags of the engine, spelled as it spells them")
    env: dict[str, str] = {}

    def arg(self, flag: str) -> JsonValue | None:
        """The value of an engine flag, however its words are joined."""
        return self.flags.get(flag)

    @property
    def flags(self) -> dict[str, JsonValue]:
        return {key.replace("_", "-").lstrip("-"): value for key, value in self.args.items()}

    @property
    def ep_size(self) -> int:
        tensor_parallel = self.arg("tensor-parallel-size")
        return self.data_parallel * (tensor_parallel if isinstance(tensor_parallel, int) else 1)


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

    host: str = "127.0.0.1"
    port: Port = 8000


class Control(Strict):
    """The status agents in the engine's ranks."""

    host: str = "127.0.0.1"
    key: str | None = None


class Target(Strict):
    kind: Literal["local"] = "local"
    start_timeout_s: float = Field(default=600.0, gt=0)
    stop_timeout_s: float = Field(default=20.0, gt=0)


class Deployment(Strict):
    name: Name
    topology: Topology = Topology()
    model: Model
    roles: Roles
    router: Router = Router()
    control: Control = Control()
    target: Target = Target()


def modes_of(name: RoleName, mode: ModeName) -> list[Mode]:
    """The modes that a role's buffer is made for: its whole family, so that a flip inside it needs no restart."""
    if name != "unified":
        family = Family(name)
    elif mode == "auto":
        family = Family.PREFILL
    else:
        family = MODES[Mode(mode)].family
    return [candidate for candidate, spec in MODES.items() if spec.family is family]
