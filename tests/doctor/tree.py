"""A folder that looks like a host of four GPUs with four NICs, and the answers of its commands."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ep_backend.doctor.host import Host, Unknown

GPUS = 4
ACS_OFF, ACS_ON = 0x0001, 0x001D
STATUS = "Name:\tpython\nCapEff:\t{caps}\nCpus_allowed_list:\t{cpus}\n"
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             {processes}                127385               processes
Max open files            {files}              {most}              files
Max locked memory         {memlock}            unlimited            bytes
"""
MEMINFO = "MemTotal:       2000000000 kB\nMemAvailable:   {free} kB\nHugePages_Free:     {huge}\nHugepagesize:       2048 kB\n"
TCP = "  sl  local_address rem_address   st tx_queue\n   0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000\n"
GPU = "{i}, {name}, GPU-{i}0000000-aaaa, 00000000:{bus}:00.0, {cap}, {driver}, 143771, {free}, {mig}, {pm}, {mode}, {ecc}\n"
FABRIC = """\
GPU 00000000:{bus}:00.0
    Product Name                          : NVIDIA H200
    Fabric
        State                             : {state}
        Status                            : {status}
        CliqueId                          : 0
        ClusterUUID                       : {cluster}
        Health
            Bandwidth                     : N/A
    Processes                             : None
"""
CLUSTER = "4b1c0d62-8a55-4c51-9c6e-0b6f2b1c7d11"


IMAGES = [
    f"{name}.sm_90a.cubin"
    for name in ("dispatch", "combine", "hybrid", "rings", "per_expert", "refuse", "hybrid_put", "refuse_put")
]


def images_json(nvshmem: str | None = "3.4.5", files: Sequence[str] = IMAGES, sources: str = "0123") -> str:
    return json.dumps({"sources": sources, "nvshmem": nvshmem, "images": dict.fromkeys(files, 4), "kernels": []})


def bus(i: int) -> str:
    return f"{0x19 + 16 * i:02x}"


def gpu_lines(**changes: object) -> str:
    """What nvidia-smi answers; every GPU alike but for `name3` and the like, which change GPU 3 alone."""
    values = {"name": "NVIDIA H200", "cap": "9.0", "driver": "580.159.04", "free": 143000, "mig": "Disabled"}
    values |= {"pm": "Enabled", "mode": "Default", "ecc": 0} | {k: v for k, v in changes.items() if not k[-1].isdigit()}
    own = [{k[:-1]: v for k, v in changes.items() if k[-1] == str(i)} for i in range(GPUS)]
    return "".join(GPU.format(**(values | own[i] | {"i": i, "bus": bus(i)})) for i in range(GPUS))


