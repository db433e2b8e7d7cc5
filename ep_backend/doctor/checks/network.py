"""NICs, and what lets a GPU and its neighbours use them."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ep_backend.deployment.lint.hosts import GID, SOCKET_VARIABLES
from ep_backend.doctor.checks.gpu import gpus_named
from ep_backend.doctor.checks.machine import capability
from ep_backend.doctor.host import Host, Unknown
from ep_backend.doctor.need import Need
from ep_backend.doctor.result import Verdict, fail, passed, skip, warn

CLASS = "/sys/class/infiniband"
SYS_RAWIO, SYS_ADMIN = 17, 21
IBGDA_DRIVER = "mlx5_core"
# Counters that only bad cables, full switches and lost packets move.
ERRORS = ("symbol_error", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
HW_ERRORS = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err")
DMABUF_KERNEL = (5, 12)
WITHOUT_IBGDA = "EFA goes through libfabric, not IBGDA"


@dataclass(frozen=True)
class Port:
    nic: str
    number: str
    state: str
    physical: str
    rate: str
    layer: str

    @property
    def up(self) -> bool:
        return self.state.endswith("ACTIVE") and self.physical.endswith("LinkUp")


def nics(host: Host, need: Need) -> Verdict:
    names = host.names(CLASS)
    if not names:
        return fail(f"nothing in {CLASS}")
    drivers = {name: os.path.basename(host.real(f"{CLASS}/{name}/device/driver")) for name in names}
    text = ", ".join(f"{count} x {name}" for name, count in Counter(drivers.values()).items())
    if "efa" in need.words:
        return passed(text) if "efa" in drivers.values() else fail(f"{text}, no EFA", "modprobe efa; fi_info -p efa")
    other = [name for name, driver in drivers.items() if driver != IBGDA_DRIVER]
    if len(other) == len(names):
        return fail(f"{text}: IBGDA drives mlx5 devices only")
    return (
        warn(f"{text}: IBGDA cannot use {', '.join(other)}", f"export NVSHMEM_HCA_LIST=^{',^'.join(other)}")
        if other
        else passed(text)
    )


def ports(host: Host, need: Need) -> Verdict:
    found = list(_ports(host))
    if not found:
        return skip(f"nothing in {CLASS}")
    up = [port for port in found if port.up]
    down = [f"{port.nic} {port.state}, {port.physical}" for port in found if not port.up]
    rates = Counter(port.rate for port in up)
    text = f"{len(up)} of {len(found)} up; " + ", ".join(f"{count} x {rate}" for rate, count in rates.items())
    if not up or (len(up) < len({port.nic for port in found}) and len(up) < need.ranks):
        return fail(f"{text}; down: {', '.join(down)}")
    if down:
        return warn(f"{text}; down: {', '.join(down)}")
    return passed(text) if len(rates) == 1 else warn(f"{text}: the slowest paces every exchange")


def firmware(host: Host, need: Need) -> Verdict:
    kinds: dict[str, set[str]] = {}
    for nic in host.names(CLASS):
        kind = host.read_if(f"{CLASS}/{nic}/hca_type") or "unknown type"
        kinds.setdefault(kind, set()).add(host.read_if(f"{CLASS}/{nic}/fw_ver") or "unknown")
    if not kinds:
        raise Unknown(f"nothing in {CLASS}")
    text = "; ".join(f"{kind}: {', '.join(sorted(versions))}" for kind, versions in kinds.items())
    return warn(text) if any(len(versions) > 1 for versions in kinds.values()) else passed(text)


def nic_errors(host: Host, need: Need) -> Verdict:
    bad, read = [], 0
    for port in _ports(host):
        folder = f"{CLASS}/{port.nic}/ports/{port.number}"
        for name in [f"counters/{name}" for name in ERRORS] + [f"hw_counters/{name}" for name in HW_ERRORS]:
            if host.exists(f"{folder}/{name}"):
                read += 1
                if count := host.number(f"{folder}/{name}"):
                    bad.append(f"{port.nic} {name.partition('/')[2]} {count}")
    if bad:
        return warn(f"since boot: {', '.join(bad[:4])}{' ...' if len(bad) > 4 else ''}")
    return passed(f"{read} error counters at 0") if read else skip("no error counters here")


def virtual_functions(host: Host, need: Need) -> Verdict:
    names = host.names(CLASS)
    virtual = [name for name in names if host.exists(f"{CLASS}/{name}/device/physfn")]
    if virtual:
        return warn(f"virtual functions: {', '.join(virtual)}")
    return passed(f"{len(names)} NICs, no virtual function") if names else skip(f"nothing in {CLASS}")


def roce_gid(host: Host, need: Need) -> Verdict:
    ethernet = [port for port in _ports(host) if port.layer == "Ethernet" and port.up]
    if not ethernet:
        return skip("no RoCE port is up")
    usable = {port.nic: _roce_v2(host, port) for port in ethernet}
    everywhere = set.intersection(*(set(indices) for indices in usable.values()))
    text = "; ".join(f"{nic}: RoCE v2 at {', '.join(map(str, indices)) or 'no index'}" for nic, indices in usable.items())
    advice = f"export {GID}={max(everywhere)}" if everywhere else None
    given = need.env.get(GID, host.env.get(GID))
    if given is None:
        return fail(f"{GID} is not set; {text}", advice)
    if not given.isdigit() or any(int(given) not in indices for indices in usable.values()):
        return fail(f"{GID}={given}; {text}", advice)
    return passed(f"{GID}={given}; {text}")


def nic_distance(host: Host, need: Need) -> Verdict:
    up = list(dict.fromkeys(port.nic for port in _ports(host) if port.up))
    if not up:
        return skip("no NIC is up")
    places = {nic: (host.real(f"{CLASS}/{nic}/device"), _numa(host, f"{CLASS}/{nic}/device")) for nic in up}
    chosen: list[tuple[int, str, str]] = []
    for gpu in gpus_named(host, need):
        device = f"/sys/bus/pci/devices/{gpu.bus}"
        path, node = host.real(device), _numa(host, device)
        taken = Counter(nic for _, nic, _ in chosen)
        nic = min(up, key=lambda name: (_distance(path, node, *places[name]), taken[name], name))
        chosen.append((gpu.index, nic, DISTANCES[_distance(path, node, *places[nic])]))
    text = ", ".join(f"GPU {index}: {nic} ({how})" for index, nic, how in chosen)
    mapping = ",".join(f"{nic}:1:1" for _, nic, _ in chosen)
    fix = f"export NVSHMEM_ENABLE_NIC_PE_MAPPING=1 NVSHMEM_HCA_PE_MAPPING={mapping}   # and check the slots: nvidia-smi topo -m"
    if any(how == DISTANCES[2] for _, _, how in chosen):
        return warn(text, fix)
    shared = Counter(nic for _, nic, _ in chosen)
    if max(shared.values(), default=0) > 1 and len(shared) < len(up):
        return warn(f"{text}: GPUs share a NIC while others idle", fix)
    return passed(text)


def verbs_files(host: Host, need: Need) -> Verdict:
    files = [f"/dev/infiniband/{name}" for name in host.names("/dev/infiniband") if name.startswith("uverbs")]
    if not files:
        return fail("no /dev/infiniband/uverbs*")
    if locked := [file for file in files if not host.usable(file)]:
        return fail(f"no read and write access to {', '.join(locked)}")
    return passed(f"{len(files)} uverbs files, readable and writable")


def devx(host: Host, need: Need) -> Verdict:
    if "efa" in need.words:
        return skip(WITHOUT_IBGDA)
    has = [name for name, bit in (("SYS_RAWIO", SYS_RAWIO), ("SYS_ADMIN", SYS_ADMIN)) if capability(host, bit)]
    return passed(f"CAP_{has[0]}") if has else warn("neither CAP_SYS_RAWIO nor CAP_SYS_ADMIN")


def gpudirect(host: Host, need: Need) -> Verdict:
    if found := [name for name in ("nvidia_peermem", "nv_peer_mem") if host.exists(f"/sys/module/{name}")]:
        return passed(f"module {found[0]}")
    release, driver = host.read("/proc/sys/kernel/osrelease"), host.read("/proc/driver/nvidia/version")
    kernel = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    text = f"no nvidia_peermem; kernel {release}, {'open' if 'Open Kernel Module' in driver else 'closed'} NVIDIA modules"
    if kernel >= DMABUF_KERNEL and "Open Kernel Module" in driver:
        return passed(f"{text}: DMA-BUF")
    return fail(text)


def ibgda(host: Host, need: Need) -> Verdict:
    if "efa" in need.words:
        return skip(WITHOUT_IBGDA)
    file = "/proc/driver/nvidia/params"
    memory_ops, words = host.field(file, "EnableStreamMemOPs"), host.field(file, "RegistryDwords")
    peer = "PeerMappingOverride=1" in words
    text = f"EnableStreamMemOPs {memory_ops}, PeerMappingOverride {'1' if peer else 'not set'}"
    if (need.env.get("NVSHMEM_REMOTE_TRANSPORT") or host.env.get("NVSHMEM_REMOTE_TRANSPORT")) == "none":
        return fail(f"{text}, NVSHMEM_REMOTE_TRANSPORT=none", "unset NVSHMEM_REMOTE_TRANSPORT")
    return passed(text) if memory_ops == "1" and peer else warn(f"{text}: puts need the CPU's help")


def gdrcopy(host: Host, need: Need) -> Verdict:
    if not host.exists("/sys/module/gdrdrv"):
        return warn("module gdrdrv is not loaded")
    if not host.exists("/dev/gdrdrv"):
        return warn(
            "gdrdrv is loaded, /dev/gdrdrv is not here",
            "start the container with NVIDIA_GDRCOPY=enabled or --device /dev/gdrdrv",
        )
    if not host.usable("/dev/gdrdrv"):
        return warn("no read and write access to /dev/gdrdrv", "chmod 666 /dev/gdrdrv")
    return passed("/dev/gdrdrv, readable and writable")


def sockets(host: Host, need: Need) -> Verdict:
    there = host.names("/sys/class/net")
    up = [name for name in there if name != "lo" and host.read_if(f"/sys/class/net/{name}/operstate") in ("up", "unknown")]
    env = {**host.env, **need.env}
    given = {name: env[name] for name in SOCKET_VARIABLES if env.get(name)}
    text = ", ".join(f"{name}={value}" for name, value in given.items()) or "no variable names an interface"
    wrong = {value for value in given.values() if not any(_names(value, name) for name in up)}
    if wrong:
        return fail(f"{text}; up here: {', '.join(up) or 'none'}", f"set them to one of {', '.join(up)}" if up else None)
    if len(set(given.values())) > 1:
        return fail(f"{text}: different interfaces")
    if not given and len(up) > 1:
        return warn(f"{text}; up here: {', '.join(up)}")
    return passed(f"{text}; up here: {', '.join(up)}") if up else fail("no network interface is up")


DISTANCES = ("one switch", "one CPU socket", "across sockets")


def _distance(path: str, node: int, other: str, other_node: int) -> int:
    """An index of DISTANCES. Two devices behind one switch share a bridge below the root complex's port."""
    ours, theirs = (place.removeprefix("/sys/devices/").split("/") for place in (path, other))
    shared = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if shared > 1:
        return 0
    return 1 if shared == 1 or node == other_node else 2


