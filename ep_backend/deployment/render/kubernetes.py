"""Manifests: a LeaderWorkerSet a role, or one DisaggregatedSet, with the role's files in a ConfigMap.

Leader and worker pods come from one function; the leader has a port and probes more. A worker's health is the leader's:
without all ranks no request is answered, and one pod that restarts recreates its whole group.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from ep_backend.deployment.render.role import LAUNCH, SETTINGS, RoleFiles, agents_reachable, bootstrap_port, source
from ep_backend.deployment.render.router import ROUTER, router_script, startup_s
from ep_backend.deployment.render.text import HEADER, as_yaml
from ep_backend.deployment.schema import RENDERED_MOUNTS, Deployment, Image

Object = dict[str, Any]
SHM, MOUNT = RENDERED_MOUNTS
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
# Files of a container that ended before stay in the pod's memory, and a crash loop fills it (llm-d issue 352). The two
# variables are injected by the LeaderWorkerSet controller.
START = f"find /dev/shm -mindepth 1 -delete; NODE=$LWS_WORKER_INDEX LEADER=$LWS_LEADER_ADDRESS exec /bin/bash {MOUNT}/{LAUNCH}"
PROBE_S = 10
AGENTS_PORT = "agents"
SUFFIXES = (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10))


def lws(deployment: Deployment, roles: Sequence[RoleFiles]) -> str:
    """A LeaderWorkerSet a role (leaderworkerset.x-k8s.io/v1)."""
    sets = [
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": f"{deployment.name}-{part.name}", "labels": labels(deployment, part.name)},
            "spec": _group(deployment, part),
        }
        for part in roles
    ]
    return _manifest(deployment, roles, sets)


def disaggregated_set(deployment: Deployment, roles: Sequence[RoleFiles]) -> str:
    """One set whose roles are rolled out together (disaggregatedset.x-k8s.io/v1, part of LWS)."""
    both = {
        "apiVersion": "disaggregatedset.x-k8s.io/v1",
        "kind": "DisaggregatedSet",
        "metadata": {"name": deployment.name},
        "spec": {"roles": [{"name": part.name, "spec": _group(deployment, part)} for part in roles]},
    }
    return _manifest(deployment, roles, [both])


def _manifest(deployment: Deployment, roles: Sequence[RoleFiles], sets: Sequence[Object]) -> str:
    files = [file for part in roles for file in _configuration(deployment, part)]
    return HEADER + as_yaml(*in_namespace(deployment, [*files, *sets, *_addresses(deployment, roles)]))


def in_namespace(deployment: Deployment, objects: Sequence[Object]) -> list[Object]:
    """The objects, in the file's namespace if it has one."""
    namespace = deployment.target.pod.namespace
    own = {"namespace": namespace} if namespace else {}
    return [each | {"metadata": {**each["metadata"], **own}} for each in objects]


def _group(deployment: Deployment, part: RoleFiles) -> Object:
    return {
        "replicas": 1,
        "startupPolicy": "LeaderCreated",
        # The GPUs of a group are free only once it is gone.
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1}},
        "networkConfig": {"subdomainPolicy": "Shared"},
        "leaderWorkerTemplate": {
            "size": part.role.nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": _pod(deployment, part, leader=True),
            "workerTemplate": _pod(deployment, part, leader=False),
        },
    }


def _pod(deployment: Deployment, part: RoleFiles, *, leader: bool) -> Object:
    target, pod, model = deployment.target, deployment.target.pod, source(deployment)
    limits: Object = {"nvidia.com/gpu": part.ranks_a_node} if deployment.topology.device == "cuda" else {}
    if pod.memory:
        limits["memory"] = _quantity(pod.memory)
    volumes: list[Object] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", **({"sizeLimit": _quantity(pod.shm)} if pod.shm else {})}},
        {"name": "ep-backend", "projected": {"sources": _sources(deployment, part)}},
    ]
    mounts: list[Object] = [{"name": "shm", "mountPath": SHM}, {"name": "ep-backend", "mountPath": MOUNT}]
    for number, volume in enumerate(pod.volumes):
        name = f"volume-{number}"
        volumes.append({"name": name, **volume.source})
        mounts.append({"name": name, "mountPath": volume.mount, **({"readOnly": True} if volume.read_only else {})})
    if model.startswith("/") and not any(f"{model}/".startswith(f"{volume.mount}/") for volume in pod.volumes):
        volumes.append({"name": "model", "hostPath": {"path": model, "type": "Directory"}})
        mounts.append({"name": "model", "mountPath": model, "readOnly": True})
    container: Object = {
        "name": "engine",
        "image": _image(deployment, part),
        "command": ["/bin/bash", "-c", START],
        "env": [
            {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            # The container runtime then mounts the GDRCopy device.
            {"name": "NVIDIA_GDRCOPY", "value": "enabled"},
        ],
        "resources": {"limits": limits | pod.rdma},
        "securityContext": {"capabilities": {"add": sorted({*pod.capabilities, "IPC_LOCK"})}},
        "volumeMounts": mounts,
    }
    ports = [{"name": "http", "containerPort": part.port}] if leader else []
    if agents_reachable(deployment):
        ports.append({"name": AGENTS_PORT, "containerPort": part.agents})
    container |= ({"ports": ports} if ports else {}) | (_probes(deployment) if leader else {})
    spec: Object = {
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if pod.host_network else {}),
        "terminationGracePeriodSeconds": math.ceil(target.drain_timeout_s + target.stop_timeout_s),
        "containers": [container],
        "volumes": volumes,
    }
    return {"metadata": {"labels": labels(deployment, part.name)}, "spec": spec}


