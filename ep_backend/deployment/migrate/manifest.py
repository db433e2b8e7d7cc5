"""Launches in a LeaderWorkerSet or DisaggregatedSet, and what their pods were granted."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ep_backend.deployment.migrate.launches import Launch, launches
from ep_backend.deployment.migrate.notes import Note, Unmovable
from ep_backend.deployment.migrate.roles import PLACES
from ep_backend.deployment.migrate.shell import SHELLS, Command, commands
from ep_backend.deployment.schema import TargetKind

KINDS: dict[str, TargetKind] = {"LeaderWorkerSet": "lws", "DisaggregatedSet": "disaggregatedset"}
PLAIN_LIMITS = ("cpu", "memory", "ephemeral-storage", "nvidia.com/gpu")
# Of a pod's specification: what is read, or has its counterpart in what render writes.
READ = {"containers", "volumes", "hostNetwork", "dnsPolicy", "terminationGracePeriodSeconds", "restartPolicy"}


@dataclass
class Pods:
    """What the pods of a manifest had."""

    kind: TargetKind = "lws"
    image: str | None = None
    shm: str | None = None
    rdma: dict[str, int] = field(default_factory=dict)
    capabilities: list[str] = field(default_factory=list)
    host_network: bool = False
    notes: list[Note] = field(default_factory=list)


def is_manifest(text: str) -> bool:
    return re.search(r"^apiVersion:", text, re.MULTILINE) is not None and re.search(r"^kind:", text, re.MULTILINE) is not None


def read(text: str, pods: Pods) -> list[Launch]:
    """The leaders' launches; completes `pods`. Raises Unmovable."""
    try:
        documents = [each for each in YAML(typ="safe").load_all(text) if isinstance(each, Mapping)]
    except YAMLError as error:
        raise Unmovable(f"the manifest is no YAML: {' '.join(str(error).split())[:200]}; correct it") from None
    known = [each for each in documents if each.get("kind") in KINDS]
    if not known:
        kinds = ", ".join(str(each.get("kind")) for each in documents)
        raise Unmovable(f"kind is {kinds}, must be one of {', '.join(KINDS)}; give the command of its container instead")
    found: list[Launch] = []
    for document in known:
        pods.kind = KINDS[document["kind"]]
        spec, name = _mapping(document.get("spec")), str(_mapping(document.get("metadata")).get("name", ""))
        if document["kind"] == "LeaderWorkerSet":
            found.append(_group(spec, [name], pods))
        else:
            roles = [_mapping(role) for role in _list(spec.get("roles"))]
            found += [_group(_mapping(role.get("spec")), [name, str(role.get("name", ""))], pods) for role in roles]
    if not found:
        raise Unmovable(f"{known[0].get('kind')} has no roles, must have some under spec.roles; give a whole manifest")
    return found


def _group(spec: Mapping[str, Any], hints: list[str], pods: Pods) -> Launch:
    template = _mapping(spec.get("leaderWorkerTemplate"))
    size = template.get("size", 1)
    if not isinstance(size, int):
        raise Unmovable(f"{hints[-1]}: size is {size!r}, must be a whole number; correct it")
    worker = _pod(_mapping(template.get("workerTemplate")), size, 1)
    leader = _pod(_mapping(template.get("leaderTemplate")), size, 0) or _pod(_mapping(template.get("workerTemplate")), size, 0)
    if leader is None:
        raise Unmovable(f"{hints[-1]}: no container runs `vllm serve` or `sglang.launch_server`; give its command as text")
    launch, pod, container = leader
    launch.hints += hints
    if launch.engine == "sglang":
        launch.flags.setdefault("nnodes", size)
    else:
        launch.flags.setdefault("data-parallel-size-local", _per_node(launch, size))
    if worker is not None and size > 1:
        _compare(launch, worker[0], hints[-1], pods)
    _granted(pod, container, launch, hints[-1], pods)
    if (replicas := spec.get("replicas", 1)) != 1:
        pods.notes.append(Note("left out", hints[-1], f"replicas: {replicas}", "", "scale the rendered set"))
    return launch


