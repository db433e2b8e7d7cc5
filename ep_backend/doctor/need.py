"""What a host must offer: derived from a deployment's roles, or, without a file, from what the host has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ep_backend.deployment.batches import capacity
from ep_backend.deployment.buffers import buffer_config
from ep_backend.deployment.resolve import ModelUnknown, group_of, shape_of, topology
from ep_backend.deployment.schema import Deployment, Role, RoleName
from ep_backend.doctor.host import Host, Unknown
from ep_backend.plan.memory import memory

Word = Literal["gpu", "gpus", "domain", "remote", "roce", "efa", "nodes", "cpu", "file"]
# Why a check with that word is skipped where the word does not hold.
WITHOUT: dict[Word, str] = {
    "gpu": "no rank runs on a GPU here",
    "gpus": "not more than one GPU a host",
    "domain": "no NVLink domain spans hosts",
    "remote": "no rank sends over a NIC",
    "roce": "no RoCE NICs",
    "efa": "no EFA NICs",
    "nodes": "one host, no other to agree with",
    "cpu": "no rank runs on the host fabric",
    "file": "no deployment file given (-f FILE)",
}


@dataclass(frozen=True)
class GpuMemory:
    """Bytes that a rank takes of its GPU, and the fraction of the GPU that its engine claims."""

    weights: float
    buffer: int
    reserve: int
    fraction: float

    @property
    def least(self) -> float:
        return self.weights + self.buffer + self.reserve


@dataclass(frozen=True)
class Need:
    """`words` say what kind of host it must be; the rest are this host's shares. `title` names the roles."""

    title: str
    words: frozenset[Word]
    ranks: int = 0
    gpu_memory: tuple[GpuMemory, ...] = ()
    heap_bytes: int | None = None
    """Shared memory of the host fabric's heaps; None: not known."""
    engines: tuple[str, ...] = ()
    ports: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    """What the roles set on top of the host's environment."""
    errors: tuple[str, ...] = ()
    """What is wrong with the file."""


def of_deployment(deployment: Deployment, only: RoleName | None, errors: tuple[str, ...] = ()) -> Need:
    """What one host of that role needs, or one that runs all roles of a local deployment.

    Raises ValueError if the deployment lacks the role, or if its ranks cannot be laid on machines.
    """
    roles = {name: role for name, role in deployment.roles.items() if only in (None, name)}
    if not roles:
        names = ", ".join(name for name, _ in deployment.roles.items())
        raise ValueError(f"{deployment.name} has no role {only}; it has {names}")
    needs = [_of_role(deployment, name, role) for name, role in roles.items()]
    together = sum if deployment.target.kind == "local" else max
    heaps = [need.heap_bytes for need in needs if need.heap_bytes is not None]
    ports = {"router": (deployment.router.host, deployment.router.port)}
    if deployment.control.port is not None:
        ports["control"] = (deployment.control.host, deployment.control.port)
    return Need(
        title=f"{deployment.name}: " + ", ".join(need.title for need in needs),
        words=frozenset[Word]({"file"}).union(*(need.words for need in needs)),
        ranks=together(need.ranks for need in needs),
        gpu_memory=tuple(held for need in needs for held in need.gpu_memory),
        heap_bytes=together(heaps) if len(heaps) == len(needs) else None,
        engines=tuple(dict.fromkeys(engine for need in needs for engine in need.engines)),
        ports=ports,
        env={key: value for need in needs for key, value in need.env.items()},
        errors=errors,
    )


def of_host(host: Host) -> Need:
    """Everything that the hardware of this host makes worth checking, where no file says what will run."""
    words: set[Word] = set()
    ranks = 0
    if host.has_driver:
        words.add("gpu")
        try:
            ranks = len(host.gpus())
        except Unknown:
            ranks = 0
        if ranks > 1:
            words.add("gpus")
        if host.exists("/dev/nvidia-caps-imex-channels"):
            words.add("domain")
    else:
        words.add("cpu")
    try:
        nics = host.names("/sys/class/infiniband")
    except Unknown:
        nics = []
    if nics:
        words |= {"remote", "nodes"}
        words |= {"roce"} if any(_is_ethernet(host, nic) for nic in nics) else set()
        words |= {"efa"} if any(nic.startswith(("efa", "rdmap")) for nic in nics) else set()
    engines = tuple(name for name in ("vllm", "sglang") if host.version(name))
    return Need("this host, without a deployment file", frozenset(words), ranks, engines=engines)


def _is_ethernet(host: Host, nic: str) -> bool:
    try:
        return host.read_if(f"/sys/class/infiniband/{nic}/ports/1/link_layer") == "Ethernet"
    except Unknown:  # a port that the driver has given up cannot be read
        return False


def _of_role(deployment: Deployment, name: RoleName, role: Role) -> Need:
    machine, group = topology(deployment.topology), group_of(deployment, role)
    ranks = -(-group.ranks // role.nodes)
    words: set[Word] = set()
    if role.nodes > 1:
        words.add("nodes")
    if deployment.topology.device == "cpu":
        words.add("cpu")
    else:
        words.add("gpu")
        words |= {"gpus"} if ranks > 1 else set()
        words |= {"domain"} if role.nodes > 1 and group.gpus_per_node > ranks else set()
        if role.nodes > 1 and group.nodes > 1:
            words.add("remote")
            kind = machine.nic.kind if machine.nic else "ib"
            words |= {"roce"} if kind == "roce" else {"efa"} if kind == "efa" else set()
    buffer = None
    held: tuple[GpuMemory, ...] = ()
    tokens = capacity(deployment, name, role)
    try:
        shape = shape_of(deployment.model)
        buffer = int(buffer_config(deployment, name, role, shape, tokens).size_hint()["total"])
        if "gpu" in words and machine.hbm is not None:
            planned = memory(deployment, name, role, shape, tokens)
            held = (GpuMemory(planned.weight_bytes, planned.buffer_bytes, planned.reserve_bytes, planned.fraction),)
    except (ModelUnknown, ValueError):
        pass  # lint says what is wrong; the memory checks say that the size is not known
    where = f"over {role.nodes} hosts" if role.nodes > 1 else "on one host"
    return Need(
        title=f"{name} ({role.ep.mode}, EP{group.ranks} {where})",
        words=frozenset(words),
        ranks=ranks,
        gpu_memory=held,
        heap_bytes=None if buffer is None else buffer * ranks if "cpu" in words else 0,
        engines=(role.engine,),
        env=role.env,
    )
