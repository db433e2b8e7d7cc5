"""Every check on a host where it passes, and on hosts where it warns or fails, with the evidence and the fix it gives."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ep_backend.doctor.checks import CHECKS
from ep_backend.doctor.examine import row
from ep_backend.doctor.host import Host, Unknown
from ep_backend.doctor.need import WITHOUT, GpuMemory, Need
from ep_backend.doctor.result import Row, texts
from ep_backend.plan.model import GIB
from tests.doctor import tree as fake
from tests.doctor.tree import Tree

NEED = Need(
    "decode",
    frozenset(WITHOUT) - {"roce", "efa"},
    ranks=4,
    gpu_memory=(GpuMemory(80 * GIB, 10 * GIB, 2 * GIB, 0.9),),
    heap_bytes=GIB,
    engines=("vllm",),
    ports={"router": ("127.0.0.1", 8000)},
)
ROCE = replace(NEED, words=NEED.words | {"roce"}, env={"NVSHMEM_IB_GID_INDEX": "3"})
EFA = replace(NEED, words=NEED.words | {"efa"})
ONE_HOST = replace(NEED, words=NEED.words - {"nodes", "remote"})

SGLANG = replace(NEED, engines=("sglang",))

Change = Callable[[Tree], object]


def outcome(name: str, tree: Tree, need: Need) -> Row:
    return row(name, CHECKS[name], tree.host(), need, check_s=10)


def test_all_pass_on_a_good_host(tree: Tree) -> None:
    rows = [outcome(name, tree, EFA if name == "hugepages" else NEED) for name in CHECKS if name != "roce_gid"]
    of_all_nics("ports/1/link_layer", "Ethernet")(tree)
    rows.append(outcome("roce_gid", tree, ROCE))
    assert {row.texts.id: row.evidence for row in rows if row.status != "pass" or row.fix} == {}
    assert len(rows) == len(CHECKS)


def said(start: str, text: str | Unknown) -> Change:
    """A command that answers so."""
    return lambda tree: tree.commands.update({start: text})


def gpus(**changes: object) -> Change:
    return said("--query-gpu", fake.gpu_lines(**changes))


def limited(soft: str, hard: str) -> Change:
    """Limits of open files."""
    return lambda tree: tree.limits(files=soft, most=hard)


def env(**variables: str) -> Change:
    return lambda tree: tree.env.update(variables)


def files(content: str | bytes, *names: str) -> Change:
    return lambda tree: [tree.write(name, content) for name in names]


def gone(*names: str) -> Change:
    return lambda tree: [tree.remove(name) for name in names]


def locked(name: str) -> Change:
    return lambda tree: tree.lock(name)


def versions(**changes: str | None) -> Change:
    def change(tree: Tree) -> None:
        for name, version in changes.items():
            tree.versions.pop(name.replace("_", "-"), None)
            if version is not None:
                tree.versions[name.replace("_", "-")] = version

    return change


def of_all_nics(name: str, content: str) -> Change:
    return files(content, *(f"/sys/class/infiniband/mlx5_{i}/{name}" for i in range(fake.GPUS)))


def far_nic(tree: Tree) -> None:
    """GPU 0's NIC on a root complex of the other socket."""
    tree.remove("/sys/class/infiniband/mlx5_0")
    tree.remove("/sys/bus/pci/devices/0000:1a:00.0")
    tree.nic(0, "pci0000:e0/0000:e1:00.0", node=1)
    tree.remove("/sys/class/infiniband/mlx5_1")


def all_with_driver(driver: str, *which: int) -> Change:
    def change(tree: Tree) -> None:
        for i in which:
            device = f"/sys/bus/pci/devices/0000:{0x1A + 16 * i:02x}:00.0/driver"
            tree.remove(device)
            tree.link(tree.host().real(device), f"/sys/bus/pci/drivers/{driver}")

    return change


def sglang_elsewhere(tree: Tree) -> None:
    tree.env["EP_SGLANG_PYTHON"] = "/opt/sglang/python"
    tree.commands["/opt/sglang/python -c"] = "0.5.23+cpu 0.1.0\n"


def sglang_garbage(tree: Tree) -> None:
    sglang_elsewhere(tree)
    tree.commands["/opt/sglang/python -c"] = ""