def _per_node(launch: Launch, size: int) -> int:
    total = launch.flags.get("data-parallel-size", 1)
    return max(1, total // size) if isinstance(total, int) else 1


def _pod(template: Mapping[str, Any], size: int, index: int) -> tuple[Launch, Mapping[str, Any], Mapping[str, Any]] | None:
    """The first launch in a pod's containers, with the pod's specification and the container."""
    pod = _mapping(template.get("spec"))
    injected = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": "$LWS_LEADER_ADDRESS"}
    for container in map(_mapping, _list(pod.get("containers"))):
        entries = [_mapping(entry) for entry in _list(container.get("env"))]
        env = {str(entry.get("name")): str(entry["value"]) for entry in entries if "value" in entry}
        words = [str(word) for word in [*_list(container.get("command")), *_list(container.get("args"))]]
        known = env | injected
        words = [_expanded(word, known) for word in words]
        for launch in launches(list(_commands(words, known))):
            launch.env = env | {name: value for name, value in launch.env.items() if name not in injected}
            return launch, pod, container
    return None


def _expanded(word: str, known: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes expands it in a container's command."""
    return re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], found[0]), word)


def _commands(words: list[str], known: Mapping[str, str]) -> Iterator[Command]:
    if words[:1] and words[0] in SHELLS and len(words) > 2 and words[1].startswith("-"):
        yield from commands(words[2], known)
    elif words:
        yield Command(words)


def _compare(leader: Launch, worker: Launch, where: str, pods: Pods) -> None:
    """Differences between the two copies of a command, beyond what makes a node the leader."""
    expected = (*PLACES[leader.engine], "nnodes", "data-parallel-size-local", "api-server-count")
    for kind, ours, theirs in (("--", leader.flags, worker.flags), ("", leader.env, worker.env)):
        for key in sorted({*ours, *theirs} - set(expected)):
            mine, other = ours.get(key), theirs.get(key)
            if mine != other and not key.startswith("LWS_"):
                what = f"worker {kind}{key} {_or_nothing(other)}"
                pods.notes.append(
                    Note("changed", where, what, _or_nothing(mine), "leader and worker differed; both are rendered")
                )


def _or_nothing(value: object) -> str:
    return "absent" if value is None else str(value)


def _granted(pod: Mapping[str, Any], container: Mapping[str, Any], launch: Launch, where: str, pods: Pods) -> None:
    pods.image = pods.image or (str(container["image"]) if container.get("image") else None)
    limits = _mapping(_mapping(container.get("resources")).get("limits"))
    pods.rdma |= {name: int(count) for name, count in limits.items() if name not in PLAIN_LIMITS and str(count).isdigit()}
    security = _mapping(container.get("securityContext"))
    added = map(str, _list(_mapping(security.get("capabilities")).get("add")))
    pods.capabilities += [each for each in added if each not in pods.capabilities]
    pods.host_network = pods.host_network or bool(pod.get("hostNetwork"))

    def left_out(what: str, why: str) -> None:
        pods.notes.append(Note("left out", where, what, "", why))

    volumes = {str(volume.get("name")): volume for volume in map(_mapping, _list(pod.get("volumes")))}
    for mount in map(_mapping, _list(container.get("volumeMounts"))):
        volume, path = volumes.get(str(mount.get("name")), {}), str(mount.get("mountPath"))
        host = _mapping(volume.get("hostPath")).get("path")
        if path == "/dev/shm":
            limit = _mapping(volume.get("emptyDir")).get("sizeLimit")
            pods.shm = str(limit) if limit else pods.shm
        elif path == launch.flags.get("model-path") and isinstance(host, str):
            pods.notes.append(
                Note("changed", where, f"model {path}", host, "the folder on the nodes, mounted under its own name")
            )
            launch.flags["model-path"] = host
        elif path != "/dev/infiniband":
            left_out(f"volume at {path}", "add it to the rendered manifest, for instance with kustomize")
    for entry in map(_mapping, _list(container.get("env"))):
        if "valueFrom" in entry and not str(entry.get("name")).startswith("LWS_"):
            left_out(f"variable {entry.get('name')}", "its value comes from elsewhere; add it with kustomize")
    if security.get("privileged"):
        left_out("privileged: true", "IPC_LOCK and the RDMA resource are enough")
    for key in sorted(set(pod) - READ):
        left_out(key, "of the cluster, not of the engine; add it with kustomize")
    if len(_list(pod.get("containers"))) > 1:
        left_out("further containers", "the rendered router takes a sidecar's place; add others with kustomize")


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
