"""Rules on pods, hosts and the network, and on what two roles must agree on."""

import os
from collections.abc import Iterator

from ep_backend.deployment.buffers import buffer_config
from ep_backend.deployment.lint.view import Place, RoleView, problem
from ep_backend.deployment.problems import Problem
from ep_backend.deployment.schema import KUBERNETES, Deployment, Pod
from ep_backend.plan.model import GIB
from ep_backend.serving import is_loopback

LEAST_SHM = 16 * GIB
SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")
GID = "NVSHMEM_IB_GID_INDEX"
# Flags that both roles must have alike, with the engines' defaults.
AGREED = (("EP501", "kv-cache-dtype", "auto"), ("EP502", "block-size", None), ("EP502", "page-size", 1))
EVERY_ADDRESS = ("0.0.0.0", "::")
LOCAL_BROADCAST = "enable-dp-attention-local-control-broadcast"


def check_target(deployment: Deployment, views: list[RoleView]) -> Iterator[Problem]:
    target, pod = deployment.target, deployment.target.pod
    if target.kind == "local" and pod != Pod():
        yield problem(
            "EP407", ("target", "pod"), "is given, but a local target has no pods", "remove it, or choose another kind"
        )
    if target.kind not in KUBERNETES:
        return
    place: Place = ("target", "pod", "shm") if pod.shm else ("target", "pod")
    if (pod.shm or 0) < LEAST_SHM:
        have = f"{pod.shm / GIB:.1f} GiB" if pod.shm else "the container's default of 64 MiB"
        yield problem("EP401", place, f"gives /dev/shm {have}, must be at least 16 GiB", "set shm: 64GiB")
    if not any(view.role.nodes > 1 for view in views) or deployment.topology.device == "cpu":
        return
    if "IPC_LOCK" not in pod.capabilities:
        at: Place = ("target", "pod", "capabilities") if pod.capabilities else ("target", "pod")
        yield problem("EP402", at, "lacks IPC_LOCK", "set capabilities: [IPC_LOCK]")
    per_node = views[0].machine.gpus_per_node
    if not pod.rdma:
        yield problem("EP403", ("target", "pod"), "names no rdma resource", f"set rdma: {{rdma/ib: {per_node or 8}}}")
    elif per_node and max(pod.rdma.values()) < min(per_node, max(view.role.ep_size for view in views)):
        name, count = max(pod.rdma.items(), key=lambda item: item[1])
        what = f"gives {count} {name} for {per_node} GPUs"
        yield problem("EP403", ("target", "pod", "rdma"), what, f"set {name}: {per_node}")


def check_router(deployment: Deployment) -> Iterator[Problem]:
    """An address that the file names, where clients are on other hosts."""
    router, target, place = deployment.router, deployment.target, ("router", "host")
    if "host" not in router.model_fields_set:
        return
    if (
        target.kind in KUBERNETES
        and router.host not in EVERY_ADDRESS
        and (is_loopback(router.host) or not target.pod.host_network)
    ):
        what = f"is {router.host}, must be {' or '.join(EVERY_ADDRESS)} in a pod, which gets its address when it starts"
        yield problem("EP411", place, what, "remove it: rendered pods listen on every address")
        return
    elsewhere = target.kind == "slurm" or (target.kind == "shell" and deployment.topology.nodes > 1)
    if elsewhere and is_loopback(router.host):
        what = f"is {router.host}, which only clients on the router's own host reach"
        yield problem("EP410", place, what, f"set host: {EVERY_ADDRESS[0]}, or remove it: the scripts then do so")


def check_ports(deployment: Deployment) -> Iterator[Problem]:
    """`up` starts the control service beside the router."""
    router, control = deployment.router, deployment.control
    same = router.host == control.host or not {router.host, control.host}.isdisjoint(EVERY_ADDRESS)
    if deployment.target.kind == "local" and control.port == router.port and same:
        yield problem("EP014", ("control", "port"), f"{control.port} is the router's port too", "choose another port")


