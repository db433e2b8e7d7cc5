"""The engine flags of a role, equal on all its launches: what the file's keys decide, then the role's own args."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from ep_backend.deployment.batches import batch_limit, chunk
from ep_backend.deployment.engines import table
from ep_backend.deployment.schema import Deployment, Role, RoleName

NAME = "ep_backend"
TRANSFER, NIXL, EXTRA, LEASE = "kv-transfer-config", "NixlConnector", "kv_connector_extra_config", "kv_lease_duration"
BALANCER = "eplb-config"
COMPOSED = (TRANSFER, BALANCER)
"""Flags whose JSON has keys of the file's and keys of the role's own args."""
OWNED_TRANSFER = ("kv_connector", "kv_role", "kv_buffer_device")
"""Keys of --kv-transfer-config that the file decides; of EXTRA, LEASE."""

Flags = dict[str, JsonValue]


def engine_flags(deployment: Deployment, name: RoleName, role: Role, version: str | None = None) -> Flags:
    """Flags without dashes; those of a single launch (addresses, its number) are added by who starts it.

    The batch is named even where it is the engine's default: that depends on the GPU, and the buffer is sized by it.

    `version`: of the engine; None: the newest that is known here.
    """
    own = _sglang(deployment, name, role, version) if role.engine == "sglang" else _vllm(deployment, name, role)
    return {**own, **{flag: value for flag, value in role.flags.items() if flag not in COMPOSED or flag not in own}}


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
    if role.ep.redundant_experts:
        given = role.arg(BALANCER)
        flags["enable-eplb"] = True  # without it vLLM makes no replicas
        flags[BALANCER] = {"num_redundant_experts": role.ep.redundant_experts, **(given if isinstance(given, dict) else {})}
    if name != "unified":
        given = role.arg(TRANSFER)
        further = further_transfer(given) if isinstance(given, dict) else {}
        flags[TRANSFER] = {
            "kv_connector": NIXL,
            "kv_role": "kv_producer" if name == "prefill" else "kv_consumer",
            "kv_buffer_device": deployment.topology.device,
            **further,
            EXTRA: {LEASE: _kv_lease_s(deployment), **further.get(EXTRA, {})},
        }
    return flags


def further_transfer(given: Mapping[str, JsonValue]) -> dict[str, Any]:
    """What of a --kv-transfer-config this file does not decide."""
    extra = given.get(EXTRA)
    inner = {key: value for key, value in extra.items() if key != LEASE} if isinstance(extra, dict) else {}
    outer = {key: value for key, value in given.items() if key not in (*OWNED_TRANSFER, EXTRA)}
    return outer | ({EXTRA: inner} if inner else {})


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
