"""One role as files that do not depend on where it runs: the engine's configuration, the ranks' settings, the launch script.

All nodes of a role run the same script; only NODE and LEADER in their environment differ, so that a worker cannot drift
away from its leader.
"""

import json
import shlex
from dataclasses import dataclass

from pydantic import JsonValue

from ep_backend.deployment.flags import engine_flags
from ep_backend.deployment.rank_settings import rank_settings
from ep_backend.deployment.render.text import HEADER, array, as_yaml, script
from ep_backend.deployment.resolve import topology
from ep_backend.deployment.schema import Deployment, Role, RoleName
from ep_backend.deployment.words import REPEATED, flag_words
from ep_backend.serving import is_loopback
from ep_backend.settings import SETTINGS_VARIABLE

LAUNCH, ENGINE, SETTINGS = "launch.sh", "engine.yaml", "settings.json"
# The roles' ports do not meet, for both may run on one host.
FIRST_PORT: dict[RoleName, int] = {"unified": 20000, "prefill": 20000, "decode": 22000}
BOOTSTRAP, RENDEZVOUS, SIDE_CHANNEL, AGENTS = 50, 100, 400, 1000
# Of vLLM's API servers: beside --headless it refuses the first, and --config holds no flag twice.
LEADER_ONLY = ("api-server-count", *REPEATED)


@dataclass(frozen=True)
class RoleFiles:
    """A role's files and what manifests have to know about it."""

    name: RoleName
    role: Role
    port: int
    agents: int
    """The first rank's agent."""
    ranks_a_node: int
    launch: str
    engine: str
    settings: str

    @property
    def files(self) -> dict[str, str]:
        return {LAUNCH: self.launch, ENGINE: self.engine, SETTINGS: self.settings}


def role_files(deployment: Deployment, name: RoleName, role: Role) -> RoleFiles:
    first = FIRST_PORT[name]
    port = deployment.router.port if name == "unified" else first
    settings = rank_settings(deployment, name, role, deployment.control.host, first + AGENTS)
    common, leader = _engine(deployment, name, role)
    lines = (_vllm if role.engine == "vllm" else _sglang)(deployment, name, role, port, leader)
    return RoleFiles(
        name,
        role,
        port,
        first + AGENTS,
        role.ep_size // role.nodes,
        script([*_node_lines(deployment, name, role), *lines]),
        HEADER + as_yaml(common),
        json.dumps(settings, indent=2) + "\n",
    )


def source(deployment: Deployment) -> str:
    """What the engines load; the caller has checked that the file says it."""
    return deployment.model.source or str(deployment.model.path)


def agents_reachable(deployment: Deployment) -> bool:
    """Do the ranks' agents listen where others reach them? They then ask for the key."""
    return not is_loopback(deployment.control.host) and deployment.control.key is not None


def bootstrap_port(name: RoleName) -> int:
    """Where SGLang's decode ranks find the prefill instance."""
    return FIRST_PORT[name] + BOOTSTRAP


