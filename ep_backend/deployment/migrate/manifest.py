"""Launches in a LeaderWorkerSet or DisaggregatedSet."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ruamel.yaml.error import YAMLError

from ep_backend.deployment.document import plain_documents
from ep_backend.deployment.migrate.launches import Launch, launches
from ep_backend.deployment.migrate.notes import Note, Unmovable
from ep_backend.deployment.migrate.pods import Pods, items, mapping
from ep_backend.deployment.migrate.roles import PLACES
from ep_backend.deployment.migrate.shell import SHELLS, Command, commands
from ep_backend.deployment.schema import TargetKind

KINDS: dict[str, TargetKind] = {"LeaderWorkerSet": "lws", "DisaggregatedSet": "disaggregatedset"}
AS_LEADER = "leader and worker differed; the leader's is rendered for both"
Reachable = Callable[[str], str | None]
# Of a worker's pod and container: what is rendered for both as the leader has it.
POD_AS_LEADER, CONTAINER_AS_LEADER = ("hostNetwork", "volumes"), ("image", "resources", "securityContext", "volumeMounts")


def is_manifest(text: str) -> bool:
    return re.search(r"^apiVersion:", text, re.MULTILINE) is not None and re.search(r"^kind:", text, re.MULTILINE) is not None


def read(text: str, pods: Pods, reachable: Reachable) -> list[Launch]:
    """The leaders' launches; completes `pods`. `reachable`: the text of a file here. Raises Unmovable."""
    try:
        documents = [each for each in plain_documents(text) if isinstance(each, Mapping)]
    except YAMLError as error:
        raise Unmovable(f"the manifest is no YAML: {' '.join(str(error).split())[:200]}; correct it") from None
    known = [each for each in documents if each.get("kind") in KINDS]
    if not known:
        kinds = ", ".join(str(each.get("kind")) for each in documents)
        raise Unmovable(f"kind is {kinds}, must be one of {', '.join(KINDS)}; give the command of its container instead")
    configs: dict[str, Mapping[str, str]] = {}
    for document in documents:
        if document.get("kind") in KINDS:
            continue
        name = str(mapping(document.get("metadata")).get("name"))
        if document.get("kind") == "ConfigMap":
            configs[name] = mapping(document.get("data"))
        service = document.get("kind") == "Service"
        why = "render writes services of its own" if service else "it is no set of engines; apply it beside what render writes"
        pods.left_out("all", f"{document.get('kind')} {name}", why)
    found: list[Launch] = []
    for document in known:
        pods.kind = KINDS[document["kind"]]
        spec, metadata = mapping(document.get("spec")), mapping(document.get("metadata"))
        name = str(metadata.get("name", ""))
        pods.rest(name, "manifest", document)
        pods.rest(name, "metadata", metadata)
        _place(pods, name, metadata.get("namespace"))
        if document["kind"] == "LeaderWorkerSet":
            found.append(_group(spec, [name], pods, configs, reachable))
            continue
        pods.rest(name, "set", spec)
        for role in map(mapping, items(spec.get("roles"))):
            hints = [name, str(role.get("name", ""))]
            pods.rest(hints[-1], "role", role)
            found.append(_group(mapping(role.get("spec")), hints, pods, configs, reachable))
    if not found:
        raise Unmovable(f"{known[0].get('kind')} has no roles, must have some under spec.roles; give a whole manifest")
    return found


def _place(pods: Pods, where: str, namespace: object) -> None:
    if namespace is None:
        return
    pods.namespace = pods.namespace or str(namespace)
    if pods.namespace != namespace:
        pods.left_out(where, f"namespace: {namespace}", f"all roles are rendered into one, {pods.namespace}")