def _numa(host: Host, device: str) -> int:
    return int(host.read_if(f"{device}/numa_node") or -1)


def _ports(host: Host) -> Iterator[Port]:
    for nic in host.names(CLASS):
        for number in host.names(f"{CLASS}/{nic}/ports"):
            folder = f"{CLASS}/{nic}/ports/{number}"
            texts = [host.read_if(f"{folder}/{name}") or "unknown" for name in ("state", "phys_state", "rate", "link_layer")]
            yield Port(nic, number, *texts)


def _roce_v2(host: Host, port: Port) -> list[int]:
    """Indices of a port's GIDs that are RoCE v2 and have an address of a network, not of the link alone."""
    folder = f"{CLASS}/{port.nic}/ports/{port.number}"
    found = []
    for index in host.names(f"{folder}/gid_attrs/types"):
        try:
            kind = host.read(f"{folder}/gid_attrs/types/{index}")
        except Unknown:
            continue  # an unused index is there and refuses to be read
        if kind == "RoCE v2" and not (host.read_if(f"{folder}/gids/{index}") or "fe80").startswith("fe80"):
            found.append(int(index))
    return sorted(found)


def _names(value: str, interface: str) -> bool:
    """NCCL takes prefixes, =name for exactly that one, and lists."""
    words = value.split(",")
    return any(interface == word[1:] if word.startswith("=") else interface.startswith(word) for word in words)
