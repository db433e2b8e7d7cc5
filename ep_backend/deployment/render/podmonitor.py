"""What lets Prometheus read the ranks' agents: a PodMonitor a role (monitoring.coreos.com/v1), and the key they ask for.

In a file of its own, because a cluster without the Prometheus operator refuses the kind. Agents listen at a port a rank, and
only a pod's place in its group tells which ranks it runs, so each rank is an endpoint that is kept for its own pod.
"""

from collections.abc import Sequence
from typing import Any

from ep_backend.deployment.render.kubernetes import AGENTS_PORT, WORKER_INDEX, in_namespace, labels
from ep_backend.deployment.render.role import RoleFiles, agents_reachable
from ep_backend.deployment.render.text import HEADER, as_yaml
from ep_backend.deployment.schema import Deployment

POD_MONITOR = "podmonitor.yaml"
KEY = "key"
INDEX_LABEL = "__meta_kubernetes_pod_label_" + "".join(char if char.isalnum() else "_" for char in WORKER_INDEX)


def pod_monitor(deployment: Deployment, roles: Sequence[RoleFiles]) -> str | None:
    """None where nobody outside a pod reaches its agents."""
    if not agents_reachable(deployment):
        return None
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": _secret(deployment), "labels": labels(deployment, "control")},
        "stringData": {KEY: deployment.control.key},
    }
    monitors = [_monitor(deployment, part) for part in roles]
    return HEADER + as_yaml(*in_namespace(deployment, [secret, *monitors]))


def _monitor(deployment: Deployment, part: RoleFiles) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": f"{deployment.name}-{part.name}", "labels": labels(deployment, part.name)},
        "spec": {
            "selector": {"matchLabels": labels(deployment, part.name)},
            "podMetricsEndpoints": [_endpoint(deployment, part, rank) for rank in range(part.role.ep_size)],
        },
    }


def _endpoint(deployment: Deployment, part: RoleFiles, rank: int) -> dict[str, Any]:
    return {
        "port": AGENTS_PORT,
        "authorization": {"credentials": {"name": _secret(deployment), "key": KEY}},
        "relabelings": [
            {"sourceLabels": [INDEX_LABEL], "regex": str(rank // part.ranks_a_node), "action": "keep"},
            {
                "sourceLabels": ["__address__"],
                "regex": r"(.+):\d+",
                "replacement": f"${{1}}:{part.agents + rank}",
                "targetLabel": "__address__",
            },
        ],
    }


def _secret(deployment: Deployment) -> str:
    return f"{deployment.name}-control"
