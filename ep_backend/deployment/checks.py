"""What would fail only after minutes of loading, found before it."""

import json
import socket
from collections.abc import Iterator
from typing import Any

from ep_backend.deployment.problems import Problem
from ep_backend.deployment.schema import Deployment, Role, RoleName, modes_of

# vLLM's limit of tokens in one step where the flag is not given.
DEFAULT_BATCH = 2048

# Flags that this file's own keys decide.
OWNED_FLAGS = {
    "all2all-backend": "ep",
    "enable-expert-parallel": "ep",
    "enable-dbo": "ep.overlap",
    "data-parallel-size": "data_parallel",
    "data-parallel-size-local": "nodes",
    "data-parallel-start-rank": "nodes",
    "data-parallel-address": "nodes",
    "data-parallel-rpc-port": "nodes",
    "headless": "nodes",
    "kv-transfer-config": "roles",
    "model": "model.path",
    "served-model-name": "model.served_name",
    "host": "router.host",
    "port": "router.port",
}
OWNED_ENV = ("EP_BACKEND_SETTINGS", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")


def check(deployment: Deployment) -> list[Problem]:
    """Every fault of a file whose form is right."""
    problems = list(_check_roles(deployment))
    config, fault = _model_config(deployment)
    if fault:
        problems.append(fault)
    for name, role in deployment.roles.items():
        problems += _check_role(deployment, name, role, config)
    return problems


def check_port_free(deployment: Deployment) -> list[Problem]:
    """The port that clients use must be free before anything is loaded."""
    host, port = deployment.router.host, deployment.router.port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = f"{host}:{port} cannot be listened on ({error.strerror})"
            return [Problem(("router", "port"), what, "stop what uses it, or choose another port")]
    return []


def batch_limit(deployment: Deployment, role: Role) -> int:
    """The most tokens that one rank of the engine handles in a step."""
    given = role.arg("max-num-batched-tokens")
    if deployment.topology.device == "cpu":
        # Without chunked prefill, which MLA lacks there, vLLM overrules the flag to fit any prompt.
        length = role.arg("max-model-len")
        return max(DEFAULT_BATCH, length if isinstance(length, int) else 0)
    return given if isinstance(given, int) else DEFAULT_BATCH


def _check_roles(deployment: Deployment) -> Iterator[Problem]:
    names = {name for name, _ in deployment.roles.items()}
    if names not in ({"prefill", "decode"}, {"unified"}):
        what = f"has {', '.join(sorted(names)) or 'none'}, must have prefill and decode, or unified alone"
        yield Problem(("roles",), what, "add or remove a role")


def _model_config(deployment: Deployment) -> tuple[dict[str, Any], Problem | None]:
    file = deployment.model.path / "config.json"
    place = ("model", "path")
    fix = "give a folder with a Hugging Face checkpoint (`ep-backend checkpoint OUT` writes a small one)"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, Problem(place, f"{file} cannot be read ({error.strerror})", fix)
    except ValueError as error:
        return {}, Problem(place, f"{file} is not JSON ({error})", fix)
    if not isinstance(config, dict) or not config.get("n_routed_experts"):
        return {}, Problem(place, f"{file} has no n_routed_experts, so the model has no experts to spread", fix)
    return config, None


def _check_role(deployment: Deployment, name: RoleName, role: Role, config: dict[str, Any]) -> Iterator[Problem]:
    place: tuple[str, ...] = ("roles", name)
    yield from _check_parallel(deployment, place, role, config)
    yield from _check_mode(place, name, role)
    yield from _check_capacity(deployment, place, role)
    for key in role.args:
        owner = OWNED_FLAGS.get(key.replace("_", "-").lstrip("-"))
        if owner:
            yield Problem((*place, "args", key), f"`{owner}` of this file decides that flag", "remove it here")
    for key in role.env:
        if key in OWNED_ENV:
            yield Problem((*place, "env", key), "`up` sets that variable itself", "remove it here")


def _check_parallel(deployment: Deployment, place: tuple[str, ...], role: Role, config: dict[str, Any]) -> Iterator[Problem]:
    size = role.ep_size
    if role.data_parallel == 1:
        yield Problem(
            (*place, "data_parallel"),
            "is 1, must be above 1: with tensor parallelism alone vLLM calls no all-to-all backend",
            "raise data_parallel and lower tensor-parallel-size",
        )
    if role.nodes > deployment.topology.nodes:
        what = f"is {role.nodes}, but topology.nodes is {deployment.topology.nodes}"
        yield Problem((*place, "nodes"), what, "raise topology.nodes or lower it here")
    if role.data_parallel % role.nodes:
        what = f"is {role.data_parallel}, must be a multiple of the role's {role.nodes} nodes"
        yield Problem((*place, "data_parallel"), what, f"use {role.nodes * (role.data_parallel // role.nodes + 1)}")
    per_node = role.ep.gpus_per_node
    if per_node and size % per_node:
        what = f"is {per_node}, must divide the {size} EP ranks"
        yield Problem((*place, "ep", "gpus_per_node"), what, "use a divisor")
    experts = config.get("n_routed_experts")
    if experts and experts % size:
        yield Problem(
            (*place, "data_parallel"),
            f"gives {size} EP ranks, but the model's {experts} experts are not divisible by {size}",
            f"use a divisor of {experts}",
        )


def _check_mode(place: tuple[str, ...], name: RoleName, role: Role) -> Iterator[Problem]:
    mode, allowed = role.ep.mode, modes_of(name, role.ep.mode)
    if mode != "auto" and mode not in [candidate.value for candidate in allowed]:
        choices = ", ".join([*(candidate.value for candidate in allowed), "auto"])
        what = f"is {mode}, must be one of {choices} for the {name} role"
        yield Problem((*place, "ep", "mode"), what, f"choose one of those, or move {mode} to the other role")
    if role.ep.overlap == "dbo" and role.ep.lanes != 2:
        yield Problem((*place, "ep", "lanes"), "is 1, but overlap: dbo runs two micro-batches", "set lanes: 2")


def _check_capacity(deployment: Deployment, place: tuple[str, ...], role: Role) -> Iterator[Problem]:
    capacity = role.ep.max_tokens
    if capacity is None:
        return
    batch, sequences = batch_limit(deployment, role), role.arg("max-num-seqs")
    if batch > capacity:
        flag_rules = role.arg("max-num-batched-tokens") == batch
        fix = f", or max-num-batched-tokens to {capacity}" if deployment.topology.device == "cuda" else ""
        yield Problem(
            (*place, "ep", "max_tokens"),
            f"is {capacity}, but {'max-num-batched-tokens' if flag_rules else 'the batch of vLLM'} is {batch} tokens a rank, "
            "and one step may dispatch them all",
            f"set max_tokens to {batch}{fix}",
        )
    elif isinstance(sequences, int) and sequences > capacity:
        yield Problem(
            (*place, "ep", "max_tokens"),
            f"is {capacity}, but max-num-seqs is {sequences}, and a decode step dispatches one token a sequence",
            f"set max_tokens to {sequences}, or lower max-num-seqs",
        )