def _group(
    spec: Mapping[str, Any], hints: list[str], pods: Pods, configs: Mapping[str, Mapping[str, str]], reachable: Reachable
) -> Launch:
    where, template = hints[-1], mapping(spec.get("leaderWorkerTemplate"))
    size = template.get("size", 1)
    if not isinstance(size, int):
        raise Unmovable(f"{where}: size is {size!r}, must be a whole number; correct it")
    templates = [mapping(template.get(key)) for key in ("leaderTemplate", "workerTemplate")]
    leader, worker = (_pod(each, size, index, configs, reachable) for index, each in enumerate(templates))
    leader = leader or _pod(templates[1], size, 0, configs, reachable)
    if leader is None:
        raise Unmovable(f"{where}: no container runs `vllm serve` or `sglang.launch_server`; give its command as text")
    launch, pod, container = leader
    launch.hints += hints
    launch.image = str(container["image"]) if container.get("image") else None
    if launch.engine == "sglang":
        launch.flags.setdefault("nnodes", size)
    else:
        launch.flags.setdefault("data-parallel-size-local", _per_node(launch, size))
    pods.rest(where, "set", spec)
    pods.rest(where, "group", template)
    for each in templates:
        pods.rest(where, "template", each)
        pods.rest(where, "metadata", mapping(each.get("metadata")))
    pods.add(pod, container, where)
    pods.account(pod, container, where)
    if worker is not None and size > 1:
        pods.account(worker[1], worker[2], where)
        _compare(launch, worker[0], where, pods)
        for keys, ours, theirs in ((POD_AS_LEADER, pod, worker[1]), (CONTAINER_AS_LEADER, container, worker[2])):
            for key in keys:
                if ours.get(key) != theirs.get(key):
                    pods.notes.append(Note("changed", where, f"worker {key}", f"leader's {key}", AS_LEADER))
    path = str(launch.flags.get("model-path"))
    if path.startswith("/") and not any(path == mount or path.startswith(f"{mount}/") for mount in pods.volumes):
        why = "no volume of the pod holds it; render mounts the folder of that name of each node"
        pods.notes.append(Note("changed", where, f"model {path}", f"hostPath {path}", why))
    if (replicas := spec.get("replicas", 1)) != 1:
        pods.left_out(where, f"replicas: {replicas}", "scale the rendered set")
    return launch


def _per_node(launch: Launch, size: int) -> int:
    total = launch.flags.get("data-parallel-size", 1)
    return max(1, total // size) if isinstance(total, int) else 1


def _pod(
    template: Mapping[str, Any], size: int, index: int, configs: Mapping[str, Mapping[str, str]], reachable: Reachable
) -> tuple[Launch, Mapping[str, Any], Mapping[str, Any]] | None:
    """The first launch in a pod's containers, with the pod's specification and the container."""
    pod = mapping(template.get("spec"))
    injected = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": "$LWS_LEADER_ADDRESS"}
    for container in map(mapping, items(pod.get("containers"))):
        entries = [mapping(entry) for entry in items(container.get("env"))]
        env = {str(entry.get("name")): str(entry["value"]) for entry in entries if "value" in entry}
        # Without a command the image's entry point runs.
        command = items(container.get("command")) or [container.get("image")]
        words = [str(word) for word in [*command, *items(container.get("args"))]]
        known = env | injected
        words = [_expanded(word, known) for word in words]
        file = _beside(_mounted(pod, container, configs), reachable)
        for launch in launches(list(_commands(words, known)), file):
            launch.env = env | {name: value for name, value in launch.env.items() if name not in injected}
            return launch, pod, container
    return None


def _beside(files: Mapping[str, str], reachable: Reachable) -> Reachable:
    return lambda path: files[path] if path in files else reachable(path)


def _mounted(pod: Mapping[str, Any], container: Mapping[str, Any], configs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Files of ConfigMaps beside the set, by their paths in the container."""
    volumes = {each.get("name"): mapping(each.get("configMap")).get("name") for each in map(mapping, items(pod.get("volumes")))}
    mounts = map(mapping, items(container.get("volumeMounts")))
    return {
        f"{str(mount.get('mountPath')).rstrip('/')}/{key}": text
        for mount in mounts
        for key, text in configs.get(str(volumes.get(mount.get("name"))), {}).items()
    }


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
                pods.notes.append(Note("changed", where, what, _or_nothing(mine), AS_LEADER))


def _or_nothing(value: object) -> str:
    return "absent" if value is None else str(value)
