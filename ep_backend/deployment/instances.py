"""Turns a deployment into the processes to start: command lines, environment and the settings that the plug-in reads."""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from ep_backend.deployment import interpreters, namespaces
from ep_backend.deployment.changes import captures
from ep_backend.deployment.flags import engine_flags
from ep_backend.deployment.processes import free_ports
from ep_backend.deployment.rank_settings import rank_settings
from ep_backend.deployment.schema import Deployment, Role, RoleName
from ep_backend.deployment.words import flag_words
from ep_backend.serving import base_url, is_loopback
from ep_backend.settings import SETTINGS_VARIABLE

BOOTSTRAP = "--disaggregation-bootstrap-port"


@dataclass(frozen=True)
class Instance:
    """One process to start. `health` is asked until it answers 200; a headless launch has none."""

    name: str
    role: RoleName | None
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    health: str | None = None
    agents: list[str] = field(default_factory=list)
    namespace: str | None = None


def engine_instances(deployment: Deployment, folder: Path) -> list[Instance]:
    """The engine launches of every role; writes their settings files into `folder`."""
    instances = []
    for name, role in deployment.roles.items():
        instances += role_instances(deployment, name, role, folder)
    return instances


def router_instance(deployment: Deployment, engines: list[Instance]) -> Instance | None:
    """The engine's own router before a prefill/decode pair; a unified instance is its own address."""
    if deployment.roles.unified is not None:
        return None
    bases = {engine.role: _base(engine.health) for engine in engines if engine.health}
    host, port = _front(deployment)
    if deployment.roles.items()[0][1].engine == "sglang":
        prefill = next(engine.command for engine in engines if engine.role == "prefill" and engine.health)
        bootstrap = prefill[prefill.index(BOOTSTRAP) + 1]
        command = [interpreters.sglang()[0], "-P", "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        command += ["--prefill", bases["prefill"], bootstrap]
        health = "readiness"  # its /health does not wait for the engines
    else:
        command = [_program("vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        command += ["--prefill", bases["prefill"]]
        health = "health"
    command += ["--decode", bases["decode"], "--host", host, "--port", str(port), "--policy", "round_robin"]
    # A retry would repeat a request whose engine has just died, and hide that.
    command += ["--disable-retries", "--prometheus-port", str(free_ports(1))]
    return Instance("router", None, command, health=f"{base_url(host, port)}/{health}")


def role_instances(deployment: Deployment, name: RoleName, role: Role, folder: Path) -> list[Instance]:
    """The launches of one role, one a node; writes their settings files. Raises NoInterpreter."""
    site = _site(deployment, name, role, folder)
    commands = (_sglang_commands if role.engine == "sglang" else _vllm_commands)(deployment, name, role, site)
    names = [name] if role.nodes == 1 else [f"{name}-node{node}" for node in range(role.nodes)]
    return [
        Instance(
            names[node],
            name,
            command,
            site.envs[node],
            health=None if node else f"{base_url(site.host, site.port)}/health",
            agents=[] if node else site.agents,
            namespace=site.spaces[node],
        )
        for node, command in enumerate(commands)
    ]


@dataclass(frozen=True)
class _Site:
    """Where a role's launches run, by node; and where the first of them listens."""

    host: str
    port: int
    address: str
    """Of the first node, as the others reach it."""
    spaces: list[str | None]
    envs: list[dict[str, str]]
    agents: list[str]


def _site(deployment: Deployment, name: RoleName, role: Role, folder: Path) -> _Site:
    agent_port = free_ports(role.ep_size)
    agent_hosts = _agent_hosts(deployment, name, role)
    spaces: list[str | None] = [*_spaces(deployment, name, role)] or [None] * role.nodes
    host, port = _front(deployment) if name == "unified" else ("127.0.0.1", free_ports(1))
    if spaces[0]:
        host = agent_hosts[0]
    node_of = [rank * role.nodes // role.ep_size for rank in range(role.ep_size)]
    agents = [base_url(agent_hosts[node], agent_port + rank) for rank, node in enumerate(node_of)]
    envs = []
    for node, agent_host in enumerate(agent_hosts):
        settings = folder / f"{name}-node{node}.json"
        folder.mkdir(parents=True, exist_ok=True)
        settings.touch(mode=0o600)
        settings.write_text(json.dumps(rank_settings(deployment, name, role, agent_host, agent_port), indent=2))
        envs.append({**role.env, SETTINGS_VARIABLE: str(settings)})
        if spaces[node]:
            envs[node]["GLOO_SOCKET_IFNAME"] = namespaces.DEVICE
            envs[node]["VLLM_HOST_IP"] = agent_host
    return _Site(host, port, agent_hosts[0] if spaces[0] else "127.0.0.1", spaces, envs, agents)


def _vllm_commands(deployment: Deployment, name: RoleName, role: Role, site: _Site) -> list[list[str]]:
    if name != "unified":
        side_port = str(free_ports(role.data_parallel))
        for env in site.envs:
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = side_port
            if "VLLM_HOST_IP" in env:
                env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = env["VLLM_HOST_IP"]
    if captures(deployment, name, role, {role.ep.mode}) and is_loopback(site.host):
        # The admin routes by which a flip drains the role; they know no key, so never where others reach the address.
        for env in site.envs:
            env.setdefault("VLLM_SERVER_DEV_MODE", "1")
    command = [*_vllm(), "serve", str(deployment.model.path), *flag_words(engine_flags(deployment, name, role))]
    head = ["--host", site.host, "--port", str(site.port)]
    if role.nodes == 1:
        return [[*command, *head]]
    local = role.data_parallel // role.nodes
    command += ["--data-parallel-size-local", str(local)]
    command += ["--data-parallel-address", site.address, "--data-parallel-rpc-port", str(free_ports(1))]
    headless = [*_without(command, "--api-server-count"), "--headless", "--data-parallel-start-rank"]
    return [[*command, *head], *([*headless, str(node * local)] for node in range(1, role.nodes))]


def _sglang_commands(deployment: Deployment, name: RoleName, role: Role, site: _Site) -> list[list[str]]:
    """One launch: on one machine two would claim the same ports."""
    python, version = interpreters.sglang()
    command = [python, "-P", "-m", "sglang.launch_server", *flag_words(engine_flags(deployment, name, role, version))]
    if name == "prefill":
        command += [BOOTSTRAP, str(free_ports(1))]
    return [[*command, "--host", site.host, "--port", str(site.port)]]


def without_proxy(env: Mapping[str, str], instances: Iterable[Instance]) -> dict[str, str]:
    """The environment, with these instances' hosts among those that no proxy stands before: engines and routers are told
    of each other by address, and a proxy set for the way to the hub does not reach this machine's own."""
    urls = [url for instance in instances for url in (instance.health, *instance.agents) if url]
    hosts = dict.fromkeys(["localhost", "127.0.0.1", "::1", *(urlsplit(url).hostname or "" for url in urls)])
    given = env.get("no_proxy") or env.get("NO_PROXY")
    direct = ",".join([given, *hosts] if given else hosts)
    return {**env, "no_proxy": direct, "NO_PROXY": direct}


def namespaces_of(deployment: Deployment) -> dict[str, str]:
    """Names and addresses of the network namespaces that the launches want."""
    roles = deployment.roles.items()
    return {space: host for name, role in roles for space, host in _spaces(deployment, name, role).items()}


def _spaces(deployment: Deployment, name: RoleName, role: Role) -> dict[str, str]:
    """A role's namespaces by node, with their addresses; none for a role of one launch."""
    if role.nodes == 1 or not deployment.target.namespaces:
        return {}
    number = get_args(RoleName).index(name)
    return {f"{deployment.name}-{name}-{node}": namespaces.address(number, node) for node in range(role.nodes)}


def _agent_hosts(deployment: Deployment, name: RoleName, role: Role) -> list[str]:
    """Each node's address. On one machine, one of its own."""
    if spaces := _spaces(deployment, name, role):
        return list(spaces.values())
    host = deployment.control.host
    return [f"127.0.0.{node + 1}" if host == "127.0.0.1" else host for node in range(role.nodes)]


def _without(command: list[str], flag: str) -> list[str]:
    if flag not in command:
        return command
    at = command.index(flag)
    return command[:at] + command[at + 2 :]


def _program(name: str) -> str:
    """A program of this Python's environment, or else one on PATH."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: `pip install {name}` in this environment, or use `./ep`")
    return found


def _vllm() -> list[str]:
    """vLLM's program; or its module, where it is on Python's path without having been installed."""
    try:
        return [_program("vllm")]
    except FileNotFoundError:
        if find_spec("vllm") is None:
            raise
        return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def _front(deployment: Deployment) -> tuple[str, int]:
    """Where the router, or a unified instance, listens: where clients ask, unless a door stands there."""
    router = deployment.router
    return ("127.0.0.1", free_ports(1)) if router.hold else (router.host, router.port)


def _base(url: str | None) -> str:
    return (url or "").removesuffix("/health")
