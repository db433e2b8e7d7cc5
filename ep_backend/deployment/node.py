"""Runs on a node: `python3 -m ep_backend.deployment.node --leader HOST --ranks N [--devices HCA ...]`.

Prints shell assignments of what only the node knows: the leader's address once its name resolves, this node's own address
on the way there, and the HCA of each rank under whatever CUDA_VISIBLE_DEVICES the launch was given.
"""

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import groupby

RESOLVE_S = 300
NVIDIA_SMI_S = 30


class NodeUnfit(Exception):
    """What this node lacks for the launch."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="ep_backend.deployment.node", description="facts of this node, for its launch")
    parser.add_argument("--leader", required=True, help="name or address of the role's first node")
    parser.add_argument("--ranks", required=True, type=int, help="ranks that this node runs")
    parser.add_argument("--devices", nargs="*", default=[], help="HCA[:PORT] of each GPU, in nvidia-smi's order")
    arguments = parser.parse_args()
    try:
        leader = resolved(arguments.leader)
        facts = {
            "LEADER": leader,
            "LEADER_HOST": f"[{leader}]" if ":" in leader else leader,
            "ADDRESS": os.environ.get("ADDRESS") or address_towards(leader),
        }
        if arguments.devices:
            gpus = _gpus()
            chosen = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), gpus)
            facts["NVSHMEM_HCA_PE_MAPPING"] = hca_mapping(arguments.devices, gpus, chosen, arguments.ranks)
            facts["NVSHMEM_ENABLE_NIC_PE_MAPPING"] = "1"
            # Otherwise CUDA may count GPUs in another order than nvidia-smi.
            facts["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    except NodeUnfit as error:
        sys.exit(f"ep-backend: {socket.gethostname()}: {error}")
    for name, value in facts.items():
        print(f"export {name}={shlex.quote(value)}")


def resolved(name: str, timeout_s: float = RESOLVE_S) -> str:
    """The address of a host, IPv4 where it has one. Names of pods appear only once their service knows them."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
            return min(found, key=lambda address: ":" in address)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise NodeUnfit(f"waited {timeout_s:.0f} s for the leader's name {name} to resolve: {error}") from None
        time.sleep(1)


def address_towards(host: str) -> str:
    """This node's address on the route to a host; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise NodeUnfit(f"has no route to the leader {host}: {error.strerror}; set ADDRESS to this node's own") from None
        return str(probe.getsockname()[0])


Gpus = list[list[str]]
"""The UUIDs of each GPU in nvidia-smi's order: its own, then those of its MIG devices."""


def visible(variable: str | None, gpus: Gpus) -> list[int]:
    """Host indices of the GPUs that CUDA shows for this CUDA_VISIBLE_DEVICES, in its order.

    Entries are indices, UUIDs or beginnings of one, of a GPU or a MIG device. As in CUDA, the first entry that names none
    ends the list, and one that is named twice empties it.
    """
    if variable is None:
        return list(range(len(gpus)))
    found: list[int] = []
    for entry in variable.split(","):
        index = _index(entry.strip(), gpus)
        if index is None:
            break
        if index in found:
            return []
        found.append(index)
    return found


def _index(entry: str, gpus: Gpus) -> int | None:
    if entry.isdigit():
        return int(entry) if int(entry) < len(gpus) else None
    # The older form MIG-GPU-UUID/INSTANCE/INSTANCE has its GPU's UUID inside.
    name = re.sub(r"^MIG-(GPU-[^/]+)/.*", r"\1", entry)
    if not name.startswith(("GPU-", "MIG-")):
        return None
    owners = [index for index, uuids in enumerate(gpus) if any(uuid.startswith(name) for uuid in uuids)]
    return owners[0] if len(owners) == 1 else None


def hca_mapping(devices: Sequence[str], gpus: Gpus, chosen: Sequence[int], ranks: int) -> str:
    """NVSHMEM_HCA_PE_MAPPING: `HCA:PORT:PEs` in the order of the node's ranks, of which each has one GPU."""
    if len(gpus) != len(devices):
        raise NodeUnfit(
            f"topology.nic.devices names the HCAs of {len(devices)} GPUs, but nvidia-smi shows {len(gpus)}; ask for whole "
            "hosts, or leave `devices` out, and NVSHMEM takes the nearest"
        )
    if len(chosen) < ranks:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise NodeUnfit(f"CUDA_VISIBLE_DEVICES={given} shows {len(chosen)} GPUs for {ranks} ranks; name {ranks} of them")
    with_port = [device if ":" in device else f"{device}:1" for device in devices]
    return ",".join(f"{hca}:{len(list(same))}" for hca, same in groupby(with_port[gpu] for gpu in chosen[:ranks]))


def parsed(listing: str) -> Gpus:
    """The output of `nvidia-smi -L`."""
    gpus: Gpus = []
    for line in listing.splitlines():
        uuid = re.search(r"UUID: ([\w/-]+)\)", line)
        if uuid is not None and line.startswith("GPU "):
            gpus.append([uuid[1]])
        elif uuid is not None and gpus:
            gpus[-1].append(uuid[1])
    return gpus


def _gpus() -> Gpus:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NodeUnfit(f"topology.nic.devices is given, but `nvidia-smi -L` does not answer: {error}") from None
    return parsed(done.stdout)


if __name__ == "__main__":
    main()