def check_control(deployment: Deployment, views: list[RoleView]) -> Iterator[Problem]:
    control = deployment.control
    if not is_loopback(control.host) and control.key is None:
        yield problem("EP406", ("control", "host"), f"is {control.host}, and there is no key", "set control.key")
    kind = deployment.target.kind
    several = kind in (*KUBERNETES, "slurm") or (kind == "shell" and deployment.topology.nodes > 1)
    if several and not is_loopback(control.host) and control.host not in EVERY_ADDRESS:
        what = f"is {control.host}, but the agents run on several hosts, each with addresses of its own"
        yield problem("EP412", ("control", "host"), what, f"set host: {EVERY_ADDRESS[0]}, or remove it")
    for view in views:
        if view.role.arg(LOCAL_BROADCAST):
            place = view.flag_place(LOCAL_BROADCAST)
            yield problem("EP408", place, "delivers control requests to each rank on its own", "remove it")


def check_network(view: RoleView) -> Iterator[Problem]:
    role, nic = view.role, view.machine.nic
    if role.nodes == 1 or view.deployment.topology.device == "cpu":
        return
    if view.machine.preset and nic is None and view.group is not None and view.group.nodes > 1:
        what = f"is {role.nodes}, but the topology has no NIC between nodes"
        yield problem("EP206", (*view.place, "nodes"), what, "give topology.nic, or use one node")
    if nic is not None and nic.devices and view.machine.gpus_per_node not in (None, len(nic.devices)):
        what = f"names {len(nic.devices)} HCAs for the {view.machine.gpus_per_node} GPUs of a host"
        yield problem("EP207", ("topology", "nic", "devices"), what, "name one for each GPU, or remove it")
    env_place: Place = (*view.place, "env") if role.env else view.place
    if nic is not None and nic.kind == "roce" and GID not in role.env:
        yield problem("EP404", env_place, f"has no {GID}, but the NICs are RoCE", f'set {GID}: "3"')
    given = {name: role.env[name] for name in SOCKET_VARIABLES if name in role.env}
    if view.deployment.target.kind == "local":
        return
    if missing := [name for name in SOCKET_VARIABLES if name not in given]:
        yield problem(
            "EP405", env_place, f"has no {', '.join(missing)}", "set them to the interface that reaches the other nodes"
        )
    elif len(set(given.values())) > 1:
        names = ", ".join(f"{name}={value}" for name, value in given.items())
        yield problem("EP405", env_place, f"names different interfaces: {names}", "set all to one interface")


def check_host_memory(views: list[RoleView]) -> Iterator[Problem]:
    """The host fabric's heaps are this machine's memory, shared but without a file in /dev/shm."""
    local = [view for view in views if view.deployment.topology.device == "cpu" and view.deployment.target.kind == "local"]
    if not local:
        return
    need = 0
    for view in local:
        if view.shape is not None and view.group is not None:
            try:
                config = buffer_config(view.deployment, view.name, view.role, view.shape, view.capacity)
            except ValueError:
                return
            need += view.group.ranks * config.size_hint()["total"]
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > size:
        what = f"need {need / GIB:.1f} GiB of shared memory, but this machine has {size / GIB:.1f} GiB in all"
        yield problem("EP409", ("roles",), what, "lower max_tokens or lanes")


def check_agreement(deployment: Deployment, views: list[RoleView]) -> Iterator[Problem]:
    """What prefill and decode must have alike."""
    pair = {view.name: view for view in views}
    if not {"prefill", "decode"} <= set(pair):
        return
    prefill, decode = pair["prefill"], pair["decode"]
    if prefill.role.engine != decode.role.engine:
        what = f"is {decode.role.engine}, but prefill runs {prefill.role.engine}"
        yield problem("EP504", (*decode.place, "engine"), what, "use one engine for both roles")
        return
    if not prefill.role.traits.cpu_pairs and deployment.topology.device == "cpu":
        what = f"is {prefill.role.engine}, which moves KV blocks between GPUs only, but topology.device is cpu"
        yield problem("EP505", (*prefill.place, "engine"), what, "use a unified role, or vllm for both")
    for code, flag, default in AGREED:
        ours, theirs = (v.role.arg(flag) or default for v in (decode, prefill))
        # vLLM chooses its block size by model; one that is named may well be that.
        if ours != theirs and None not in (ours, theirs):
            what = f"is {ours}, but prefill has {theirs}"
            yield problem(code, decode.flag_place(flag), what, "give both roles the same")
    lengths = [v.role.number("max-model-len", "context-length") for v in (decode, prefill)]
    if lengths[0] is not None and lengths[1] is not None and lengths[0] < lengths[1]:
        place = decode.flag_place("max-model-len", "context-length")
        yield problem("EP503", place, f"is {lengths[0]}, but prefill takes {lengths[1]}", f"set it to {lengths[1]}")