def _probes(deployment: Deployment) -> Object:
    """Loading may take the start-up time; afterwards a leader that answers nothing for five minutes is restarted."""
    health = {"httpGet": {"path": "/health", "port": "http"}}
    return {
        "startupProbe": health | {"periodSeconds": PROBE_S, "failureThreshold": math.ceil(startup_s(deployment) / PROBE_S)},
        "readinessProbe": health | {"periodSeconds": PROBE_S, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": health | {"periodSeconds": 30, "timeoutSeconds": 20, "failureThreshold": 10},
    }


def _configuration(deployment: Deployment, part: RoleFiles) -> list[Object]:
    """The role's files. Their names carry a digest, so that a change rolls the pods instead of altering a running group."""
    objects: list[Object] = []
    for entry in _sources(deployment, part):
        kind, reference = next(iter(entry.items()))
        names = [item["key"] for item in reference["items"]]
        data = {name: part.files[name] for name in names}
        secret = kind == "secret"
        objects.append(
            {
                "apiVersion": "v1",
                "kind": "Secret" if secret else "ConfigMap",
                "metadata": {"name": reference["name"], "labels": labels(deployment, part.name)},
                "immutable": True,
                "stringData" if secret else "data": data,
            }
        )
    return objects


def _sources(deployment: Deployment, part: RoleFiles) -> list[Object]:
    """Where the pod's directory comes from. Settings that hold the control key are a Secret."""
    secret = [SETTINGS] if deployment.control.key else []
    plain = [name for name in part.files if name not in secret]
    sources = []
    for kind, names in (("configMap", plain), ("secret", secret)):
        if names:
            name = f"{deployment.name}-{part.name}-{_digest({name: part.files[name] for name in names})}"
            sources.append({kind: {"name": name, "items": [{"key": name, "path": name} for name in names]}})
    return sources


def _addresses(deployment: Deployment, roles: Sequence[RoleFiles]) -> list[Object]:
    """A service for each leader; before a pair the router and its own."""
    if len(roles) == 1:
        part = roles[0]
        return [_service(deployment.name, _leader(deployment, part), deployment.router.port, {})]
    services = []
    for part in roles:
        asked = part.role.traits.bootstraps and part.name == "prefill"
        ports = {"bootstrap": bootstrap_port(part.name)} if asked else {}
        # Headless: its name is the leader's address, for every port of it.
        service = _service(_leader_name(deployment, part), _leader(deployment, part), part.port, ports)
        service["spec"]["clusterIP"] = "None"
        services.append(service)
    return [*services, *_router(deployment, roles)]


def _router(deployment: Deployment, roles: Sequence[RoleFiles]) -> list[Object]:
    own, files = labels(deployment, "router"), {ROUTER: router_script(deployment)}
    config, port = f"{deployment.name}-router-{_digest(files)}", deployment.router.port
    leaders = {part.name.upper(): _leader_name(deployment, part) for part in roles}
    container: Object = {
        "name": "router",
        "image": _image(deployment, roles[0]),
        "command": ["/bin/bash", f"{MOUNT}/{ROUTER}"],
        "env": [{"name": name, "value": value} for name, value in leaders.items()],
        "ports": [{"name": "http", "containerPort": port}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PROBE_S},
        "volumeMounts": [{"name": "ep-backend", "mountPath": MOUNT}],
    }
    spec = {"containers": [container], "volumes": [{"name": "ep-backend", "configMap": {"name": config}}]}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": config, "labels": own},
            "immutable": True,
            "data": files,
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": f"{deployment.name}-router", "labels": own},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": own},
                "template": {"metadata": {"labels": own}, "spec": spec},
            },
        },
        _service(deployment.name, own, port, {}),
    ]


def _service(name: str, selector: dict[str, str], http: int, others: dict[str, int]) -> Object:
    ports = [{"name": name, "port": port, "targetPort": port} for name, port in {"http": http, **others}.items()]
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {"selector": selector, "ports": ports}}


def _leader(deployment: Deployment, part: RoleFiles) -> dict[str, str]:
    return {**labels(deployment, part.name), WORKER_INDEX: "0"}


def _leader_name(deployment: Deployment, part: RoleFiles) -> str:
    return f"{deployment.name}-{part.name}-leader"


def labels(deployment: Deployment, component: str) -> dict[str, str]:
    """Of everything of one component."""
    return {"app.kubernetes.io/name": deployment.name, "app.kubernetes.io/component": component}


def _image(deployment: Deployment, part: RoleFiles) -> str:
    image: Image = part.role.image or deployment.target.image
    return image.name or deployment.target.image.name or ""


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:8]


def _quantity(size: int) -> str:
    """Bytes as Kubernetes writes them."""
    return next((f"{size // factor}{suffix}" for suffix, factor in SUFFIXES if size % factor == 0), str(size))