def _engine(deployment: Deployment, name: RoleName, role: Role) -> tuple[dict[str, JsonValue], dict[str, JsonValue]]:
    """The flags of every node, for the engine's `--config`; and those of the leader alone."""
    image = role.image or deployment.target.image
    flags = engine_flags(deployment, name, role, image.packages.get(role.engine))
    flags.pop("model-path", None)
    first = FIRST_PORT[name]
    if role.engine == "sglang":
        flags = {"model-path": source(deployment), **flags}
        if name == "prefill":
            flags["disaggregation-bootstrap-port"] = bootstrap_port(name)
        if role.nodes > 1:
            flags["nnodes"] = role.nodes
    elif role.nodes > 1:
        flags |= {"data-parallel-size-local": role.data_parallel // role.nodes, "data-parallel-rpc-port": first + RENDEZVOUS}
    return flags, {flag: flags.pop(flag) for flag in LEADER_ONLY if flag in flags}


def _node_lines(deployment: Deployment, name: RoleName, role: Role) -> list[str]:
    nic, last = topology(deployment.topology).nic, role.nodes - 1
    devices = ["--devices", *nic.devices] if nic is not None and nic.devices else []
    facts = ["python3", "-m", "ep_backend.deployment.node", "--ranks", str(role.ep_size // role.nodes), *devices]
    node = f"NODE=${{NODE:?is the number of this node, 0 for the leader, up to {last}}}" if last else "NODE=${NODE:-0}"
    return [
        f"# A node of {deployment.name}'s {name} role: `NODE=0 LEADER=HOST bash {LAUNCH}`. Nodes differ in NODE alone;",
        "# LEADER is node 0 as the others reach it. ADDRESS: this node's own, default that of its route to the leader;",
        "# LISTEN: where the leader takes requests.",
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        node,
        "LEADER=${LEADER:?is the name or address of node 0}",
        f"if ! [[ $NODE =~ ^(0|[1-9][0-9]*)$ ]] || ((NODE > {last})); then",
        f'    echo "{LAUNCH}: NODE=$NODE, must be {"0" if last == 0 else f"0 to {last}"}" >&2',
        "    exit 2",
        "fi",
        "",
        f"export {SETTINGS_VARIABLE}=$here/{SETTINGS}",
        *(f"export {key}={shlex.quote(value)}" for key, value in role.env.items()),
        "if ! python3 -c 'import ep_backend' 2> /dev/null; then",
        f'    echo "{LAUNCH}: $(command -v python3 || echo python3) has no ep_backend; install it beside the engine" >&2',
        "    exit 1",
        "fi",
        "# Of this node: LEADER and ADDRESS as addresses" + (", the ranks' HCAs" if devices else ""),
        f'facts=$({shlex.join(facts)} --leader "$LEADER")',
        'eval "$facts"',
        "",
    ]


def _vllm(deployment: Deployment, name: RoleName, role: Role, port: int, leader: dict[str, JsonValue]) -> list[str]:
    config = f'--config "$here/{ENGINE}"'
    env = ["export VLLM_HOST_IP=$ADDRESS"]
    if name != "unified":
        channel = FIRST_PORT[name] + SIDE_CHANNEL
        env.append(f"export VLLM_NIXL_SIDE_CHANNEL_HOST=$ADDRESS VLLM_NIXL_SIDE_CHANNEL_PORT={channel}")
    head = [shlex.join(flag_words({flag: value})) for flag, value in leader.items()]
    address = _listen(deployment, name, port)
    command = ["serve", shlex.quote(source(deployment)), config]
    if role.nodes == 1:
        return [*env, *array("arguments", [*command, *head, address]), 'exec vllm "${arguments[@]}"']
    first_rank = f"--data-parallel-start-rank $((NODE * {role.data_parallel // role.nodes}))"
    return [
        *env,
        *array("arguments", [*command, '--data-parallel-address "$LEADER"']),
        "if ((NODE == 0)); then",
        f"    arguments+=({' '.join([*head, address])})",
        "else",
        f"    arguments+=(--headless {first_rank})",
        "fi",
        'exec vllm "${arguments[@]}"',
    ]


def _sglang(deployment: Deployment, name: RoleName, role: Role, port: int, leader: dict[str, JsonValue]) -> list[str]:
    words = [f'--config "$here/{ENGINE}"', _listen(deployment, name, port)]
    if role.nodes > 1:
        words += [f'--dist-init-addr "$LEADER_HOST:{FIRST_PORT[name] + RENDEZVOUS}"', '--node-rank "$NODE"']
    return [
        "export SGLANG_HOST_IP=$ADDRESS",
        *array("arguments", words),
        'exec python3 -m sglang.launch_server "${arguments[@]}"',
    ]


def _listen(deployment: Deployment, name: RoleName, port: int) -> str:
    """Clients ask a unified instance itself; of a pair, the router does, from another host."""
    host = deployment.router.host if name == "unified" else "0.0.0.0"
    return f'--host "${{LISTEN:-{host}}}" --port {port}'
