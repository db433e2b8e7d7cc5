"""What the plug-in in each rank of a role reads: the content of the file that EP_BACKEND_SETTINGS names."""

from typing import Any

from ep_backend.deployment.batches import capacity
from ep_backend.deployment.buffers import tokens_by_mode
from ep_backend.deployment.resolve import group_of
from ep_backend.deployment.schema import Deployment, Role, RoleName, modes_of
from ep_backend.plan.planner import estimates


def rank_settings(deployment: Deployment, name: RoleName, role: Role, agent_host: str, agent_port: int) -> dict[str, Any]:
    """The keys of ep_backend/settings.py; ValueError where the NVLink domains do not divide the ranks."""
    ep = role.ep
    tokens, group = capacity(deployment, name, role), group_of(deployment, role)
    modes = modes_of(name, ep.mode, group.nodes > 1, role.engine, ep.rail)
    return {
        "deployment": deployment.name,
        "role": name,
        "mode": ep.mode,
        "max_tokens": {mode.value: n for mode, n in tokens_by_mode(name, role, modes, tokens).items()},
        "lanes": ep.lanes,
        "timeout_s": ep.timeout_s,
        "gpus_per_node": group.gpus_per_node,
        "rail": ep.rail or "auto",
        "fp8": ep.fp8,
        "layout": ep.layout,
        "sms": ep.sms,
        "estimates": estimates(deployment, name),
        "agent_host": agent_host,
        "agent_port": agent_port,
        "agent_key": deployment.control.key,
    }