def matrix(cell: str, columns: Sequence[str] = (), one: str | None = None) -> str:
    """A table of `nvidia-smi topo`; `one` stands between GPU0 and GPU1."""
    names = [f"GPU{i}" for i in range(GPUS)]
    lines = ["\t\x1b[4m" + "\t".join([*names, *columns, "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"]
    for row in names:
        cells = [" X " if a == row else one if one and {a, row} == {"GPU0", "GPU1"} else cell for a in names]
        lines.append("\t".join([row, *cells, *["PIX" for _ in columns], "0-47", "0"]))
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self"])


def fabric(state: str = "Completed", status: str = "Success", cluster: str = CLUSTER) -> str:
    return "\n".join(FABRIC.format(bus=bus(i), state=state, status=status, cluster=cluster) for i in range(GPUS))


def pci_config(acs: int) -> bytes:
    """A bridge's 4096 bytes of configuration space: an AER capability, then access control."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x148 << 20 | 1 << 16 | 0x0001).to_bytes(4, "little")
    config[0x148:0x14C] = (0 << 20 | 1 << 16 | 0x000D).to_bytes(4, "little")
    config[0x14E:0x150] = acs.to_bytes(2, "little")
    return bytes(config)


@dataclass
class Tree:
    root: Path
    images: Path
    env: dict[str, str] = field(default_factory=dict)
    commands: dict[str, str | Unknown] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    entry_points: list[str] = field(default_factory=lambda: ["ep_backend"])

    def host(self) -> Host:
        return Host(self.root, self.env, self.answer, self.versions.get, lambda _: self.entry_points, self.images)

    def answer(self, command: Sequence[str]) -> str:
        words = " ".join(command)
        for start, said in self.commands.items():
            if start in words:
                if isinstance(said, Unknown):
                    raise said
                return said
        raise Unknown(f"{command[0]} cannot be run (No such file or directory)")

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def write(self, name: str, content: str | bytes = "") -> None:
        file = self.path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def remove(self, name: str) -> None:
        path = self.path(name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def link(self, name: str, target: str) -> None:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(self.path(target), path.parent))

    def lock(self, name: str) -> None:
        """There, and not accessible: also root has no access through a link that leads nowhere."""
        self.remove(name)
        self.path(name).symlink_to("nowhere")

    def status(self, caps: str = "000001ffffffffff", cpus: str = "0-15") -> None:
        self.write("/proc/self/status", STATUS.format(caps=caps, cpus=cpus))

    def limits(
        self, processes: str = "unlimited", files: str = "1048576", most: str = "1048576", memlock: str = "unlimited"
    ) -> None:
        self.write("/proc/self/limits", LIMITS.format(processes=processes, files=files, most=most, memlock=memlock))

    def meminfo(self, free: int = 1900000000, huge: int = 4096) -> None:
        self.write("/proc/meminfo", MEMINFO.format(free=free, huge=huge))

    def place(self, folder: str, address: str, files: dict[str, str | bytes]) -> str:
        """A PCI device below `folder` of /sys/devices, known by its address."""
        device = f"/sys/devices/{folder}/{address}"
        for name, content in files.items():
            self.write(f"{device}/{name}", content)
        self.link(f"/sys/bus/pci/devices/{address}", device)
        return device

    def nic(self, i: int, folder: str, node: int = 0, driver: str = "mlx5_core", layer: str = "InfiniBand") -> None:
        device = self.place(folder, f"0000:{0x1A + 16 * i:02x}:00.0", {"class": "0x020700", "numa_node": str(node)})
        self.write(f"/sys/bus/pci/drivers/{driver}/bind")
        self.link(f"{device}/driver", f"/sys/bus/pci/drivers/{driver}")
        name = f"/sys/class/infiniband/mlx5_{i}"
        self.link(f"{name}/device", device)
        files = {"hca_type": "MT4129", "fw_ver": "28.43.2026", "ports/1/state": "4: ACTIVE", "ports/1/phys_state": "5: LinkUp"}
        files |= {"ports/1/rate": "400 Gb/sec (4X NDR)", "ports/1/link_layer": layer}
        files |= {"ports/1/counters/symbol_error": "0", "ports/1/hw_counters/out_of_sequence": "0"}
        files |= {"ports/1/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001", "ports/1/gid_attrs/types/3": "RoCE v2"}
        files |= {"ports/1/gids/1": "fe80:0000:0000:0000:0a00:27ff:fe00:0001", "ports/1/gid_attrs/types/1": "RoCE v2"}
        for file, content in files.items():
            self.write(f"{name}/{file}", content)


def good(root: Path, images: Path) -> Tree:
    """A host on which every check passes."""
    tree = Tree(root, images)
    tree.status()
    tree.limits()
    tree.meminfo()
    tree.write("/proc/self/cgroup", "0::/\n")
    tree.write("/proc/net/tcp", TCP.format(port=22))
    tree.write("/proc/42/comm", "python3")
    tree.write("/proc/sys/kernel/numa_balancing", "0")
    tree.write("/proc/sys/kernel/osrelease", "6.8.0-60-generic")
    tree.write("/proc/sys/vm/memfd_noexec", "0")
    tree.write(
        "/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
    )
    tree.write("/proc/driver/nvidia/params", 'EnableMSI: 1\nEnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n')
    devices = ["nvidiactl", "nvidia-uvm", "gdrdrv", "nvidia-caps-imex-channels/channel0"]
    for name in [*devices, *(f"nvidia{i}" for i in range(GPUS)), *(f"infiniband/uverbs{i}" for i in range(GPUS))]:
        tree.write(f"/dev/{name}")
    for module in ("gdrdrv", "nvidia_peermem"):
        tree.write(f"/sys/module/{module}/refcnt", "0")
    tree.write("/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc")
    tree.write("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance")
    tree.write("/sys/kernel/iommu_groups/0/type", "identity")
    tree.write("/sys/class/net/eth0/operstate", "up")
    tree.write("/sys/class/net/lo/operstate", "unknown")
    for i in range(GPUS):
        complex_, switch = f"pci0000:{0x17 + 16 * i:02x}", f"0000:{0x18 + 16 * i:02x}:00.0"
        tree.place(complex_, switch, {"class": "0x060400", "config": pci_config(ACS_OFF), "numa_node": str(i // 2)})
        tree.place(f"{complex_}/{switch}", f"0000:{bus(i)}:00.0", {"class": "0x030200", "numa_node": str(i // 2)})
        tree.nic(i, f"{complex_}/{switch}", i // 2)
    tree.commands = {
        "--query-gpu": gpu_lines(),
        "topo -p2p": matrix("OK"),
        "topo -m": matrix("NV18", [f"NIC{i}" for i in range(GPUS)]),
        "nvidia-smi -q": fabric(),
        "df -Pk": "Filesystem 1024-blocks Used Available Capacity Mounted on\ntmpfs 67108864 1024 67107840 1% /dev/shm\n",
        "timedatectl": "NTPSynchronized=yes\n",
        "libnvshmem_host": "3.4.5 /opt/lib/libnvshmem_host.so.3\n",
    }
    tree.versions = {"vllm": "0.33.0", "torch": "2.14.0", "nvshmem4py-cu13": "0.4.1", "cuda-core": "0.3.2"}
    tree.versions |= {"nvidia-nvshmem-cu13": "3.4.5"}
    images.mkdir(parents=True)
    for file in IMAGES:
        (images / file).write_bytes(b"\x7fELF")
    (images / "images.json").write_text(images_json())
    return tree
