"""The engine flags of a role, equal on all its launches: what the file's keys decide, then the role's own args."""

import json
import math
from typing import Any

from pydantic import JsonValue

from ep_backend.deployment.batches import batch_limit, chunk
from ep_backend.deployment.engines import table
from ep_backend.deployment.schema import Deployment, Role, RoleName

NAME = "ep_backend"

Flags = dict[str, JsonValue]


def engine_flags(deployment: Deployment, name: RoleName, role: Role, version: str | None = None) -> Flags:
    """Flags without dashes; those of a single launch (addresses, its number) are added by who starts it.

    The batch is named even where it is the engine's default: that depends on the GPU, and the buffer is sized by it.

    `version`: of the engine; None: the newest that is known here.
    """
    own = _sglang(deployment, name, role, version) if role.engine == "sglang" else _vllm(deployment, name, role)
    return {**own, **role.flags}


def _vllm(deployment: Deployment, name: RoleName, role: Role) -> Flags:
    flags: Flags = {
        "served-model-name": deployment.model.served_name,
        "enable-expert-parallel": True,
        "all2all-backend": NAME,
        "data-parallel-size": role.data_parallel,
    }
    if deployment.topology.device == "cuda":
        flags["max-num-batched-tokens"] = batch_limit(deployment, name, role)
    if role.ep.overlap == "dbo":
        flags["enable-dbo"] = True
    if name != "unified":
        transfer: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if name == "prefill" else "kv_consumer",
            "kv_buffer_device": deployment.topology.device,
            "kv_connector_extra_config": {"kv_lease_duration": _kv_lease_s(deployment)},
        }
        flags["kv-transfer-config"] = json.dumps(transfer)
    return flags


def _kv_lease_s(deployment: Deployment) -> int:
    """How long prefill keeps a request's KV blocks while a decode rank makes no step.

    vLLM's 30 s are shorter than a flip, a drain or the wait for a slow rank may take; a decode rank that then goes on reads
    blocks that hold another request, and answers wrong tokens.
    """
    waits = max(role.ep.timeout_s for _, role in deployment.roles.items())
    return math.ceil(deployment.control.flip_timeout_s + deployment.target.drain_timeout_s + waits)


def _sglang(deployment: Deployment, name: RoleName, role: Role, version: str | None) -> Flags:
    flags: Flags = {
        "model-path": str(deployment.model.path or deployment.model.preset),
        "served-model-name": deployment.model.served_name,
        "device": deployment.topology.device,
        "moe-a2a-backend": NAME,
        "tp-size": role.ep_size,
    }
    if "attn-dp-size" in table("sglang", version).flags:
        flags["attn-dp-size"] = role.data_parallel
    else:
        flags |= {"dp-size": role.data_parallel, "enable-dp-attention": True}
    if role.ep.overlap == "tbo":
        flags["enable-two-batch-overlap"] = True
    if role.ep.redundant_experts:
        flags["ep-num-redundant-experts"] = role.ep.redundant_experts
    if name != "decode":
        flags["chunked-prefill-size"] = chunk(deployment, role) * role.data_parallel
    if name != "unified":
        flags |= {"disaggregation-mode": name, "disaggregation-transfer-backend": "nixl"}
    return flags