def df(size: int, free: int) -> Change:
    line = f"tmpfs {size} {size - free} {free} 1% /dev/shm"
    return said("df -Pk", f"Filesystem 1024-blocks Used Available Capacity Mounted on\n{line}\n")


def kernels(text: str) -> Change:
    return lambda tree: (tree.images / "images.json").write_text(text)


def cut(file: str) -> Change:
    return lambda tree: (tree.images / file).write_bytes(b"\x7f")


def without(file: str) -> Change:
    return lambda tree: (tree.images / file).unlink()


def of_other_sources(tree: Tree) -> None:
    """The package lies in its source tree, whose sources are not those of the images."""
    shutil.copytree(KERNELS, tree.images.parents[1] / "kernels")


def of_these_sources(tree: Tree) -> None:
    of_other_sources(tree)
    digest = runpy.run_path(str(KERNELS / "build.py"))["digest"]()
    kernels(fake.images_json(sources=digest))(tree)


KERNELS = Path(__file__).parents[2] / "kernels"
PEERS_ONLY = fake.images_json(None, [file for file in fake.IMAGES if "_put" not in file])
NEAR = replace(NEED, words=NEED.words - {"remote"})
V1 = "/sys/fs/cgroup/memory"

# check, what is changed, the outcome, a part of the evidence, a part of the fix; and the need, where it is another.
CASES: list[tuple[str, Change, str, str, str, Need]] = [
    (name, change, status, evidence, fix, rest[0] if rest else NEED)
    for name, change, status, evidence, fix, *rest in (
        ("port_free", files(fake.TCP.format(port=8000), "/proc/net/tcp"), "fail", "router.port 8000", "ss -ltnp"),
        ("port_free", files(fake.TCP.format(port=8000), "/proc/net/tcp6"), "fail", "router.port 8000", "ss -ltnp"),
        ("port_free", files(fake.TCP.format(port=8000).replace(" 0A ", " 01 "), "/proc/net/tcp"), "pass", "8000", ""),
        (
            "file_is_sound",
            files(""),
            "fail",
            "1 error(s): x.yaml:1:2: wrong",
            "lint",
            replace(NEED, errors=("x.yaml:1:2: wrong",)),
        ),
        ("engine", versions(vllm=None), "fail", "vllm not installed", "pip install vllm"),
        ("engine", versions(vllm="0.25.1"), "fail", "vllm 0.25.1", ">=0.26"),
        ("engine", versions(sglang="0.5.23"), "fail", "sglang 0.5.23", "own", replace(NEED, engines=("vllm", "sglang"))),
        ("engine", files(""), "warn", "neither", "pip install", replace(NEED, engines=())),
        ("torch_pin", versions(torch="2.14.1"), "warn", "pins 2.14.0", "torch==2.14.0"),
        ("torch_pin", versions(torch=None), "skip", "torch is not installed", ""),
        ("plugin", lambda tree: tree.entry_points.clear(), "fail", "has no ep_backend", "pip install"),
        ("plugin", env(EP_SGLANG_PYTHON="/opt/sglang/python"), "skip", "no engine in this", "", SGLANG),
        ("engine", sglang_elsewhere, "pass", "sglang 0.5.23", "", SGLANG),
        ("engine", env(EP_SGLANG_PYTHON="/opt/sglang/python"), "skip", "python cannot be run", "", SGLANG),
        ("engine", sglang_garbage, "skip", "EP_SGLANG_PYTHON=/opt/sglang/python is no Python", "", SGLANG),
        ("torch_pin", sglang_elsewhere, "skip", "environment of its own", "", SGLANG),
        ("plugin", env(VLLM_PLUGINS="lora"), "fail", "VLLM_PLUGINS=lora", "VLLM_PLUGINS=lora,ep_backend"),
        ("plugin", env(VLLM_PLUGINS="lora,ep_backend"), "pass", "", ""),
        ("images", gpus(cap="10.3"), "fail", "sm_103; kernels for sm_90a", "EP_CUDA=1"),
        ("images", gpus(cap="8.0"), "fail", "sm_80", "sm_90 or later"),
        ("images", lambda tree: shutil.rmtree(tree.images), "fail", "no compiled kernels", "EP_CUDA=1"),
        ("images", without("images.json"), "fail", "no compiled kernels", "EP_CUDA=1"),
        ("images", without("rings.sm_90a.cubin"), "fail", "rings.sm_90a.cubin is not there", "EP_CUDA=1"),
        ("images", without("hybrid_put.sm_90a.cubin"), "fail", "hybrid_put.sm_90a.cubin is not there", "EP_CUDA=1", NEAR),
        ("images", kernels(fake.images_json(files=fake.IMAGES[1:])), "fail", "dispatch.sm_90a.cubin is not there", "EP_CUDA=1"),
        ("images", cut("combine.sm_90a.cubin"), "fail", "combine.sm_90a.cubin has 1 bytes, must have 4", "EP_CUDA=1"),
        ("images", of_other_sources, "fail", "of other sources than kernels/ (digest 0123,", "run python3 kernels/build.py"),
        ("images", of_these_sources, "pass", "", ""),
        ("images", kernels(fake.images_json("3.6.5")), "fail", "hold NVSHMEM 3.6.5, must be 3.4.5", "NVSHMEM_HOME"),
        ("images", kernels(fake.images_json("3.6.5")), "warn", "hold NVSHMEM 3.6.5, must be 3.4.5", "NVSHMEM_HOME", NEAR),
        ("images", kernels(PEERS_ONLY), "fail", "none for puts", "NVSHMEM_HOME"),
        ("images", kernels(PEERS_ONLY), "warn", "none for puts", "NVSHMEM_HOME", NEAR),
        ("images", kernels("{"), "fail", "images.json cannot be read", "EP_CUDA=1"),
        ("images", kernels('{"nvshmem": null, "kernels": []}'), "fail", "or is of an earlier kernels/build.py", "EP_CUDA=1"),
        ("cuda_packages", versions(cuda_core=None), "fail", "cuda-core not installed", "[cuda]"),
        ("nvshmem", said("libnvshmem_host", "3.6.5 /usr/lib/libnvshmem_host.so.3"), "fail", "loaded 3.6.5 from /usr", "3.4.5"),
        ("nvshmem", said("libnvshmem_host", Unknown("OSError: no such file")), "fail", "cannot be loaded", "3.4.5"),
        ("nvshmem", versions(nvidia_nvshmem_cu13="3.8.0"), "warn", "the package here is 3.8.0", "LD_LIBRARY_PATH"),
        ("nvshmem", said("libnvshmem_host", "Traceback"), "skip", "no version", ""),
        ("variables", env(NVSHMEM_SYMETRIC_SIZE="1G"), "warn", "read by nothing", "NVSHMEM_SYMMETRIC_SIZE"),
        ("variables", env(NVSHMEM_MAX_TEAMS="7"), "warn", "MAX_TEAMS", "unset"),
        ("variables", env(NVSHMEM_DISABLE_P2P="1"), "fail", "no peer is mapped", "unset"),
        ("variables", env(NVSHMEM_SYMMETRIC_SIZE="lots"), "warn", "no size", "bytes"),
        ("variables", env(CUDA_LAUNCH_BLOCKING="1"), "warn", "every launch waits", "unset"),
        ("driver", gone("/proc/driver", "/dev/nvidiactl"), "fail", "neither", "--gpus all"),
        ("driver", said("--query-gpu", Unknown("nvidia-smi did not answer in 10 s")), "fail", "did not answer", "dmesg"),
        ("driver", said("--query-gpu", ""), "fail", "lists no GPU", "lspci"),
        ("driver", gpus(driver="550.54.15"), "fail", "550.54.15", "580"),
        ("device_files", gone("/dev/nvidia-uvm"), "fail", "/dev/nvidia-uvm not there", "nvidia-modprobe"),
        ("device_files", locked("/dev/nvidia2"), "fail", "/dev/nvidia2", "group"),
        ("gpu_count", env(CUDA_VISIBLE_DEVICES="0,1"), "fail", "2 x NVIDIA H200", "CUDA_VISIBLE_DEVICES"),
        ("gpu_count", gpus(name3="NVIDIA H100"), "warn", "1 x NVIDIA H100", "ranks"),
        (
            "gpu_memory",
            gpus(free2=40000),
            "fail",
            "GPU 2: 39.1 GiB of 140.4 GiB free, a rank takes weights 80.0",
            "compute-apps",
        ),
        ("gpu_memory", gpus(free2=120000), "fail", "claims 0.90", "compute-apps"),
        ("gpu_memory", gpus(free2=120000), "warn", "something else runs", "compute-apps", replace(NEED, gpu_memory=())),
        ("compute_mode", gpus(mode1="Prohibited"), "fail", "1 x Prohibited", "nvidia-smi -c DEFAULT"),
        ("compute_mode", gpus(mode="Exclusive_Process"), "warn", "4 x Exclusive_Process", "nvidia-smi -c DEFAULT"),
        ("mig", gpus(mig1="Enabled"), "fail", "GPU 1", "-mig 0"),
        ("mps", files("nvidia-cuda-mps-control"[:15], "/proc/77/comm"), "warn", "daemon", "quit"),
        ("mps", env(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="50"), "warn", "=50", "unset"),
        ("persistence", gpus(pm0="Disabled"), "warn", "GPU 0", "nvidia-smi -pm 1"),
        ("memory_errors", gpus(ecc3=2), "warn", "GPU 3: 2", "reset"),
        ("memory_errors", gpus(ecc="[N/A]"), "skip", "count none", ""),
        ("peer_access", said("topo -p2p", fake.matrix("OK", one="CNS")), "fail", "peer read: GPU0 to GPU1: CNS", "topo -p2p"),
        ("peer_access", said("topo -p2p", "garbled"), "skip", "0 cells for 4 GPUs", ""),
        ("nvlink", said("topo -m", fake.matrix("PHB")), "warn", "GPU0 to GPU1: PHB", "nvlink -s"),
        ("nvlink", said("topo -m", fake.matrix("NV18", one="SYS")), "warn", "GPU0 to GPU1: SYS", "nvlink -s"),
        ("fabric_manager", said("nvidia-smi -q", fake.fabric("In Progress", "N/A")), "fail", "In Progress", "fabricmanager"),
        ("fabric_manager", said("nvidia-smi -q", fake.fabric("N/A", "N/A")), "pass", "no NVSwitch", ""),
        ("imex", gone("/dev/nvidia-caps-imex-channels"), "fail", "no channel", "nvidia-imex"),
        ("imex", locked("/dev/nvidia-caps-imex-channels/channel0"), "fail", "channel0", "chmod"),
        ("imex", env(NCCL_CUMEM_ENABLE="0"), "fail", "CUMEM", "unset"),
        (
            "imex",
            said("nvidia-smi -q", fake.fabric(cluster="00000000-0000-0000-0000-000000000000")),
            "fail",
            "0 fabric",
            "Fabric",
        ),
        ("iommu", files("DMA-FQ", "/sys/kernel/iommu_groups/1/type"), "warn", "1 x DMA-FQ", "iommu=pt"),
        ("iommu", gone("/sys/kernel/iommu_groups"), "pass", "no IOMMU", ""),
        (
            *("access_control", files(fake.pci_config(fake.ACS_ON), "/sys/bus/pci/devices/0000:28:00.0/config")),
            *("warn", "1 of 4 bridges redirect peer traffic: 0000:28:00.0", "setpci -s 28:00.0"),
        ),
        ("access_control", files(bytes(64), "/sys/bus/pci/devices/0000:28:00.0/config"), "skip", "to root only", ""),
        ("nics", gone("/sys/class/infiniband"), "fail", "nothing in", "RDMA"),
        ("nics", all_with_driver("erdma", 0, 1, 2, 3), "fail", "4 x erdma", "ibv_devinfo"),
        ("nics", all_with_driver("bnxt_re", 3), "warn", "cannot use mlx5_3", "NVSHMEM_HCA_LIST=^mlx5_3"),
        ("nics", files(""), "fail", "no EFA", "efa", EFA),
        ("nics", all_with_driver("efa", 0, 1, 2, 3), "pass", "4 x efa", "", EFA),
        ("ports", files("1: DOWN", "/sys/class/infiniband/mlx5_2/ports/1/state"), "fail", "mlx5_2 1: DOWN", "ibstat"),
        (
            *("ports", files("1: DOWN", "/sys/class/infiniband/mlx5_2/ports/1/state"), "warn", "3 of 4 up", "ibstat"),
            replace(NEED, ranks=2),
        ),
        ("ports", of_all_nics("ports/1/phys_state", "2: Polling"), "fail", "0 of 4 up", "ibstat"),
        ("ports", files("100 Gb/sec", "/sys/class/infiniband/mlx5_1/ports/1/rate"), "warn", "1 x 100 Gb/sec", "ibstat"),
        ("firmware", files("28.39.1002", "/sys/class/infiniband/mlx5_1/fw_ver"), "warn", "28.39.1002, 28.43.2026", "mlxfw"),
        ("firmware", gone("/sys/class/infiniband"), "skip", "nothing in", ""),
        ("nic_errors", of_all_nics("ports/1/counters/symbol_error", "7"), "warn", "mlx5_0 symbol_error 7", "grow"),
        ("nic_errors", of_all_nics("ports/1/hw_counters/out_of_sequence", "9"), "warn", "out_of_sequence 9", "grow"),
        ("nic_errors", of_all_nics("ports/1/counters/symbol_error", "?"), "skip", "no number", ""),
        ("virtual_functions", files("", "/sys/class/infiniband/mlx5_1/device/physfn"), "warn", "mlx5_1", "physical"),
        ("roce_gid", of_all_nics("ports/1/link_layer", "Ethernet"), "fail", "not set", "GID_INDEX=3", replace(ROCE, env={})),
        (
            *("roce_gid", of_all_nics("ports/1/link_layer", "Ethernet"), "fail", "=1; mlx5_0: RoCE v2 at 3", "GID_INDEX=3"),
            replace(ROCE, env={"NVSHMEM_IB_GID_INDEX": "1"}),
        ),
        ("roce_gid", files(""), "skip", "no RoCE port", "", ROCE),
        (
            "nic_distance",
            far_nic,
            "warn",
            "GPU 0: mlx5_0 (across sockets)",
            "PE_MAPPING=mlx5_0:1:1,mlx5_2:1:1,mlx5_2:1:1,mlx5_3:1:1",
        ),
        ("verbs_files", gone("/dev/infiniband"), "fail", "no /dev/infiniband", "mount"),
        ("verbs_files", locked("/dev/infiniband/uverbs1"), "fail", "uverbs1", "mount"),
        ("devx", lambda tree: tree.status(caps="00000000a80425fb"), "warn", "neither", "SYS_RAWIO"),
        ("devx", files(""), "skip", "libfabric", "", EFA),
        ("gpudirect", gone("/sys/module/nvidia_peermem"), "pass", "DMA-BUF", ""),
        (
            "gpudirect",
            lambda tree: (
                tree.remove("/sys/module/nvidia_peermem"),
                tree.write("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04"),
            ),
            *("fail", "closed NVIDIA modules", "modprobe nvidia_peermem"),
        ),
        (
            "gpudirect",
            lambda tree: (
                tree.remove("/sys/module/nvidia_peermem"),
                tree.write("/proc/sys/kernel/osrelease", "5.4.0-190-generic"),
            ),
            *("fail", "kernel 5.4.0", "modprobe nvidia_peermem"),
        ),
        (
            *("ibgda", files('EnableStreamMemOPs: 0\nRegistryDwords: ""\n', "/proc/driver/nvidia/params"), "warn"),
            *("PeerMappingOverride not set", "modprobe.d"),
        ),
        ("gpudirect", gone("/sys/module/nvidia_peermem", "/proc/driver/nvidia/version"), "skip", "cannot be read", ""),
        ("ports", gone("/sys/class/infiniband"), "skip", "nothing in", ""),
        ("ibgda", env(NVSHMEM_REMOTE_TRANSPORT="none"), "fail", "=none", "unset"),
        ("gdrcopy", gone("/sys/module/gdrdrv"), "warn", "not loaded", "modprobe gdrdrv"),
        ("gdrcopy", gone("/dev/gdrdrv"), "warn", "not here", "NVIDIA_GDRCOPY=enabled"),
        ("gdrcopy", locked("/dev/gdrdrv"), "warn", "no read", "chmod"),
        ("sockets", env(GLOO_SOCKET_IFNAME="bond0"), "fail", "bond0", "one of eth0"),
        ("sockets", files("up", "/sys/class/net/ib0/operstate"), "warn", "eth0, ib0", "export GLOO_SOCKET_IFNAME"),
        (
            "sockets",
            lambda tree: (tree.write("/sys/class/net/ib0/operstate", "up"), tree.env.update(GLOO_SOCKET_IFNAME="ib0")),
            *("fail", "different interfaces", "export", replace(NEED, env={"NCCL_SOCKET_IFNAME": "eth0"})),
        ),
        ("sockets", env(NCCL_SOCKET_IFNAME="=eth"), "fail", "=eth", "eth0"),
        ("sockets", files("down", "/sys/class/net/eth0/operstate"), "fail", "no network interface", "export"),
        ("cpus", lambda tree: tree.status(cpus="0-1,8"), "warn", "3 CPUs allowed, 4 ranks", "CPU limit"),
        ("cpus", files("150000 100000", "/sys/fs/cgroup/cpu.max"), "warn", "the time of 1.5", "CPU limit"),
        (
            "governor",
            files("powersave", "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            "warn",
            "powersave",
            "cpupower",
        ),
        ("governor", gone("/sys/devices/system/cpu/cpu0"), "skip", "no cpufreq", ""),
        ("host_memory", files(str(13 * GIB), "/sys/fs/cgroup/memory.max"), "pass", "cgroup leaves 13 GiB", ""),
        ("host_memory", files(str(12 * GIB), "/sys/fs/cgroup/memory.max"), "warn", "cgroup leaves 12 GiB", "memory limit"),
        ("host_memory", lambda tree: tree.meminfo(free=900000), "fail", "0.86 GiB available", "max_tokens"),
        (
            "host_memory",
            lambda tree: (
                tree.write("/proc/self/cgroup", "4:memory:/pod\n0::/\n"),
                tree.write(f"{V1}/memory.limit_in_bytes", "9223372036854771712"),
                tree.write(f"{V1}/pod/memory.limit_in_bytes", str(14 * GIB)),
                tree.write(f"{V1}/pod/memory.usage_in_bytes", str(2 * GIB)),
            ),
            *("warn", "cgroup leaves 12 GiB", "memory limit"),
        ),
        ("host_memory", files(""), "skip", "not known", "", replace(NEED, heap_bytes=None)),
        ("shared_memory", df(65536, 65536), "fail", "container's default", "--shm-size"),
        ("shared_memory", df(8 << 20, 8 << 20), "warn", "8 GiB", "--shm-size"),
        ("shared_memory", df(8 << 20, 8 << 20), "pass", "8 GiB", "", replace(NEED, words=NEED.words - {"gpu"})),
        ("shared_memory", df(64 << 20, 20 << 20), "warn", "more than half", "find /dev/shm"),
        ("shared_memory", said("df -Pk", "?"), "skip", "not understood", ""),
        ("memfd", files("2", "/proc/sys/vm/memfd_noexec"), "fail", "is 2", "vm.memfd_noexec=0"),
        ("memfd", gone("/proc/sys/vm"), "pass", "refuses none", ""),
        (
            "memlock",
            lambda tree: (tree.limits(memlock="8388608"), tree.status(caps="00000000a80425fb")),
            *("fail", "memlock: 8 MiB, no CAP_IPC_LOCK", "ulimit -l unlimited"),
        ),
        ("memlock", lambda tree: tree.limits(memlock="8388608"), "pass", "CAP_IPC_LOCK lifts it", ""),
        ("open_files", limited("20000", "20000"), "warn", "nofile: 20000, at most 20000, advised 65535", "ulimit -n 65536"),
        ("open_files", limited("20000", "20000"), "pass", "nofile: 20000", "", ONE_HOST),
        ("open_files", limited("8192", "16384"), "warn", "at most 16384, advised 16384", "ulimit -Hn", ONE_HOST),
        ("open_files", limited("1024", "4096"), "fail", "1024", "ulimit -n 65536"),
        ("open_files", limited("1024", "4096"), "fail", "1024", "ulimit -n 65536", ONE_HOST),
        ("open_files", limited("1024", "524288"), "pass", "nofile: 1024, which the engine raises to 65535", "", ONE_HOST),
        ("open_files", limited("1024", "unlimited"), "pass", "raises", "", SGLANG),
        ("open_files", limited("8192", "524288"), "warn", "which vLLM raises on the leader's host only", "ulimit -n 65536"),
        ("threads", lambda tree: tree.limits(processes="1000"), "warn", "ulimit -u: 1000", "--pids-limit"),
        ("threads", files("512", "/sys/fs/cgroup/pids.max"), "warn", "pids.max: 512", "--pids-limit"),
        (
            *("clock_source", files("hpet", "/sys/devices/system/clocksource/clocksource0/current_clocksource")),
            *("warn", "hpet", "tsc"),
        ),
        ("clock_agreement", said("timedatectl", "NTPSynchronized=no\n"), "warn", "=no", "set-ntp"),
        ("clock_agreement", said("timedatectl", "Failed to connect to bus"), "skip", "not understood", ""),
        ("numa_balancing", files("1", "/proc/sys/kernel/numa_balancing"), "warn", "is 1", "numa_balancing=0"),
        ("hugepages", lambda tree: tree.meminfo(huge=0), "warn", "0 GiB in free", "nr_hugepages=1679", EFA),
    )
]


@pytest.mark.parametrize("name, change, status, evidence, fix, need", CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_tells(name: str, change: Change, status: str, evidence: str, fix: str, need: Need, tree: Tree) -> None:
    change(tree)
    found = outcome(name, tree, need)
    assert found.status == status, found.evidence
    assert evidence in found.evidence
    assert fix in found.fix
    assert bool(found.fix) == (status in ("warn", "fail"))


def test_every_check_has_a_case_in_which_it_complains() -> None:
    assert {name for name, _, status, *_ in CASES if status in ("warn", "fail")} == set(CHECKS)
    assert len(CHECKS) >= 20


def test_every_check_has_its_texts() -> None:
    for entry in texts().values():
        assert all((entry.title, entry.why, entry.fix, entry.source)), entry.id
        assert set(entry.needs) <= set(WITHOUT), entry.id


def not_understood(tree: Tree) -> dict[str, str]:
    """Checks that stumbled over what they read, rather than say what is wrong with it."""
    rows = {name: outcome(name, tree, ROCE) for name in CHECKS}
    return {name: row.evidence for name, row in rows.items() if row.evidence.startswith("not understood")}


def test_an_empty_machine_crashes_nothing(tmp_path: Path) -> None:
    bare = Tree(tmp_path / "root", tmp_path / "images")
    bare.root.mkdir()
    assert not_understood(bare) == {}


@pytest.mark.parametrize("content", [b"", b"\xff\xfe garbled : \x00", b"-1", b"99999999999999999999999999 : max 0"])
def test_garbled_files_and_answers_crash_nothing(content: bytes, tree: Tree) -> None:
    for file in regular_files(tree):
        file.write_bytes(content)
    tree.commands = {start: content.decode("utf-8", "replace") for start in tree.commands}
    tree.versions = dict.fromkeys(tree.versions, "not.a.version")
    assert not_understood(tree) == {}


def test_files_that_cannot_be_read_crash_nothing(tree: Tree) -> None:
    """A folder in a file's place: also root cannot read it."""
    for file in regular_files(tree):
        file.unlink()
        file.mkdir()
    assert not_understood(tree) == {}


def regular_files(tree: Tree) -> list[Path]:
    return [path for path in tree.root.rglob("*") if path.is_file() and not path.is_symlink()]


def test_visible_devices_of_any_form(tree: Tree) -> None:
    def seen(value: str | None) -> list[int]:
        host: Host = tree.host()
        host.env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        return [gpu.index for gpu in host.gpus()]

    assert seen(None) == [0, 1, 2, 3]
    assert seen("3, 1") == [3, 1]
    assert seen("GPU-20000000,0") == [2, 0]
    assert seen("0,9,1") == [0]
    assert seen("") == seen("-1") == []
    assert seen("01") == [1]
    assert seen("0,0") == seen("GPU-20000000,2") == [], "CUDA shows none where one is named twice"
