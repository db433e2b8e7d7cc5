"""What the pods of a manifest were granted, as far as the file has a place for it, and what it has none for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ep_backend.deployment.migrate.notes import Note, Unmovable, shown
from ep_backend.deployment.schema import UNITS, TargetKind

QUANTITIES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
QUANTITIES |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
GPUS = "nvidia.com/gpu"
PLAIN_LIMITS = ("cpu", "ephemeral-storage")
# Keys that are read, by the part of a manifest that they stand in.
READ = {
    "manifest": {"apiVersion", "kind", "metadata", "spec", "status"},
    "metadata": {"name", "namespace", "creationTimestamp"},
    "set": {"roles", "leaderWorkerTemplate", "replicas"},
    "role": {"name", "spec"},
    "group": {"size", "leaderTemplate", "workerTemplate"},
    "template": {"metadata", "spec"},
    "pod": {"containers", "volumes", "hostNetwork"},
    "container": {"name", "image", "command", "args", "env", "resources", "securityContext", "volumeMounts"},
    "resources": {"limits", "requests"},
    "securityContext": {"capabilities", "privileged"},
    "capabilities": {"add"},
}
# What render writes as well, with this value or with one of its own.
SAME = (
    ("restartPolicy", "RecreateGroupOnPodRestart"),
    ("restartPolicy", "Always"),
    ("startupPolicy", "LeaderCreated"),
    ("networkConfig", {"subdomainPolicy": "Shared"}),
    ("dnsPolicy", "ClusterFirst"),
    ("dnsPolicy", "ClusterFirstWithHostNet"),
)
RENDERED = {"restartPolicy", "startupPolicy", "networkConfig", "rolloutStrategy", "ports", "startupProbe", "readinessProbe"}
RENDERED |= {"livenessProbe", "terminationGracePeriodSeconds", "dnsPolicy"}
BY_HAND = "no key of the file says it; add it to the rendered manifest, for instance with kustomize"


@dataclass
class Pods:
    """What the pods of all roles had; the file has one such description."""

    kind: TargetKind = "lws"
    namespace: str | None = None
    shm: int | None = None
    memory: int | None = None
    rdma: dict[str, int] = field(default_factory=dict)
    capabilities: list[str] = field(default_factory=list)
    host_network: bool = False
    volumes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By their mount paths."""
    notes: list[Note] = field(default_factory=list)

    def left_out(self, where: str, what: str, why: str = BY_HAND) -> None:
        note = Note("left out", where, what, "", why)
        if note not in self.notes:
            self.notes.append(note)

    def rest(self, where: str, part: str, mapping: Mapping[str, Any]) -> None:
        """Notes the keys of a part of the manifest that nothing here reads."""
        for key, value in mapping.items():
            if key not in READ[part] and (key, value) not in SAME:
                why = "render writes its own" if key in RENDERED else BY_HAND
                self.left_out(where, f"{key}: {shown(value)}", why)

    def granted(self) -> dict[str, Any]:
        """`target.pod` of the file."""
        found = {
            "namespace": self.namespace,
            "shm": sized(self.shm),
            "memory": sized(self.memory),
            "rdma": self.rdma,
            "capabilities": self.capabilities,
            "host_network": self.host_network,
            "volumes": list(self.volumes.values()),
        }
        return {key: value for key, value in found.items() if value}

    def add(self, pod: Mapping[str, Any], container: Mapping[str, Any], where: str) -> None:
        """What this role's leader has. One number stands for all roles: the largest of any."""
        self.host_network = self.host_network or bool(pod.get("hostNetwork"))
        limits = mapping(mapping(container.get("resources")).get("limits"))
        for name, count in limits.items():
            if name == "memory":
                self.memory = self._larger(where, "memory", self.memory, count)
            elif name != GPUS and str(count).isdigit() and name not in PLAIN_LIMITS:
                self.rdma[name] = max(int(count), self.rdma.get(name, 0))
        added = map(str, items(mapping(mapping(container.get("securityContext")).get("capabilities")).get("add")))
        self.capabilities += [each for each in added if each not in self.capabilities]
        volumes = {str(volume.get("name")): volume for volume in map(mapping, items(pod.get("volumes")))}
        for mount in map(mapping, items(container.get("volumeMounts"))):
            volume = {key: value for key, value in volumes.get(str(mount.get("name")), {}).items() if key != "name"}
            self._mount(where, mount, volume)

    def account(self, pod: Mapping[str, Any], container: Mapping[str, Any], where: str) -> None:
        """Notes what of a leader's or worker's pod is not carried."""
        resources, security = mapping(container.get("resources")), mapping(container.get("securityContext"))
        self.rest(where, "pod", pod)
        self.rest(where, "container", container)
        self.rest(where, "resources", resources)
        self.rest(where, "securityContext", security)
        self.rest(where, "capabilities", mapping(security.get("capabilities")))
        limits = mapping(resources.get("limits"))
        for name, count in limits.items():
            if name in PLAIN_LIMITS or not (name == "memory" or str(count).isdigit()):
                self.left_out(where, f"limit {name}: {count}")
        for name, count in mapping(resources.get("requests")).items():
            if limits.get(name) != count:
                self.left_out(where, f"request {name}: {count}")
        if security.get("privileged"):
            self.left_out(where, "privileged: true", "IPC_LOCK and the RDMA resource are enough")
        for entry in map(mapping, items(container.get("env"))):
            if "valueFrom" in entry and not str(entry.get("name")).startswith("LWS_"):
                why = "its value comes from elsewhere; add it with kustomize"
                self.left_out(where, f"variable {entry.get('name')}: {shown(entry['valueFrom'])}", why)
        others = [str(each.get("name")) for each in map(mapping, items(pod.get("containers"))) if each is not container]
        for name in others:
            self.left_out(where, f"container {name}", "the rendered router takes a sidecar's place; add others with kustomize")
        mounted = {mapping(mount).get("name") for mount in items(container.get("volumeMounts"))}
        for volume in map(mapping, items(pod.get("volumes"))):
            if volume.get("name") not in mounted:
                self.left_out(where, f"volume {volume.get('name')}", "the engine's container does not mount it")

    def _mount(self, where: str, mount: Mapping[str, Any], source: dict[str, Any]) -> None:
        path = str(mount.get("mountPath")).rstrip("/") or "/"
        if path == "/dev/shm":
            directory = mapping(source.get("emptyDir"))
            if limit := directory.get("sizeLimit"):
                self.shm = self._larger(where, "shm", self.shm, limit)
            if "emptyDir" not in source:
                self.left_out(
                    where, f"volume at {path}: {shown(source)}", "render mounts memory there; target.pod.shm is its size"
                )
            return
        if path == "/dev/infiniband":
            self.left_out(where, f"volume at {path}: {shown(source)}", "the RDMA resource brings the devices")
            return
        further = sorted(set(mount) - {"name", "mountPath", "readOnly"})
        if further or len(source) != 1:
            what = ", ".join(f"{key}: {mount[key]}" for key in further)
            self.left_out(where, f"volume at {path}: {shown(source)}{f' with {what}' if what else ''}")
            return
        volume = {"mount": path, "source": source, **({"read_only": True} if mount.get("readOnly") else {})}
        if self.volumes.setdefault(path, volume) != volume:
            why = f"another role has {shown(self.volumes[path]['source'])} there, and the file has one for all roles"
            self.left_out(where, f"volume at {path}: {shown(source)}", why)

    def _larger(self, where: str, key: str, before: int | None, given: object) -> int:
        size = quantity(where, key, given)
        if before is not None and before != size:
            why = f"target.pod.{key} is one for all roles: the largest"
            self.notes.append(Note("changed", where, f"{key} {sized(size)}", f"{key}: {sized(max(size, before))}", why))
        return max(size, before or 0)


def quantity(where: str, key: str, given: object) -> int:
    """Bytes of a Kubernetes quantity. Raises Unmovable."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", str(given))
    if found is None or found[2] not in QUANTITIES:
        raise Unmovable(f"{where}: {key} is {given!r}, must be a quantity such as 64Gi; correct it")
    return int(float(found[1]) * QUANTITIES[found[2]])


def sized(size: int | None) -> str | None:
    """Bytes in the file's largest unit that divides them."""
    if not size:
        return None
    units = sorted(UNITS.items(), key=lambda unit: -unit[1])
    return next((f"{size // factor}{unit}" for unit, factor in units if size % factor == 0), str(size))


def items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
