"""GPUs, their driver, and what joins them within a host or an NVLink domain."""

import re
from collections import Counter

from ep_backend.deployment.engines import number
from ep_backend.doctor.host import Gpu, Host, Unknown, matrix
from ep_backend.doctor.need import Need
from ep_backend.doctor.result import Verdict, fail, passed, skip, warn
from ep_backend.plan.model import GIB

# CUDA 13, which nvshmem4py-cu13, cuda-core and the images need.
LEAST_DRIVER = "580"
FREE_FRACTION = 0.9
ACS_REDIRECTS = 0b1100  # P2P request and completion redirect
ACS_CAPABILITY = 0x000D
BRIDGE_CLASS = "0x0604"


def driver(host: Host, need: Need) -> Verdict:
    if not host.has_driver:
        return fail(
            "neither /proc/driver/nvidia nor /dev/nvidiactl is there",
            "install the NVIDIA driver, or start the container with --gpus all",
        )
    try:
        gpus = host.all_gpus()
    except Unknown as error:
        return fail(str(error), "nvidia-smi; then `dmesg | grep -i -e nvrm -e xid`")
    if not gpus:
        return fail("nvidia-smi lists no GPU", "lspci -d 10de: ; then `dmesg | grep -i nvrm`")
    version = gpus[0].driver
    if number(version) < number(LEAST_DRIVER):
        return fail(f"driver {version}, CUDA 13 needs {LEAST_DRIVER} or later")
    return passed(f"driver {version}")


def device_files(host: Host, need: Need) -> Verdict:
    files = ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    files += [f"/dev/{name}" for name in host.names("/dev") if re.fullmatch(r"nvidia\d+", name)]
    if missing := [file for file in files if not host.exists(file)]:
        return fail(f"{', '.join(missing)} not there", "nvidia-modprobe -u -c 0   # in a container: --gpus all")
    if locked := [file for file in files if not host.usable(file)]:
        return fail(f"no read and write access to {', '.join(locked)}")
    return passed(f"{len(files)} files in /dev, readable and writable")


def gpu_count(host: Host, need: Need) -> Verdict:
    gpus = host.gpus()
    kinds = Counter(gpu.name for gpu in gpus)
    text = ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "no GPU"
    if chosen := host.env.get("CUDA_VISIBLE_DEVICES"):
        text += f" (CUDA_VISIBLE_DEVICES={chosen})"
    if len(gpus) < max(1, need.ranks):
        return fail(f"{text} for {need.ranks} ranks")
    return passed(text) if len(kinds) == 1 else warn(f"{text}: the slowest paces every step")


def gpu_memory(host: Host, need: Need) -> Verdict:
    gpus = host.gpus()[: need.ranks or None]
    if not gpus:
        raise Unknown("no GPU is visible")
    worst = min(gpus, key=lambda gpu: gpu.free)
    text = f"GPU {worst.index}: {_gib(worst.free)} of {_gib(worst.total)} free"
    for held in need.gpu_memory:
        parts = f"weights {_gib(held.weights)}, buffer {_gib(held.buffer)}, reserve {_gib(held.reserve)}"
        if worst.free < held.least:
            return fail(f"{text}, a rank takes {parts}")
        if worst.free < held.fraction * worst.total:
            return fail(f"{text}, the engine claims {held.fraction:.2f} of the GPU")
        text += f"; a rank takes {parts}"
    if "file" in need.words and not need.gpu_memory:
        text += "; what a rank takes is not known (topology.preset or hbm, and the model's shape)"
    return passed(text) if worst.free >= FREE_FRACTION * worst.total else warn(f"{text}: something else runs there")


def compute_mode(host: Host, need: Need) -> Verdict:
    modes = Counter(gpu.compute_mode or "Default" for gpu in host.gpus())
    text = _counted(modes)
    if "Prohibited" in modes:
        return fail(text)
    return passed(text) if set(modes) <= {"Default"} else warn(f"{text}: only one process may use a GPU")


def mig(host: Host, need: Need) -> Verdict:
    on = [gpu.index for gpu in host.gpus() if gpu.mig == "Enabled"]
    return fail(f"MIG is on: GPU {_list(on)}") if on else passed("MIG is off or not there")


def mps(host: Host, need: Need) -> Verdict:
    pids = [name for name in host.names("/proc") if name.isdigit()]
    names = {host.read_if(f"/proc/{pid}/comm") or "" for pid in pids}
    if any(name.startswith("nvidia-cuda-mps") for name in names):  # comm holds 15 characters
        return warn("an MPS daemon runs")
    share = host.env.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if share:
        return warn(f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={share}", "unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    return passed(f"no MPS among {len(pids)} processes")


def persistence(host: Host, need: Need) -> Verdict:
    off = [gpu.index for gpu in host.gpus() if gpu.persistence == "Disabled"]
    return warn(f"off: GPU {_list(off)}") if off else passed("on")


def memory_errors(host: Host, need: Need) -> Verdict:
    counted = {gpu.index: gpu.uncorrected for gpu in host.gpus() if gpu.uncorrected is not None}
    bad = [f"GPU {index}: {count}" for index, count in counted.items() if count]
    if bad:
        return warn(f"uncorrected errors since the driver was loaded: {', '.join(bad)}")
    return passed("no uncorrected error") if counted else skip("the GPUs count none")


def peer_access(host: Host, need: Need) -> Verdict:
    for what in ("r", "w"):
        cells = _between(host, need, "-p2p", what)
        if bad := [f"{a} to {b}: {cell}" for (a, b), cell in cells.items() if cell != "OK"]:
            return fail(f"peer {'read' if what == 'r' else 'write'}: {_some(bad)}")
    return passed(f"read and write, all {len(cells)} directed pairs")


def nvlink(host: Host, need: Need) -> Verdict:
    cells = _between(host, need, "-m")
    if bad := [f"{a} to {b}: {cell}" for (a, b), cell in cells.items() if not re.fullmatch(r"NV\d+", cell)]:
        return warn(f"not over NVLink: {_some(bad)}")
    return passed(f"{', '.join(sorted(set(cells.values())))} between all {len(gpus_named(host, need))} GPUs")


def fabric_manager(host: Host, need: Need) -> Verdict:
    states = _fabric(host)
    if not states:
        return passed("no NVSwitch fabric")
    text = _counted(Counter(f"{state}, {status}" for state, status, _ in states))
    if all((state, status) == ("Completed", "Success") for state, status, _ in states):
        return passed(text)
    return fail(text)


def imex(host: Host, need: Need) -> Verdict:
    folder = "/dev/nvidia-caps-imex-channels"
    channels = [f"{folder}/{name}" for name in host.names(folder)]
    if not channels:
        return fail(f"no channel in {folder}")
    if locked := [file for file in channels if not host.usable(file)]:
        return fail(
            f"no read and write access to {_some(locked)}", f"chmod 666 {locked[0]}   # or mount it into the container so"
        )
    clusters = {cluster for _, _, cluster in _fabric(host) if cluster}
    if host.env.get("NCCL_CUMEM_ENABLE") == "0":
        return fail("NCCL_CUMEM_ENABLE=0 turns fabric handles off", "unset NCCL_CUMEM_ENABLE")
    if len(clusters) != 1:
        return fail(
            f"GPUs are in {len(clusters)} fabric clusters, must be one",
            "nvidia-smi -q | grep -A8 Fabric; systemctl status nvidia-imex",
        )
    return passed(f"{len(channels)} channel(s), fabric cluster {clusters.pop()}")


def iommu(host: Host, need: Need) -> Verdict:
    groups = host.names("/sys/kernel/iommu_groups")
    if not groups:
        return passed("no IOMMU groups: off, or hidden from this machine")
    types = Counter(host.read_if(f"/sys/kernel/iommu_groups/{group}/type") or "unknown" for group in groups)
    text = f"{len(groups)} groups: {_counted(types)}"
    return warn(text) if any(kind.startswith("DMA") for kind in types) else passed(text)


def access_control(host: Host, need: Need) -> Verdict:
    folder = "/sys/bus/pci/devices"
    bridges = [name for name in host.names(folder) if (host.read_if(f"{folder}/{name}/class") or "").startswith(BRIDGE_CLASS)]
    if not bridges:
        return passed("no PCI bridge here")
    redirecting, hidden = [], 0
    for name in bridges:
        config = host.read_bytes(f"{folder}/{name}/config")
        if len(config) <= 256:
            hidden += 1
        elif _acs_control(config) & ACS_REDIRECTS:
            redirecting.append(name)
    if redirecting:
        fix = (
            f"setpci -s {redirecting[0].removeprefix('0000:')} ECAP_ACS+6.w=0000   # each, as root; better: ACS off in the BIOS"
        )
        return warn(f"{len(redirecting)} of {len(bridges)} bridges redirect peer traffic: {_some(redirecting)}", fix)
    if hidden:
        return skip(f"{hidden} of {len(bridges)} bridges show their control word to root only: lspci -vvv | grep ACSCtl")
    return passed(f"{len(bridges)} bridges, none redirects peer traffic")


def gpus_named(host: Host, need: Need) -> list[Gpu]:
    """The GPUs that the ranks of this host take."""
    gpus = host.gpus()
    return gpus[: need.ranks] if need.ranks else gpus


def _between(host: Host, need: Need, *options: str) -> dict[tuple[str, str], str]:
    """Cells of a topology table between two different GPUs of ours."""
    ours = {f"GPU{gpu.index}" for gpu in gpus_named(host, need)}
    cells = matrix(host.say("nvidia-smi", "topo", *options))
    found = {(a, b): cell for (a, b), cell in cells.items() if a != b and {a, b} <= ours}
    if len(ours) < 2:
        raise Unknown(f"{len(ours)} GPU is visible, no pair to ask about")
    if len(found) != len(ours) * (len(ours) - 1):
        raise Unknown(f"nvidia-smi topo {' '.join(options)} has {len(found)} cells for {len(ours)} GPUs")
    return found


def _fabric(host: Host) -> list[tuple[str, str, str]]:
    """State, status and cluster of each GPU's fabric; none where there is no switch."""
    found = []
    for block in re.split(r"\n\s+Fabric\s*\n", host.say("nvidia-smi", "-q"))[1:]:
        values = dict(
            re.findall(r"^\s+(State|Status|ClusterUUID|CliqueId)\s*: (.*?)\s*$", "\n".join(block.splitlines()[:8]), re.M)
        )
        state = values.get("State", "N/A")
        cluster = values.get("ClusterUUID", "N/A")
        if state != "N/A":
            found.append((state, values.get("Status", "N/A"), "" if set(cluster) <= set("0-N/A") else cluster))
    return found


def _acs_control(config: bytes) -> int:
    """The ACS control word of a device's extended configuration space; 0 where it has none."""
    at = 0x100
    for _ in range(64):  # a garbled list may be a ring
        if at + 8 > len(config):
            return 0
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == ACS_CAPABILITY:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at = header >> 20
        if at < 0x100:
            return 0
    return 0


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _some(items: list[str], most: int = 3) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
