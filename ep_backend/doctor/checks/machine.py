"""CPUs, memory, limits and clocks of a host."""

import re
from collections.abc import Iterator

from ep_backend.doctor.host import Host, Unknown
from ep_backend.doctor.need import Need
from ep_backend.doctor.result import Verdict, fail, passed, skip, warn
from ep_backend.plan.model import GIB

LIMITS = "/proc/self/limits"
IPC_LOCK = 14
# What an engine's rank took apart from weights, on a CPU: deploy/local-cpu.yaml.
RANK_BYTES = 3 * GIB
SHM_DEFAULT = 64 << 20  # of a container that nobody asked otherwise
SHM_BYTES = {"gpu": 16 * GIB, "cpu": GIB}
# Both engines raise their soft limit to this, if the hard one lets them; vLLM where it serves HTTP, so not on a role's further
# hosts. Only ranks on several hosts hold sockets to all others; on one host it is mostly clients' connections.
FILES_ENGINE, FILES_ONE_HOST, FILES_LEAST = 65535, 16384, 4096
THREADS_A_RANK = 512
FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
# libfabric's EFA provider: two pools of 110 MB for every core.
EFA_POOL_BYTES = 2 * 110 * 10**6


def cpus(host: Host, need: Need) -> Verdict:
    count = float(_count(host.field("/proc/self/status", "Cpus_allowed_list")))
    text = f"{count:g} CPUs allowed"
    if (quota := _cpu_quota(host)) is not None and quota < count:
        count, text = quota, f"{text}, the cgroup grants the time of {quota:g}"
    return warn(f"{text}, {need.ranks} ranks here") if count < need.ranks else passed(text)


def governor(host: Host, need: Need) -> Verdict:
    files = [f"/sys/devices/system/cpu/{cpu}/cpufreq/scaling_governor" for cpu in host.names("/sys/devices/system/cpu")]
    found = sorted({text for file in files if (text := host.read_if(file))})
    if not found:
        return skip("no cpufreq here: the hypervisor or the firmware decides")
    text = f"scaling_governor: {', '.join(found)}"
    return passed(text) if found == ["performance"] else warn(text)


def host_memory(host: Host, need: Need) -> Verdict:
    free = _kib(host, "MemAvailable")
    text = f"{_gib(free)} available"
    if (room := _cgroup_room(host)) is not None and room < free:
        free, text = room, f"{text}, the cgroup leaves {_gib(room)}"
    ranks = RANK_BYTES * need.ranks
    if need.heap_bytes is None and "cpu" in need.words and "file" in need.words:
        return skip(f"{text}; the buffer's size is not known, see `ep-backend lint`")
    heaps = need.heap_bytes or 0
    if need.ranks:
        text = f"{text}; {need.ranks} ranks take about {_gib(ranks)}"
    if heaps:
        text = f"{text}, heaps of the host fabric {_gib(heaps)}"
    if heaps > free:
        return fail(text)
    return warn(text) if heaps + ranks > free else passed(text)


def shared_memory(host: Host, need: Need) -> Verdict:
    line = " ".join(host.say("df", "-Pk", "/dev/shm").splitlines()[-1:]).split()
    try:
        size, free = int(line[1]) << 10, int(line[3]) << 10
    except (IndexError, ValueError):
        raise Unknown(f"df says {' '.join(line)[:60]!r}, which is not understood") from None
    left = len(host.names("/dev/shm"))
    text = f"/dev/shm: {_gib(size)}, {_gib(free)} free, {left} files in it"
    if size <= SHM_DEFAULT:
        return fail(f"{text}; 64 MiB is a container's default")
    if free < size // 2:
        return warn(
            f"{text}: more than half is taken", "find /dev/shm -type f -mmin +60 -ls   # then delete what no process uses"
        )
    return warn(text) if size < SHM_BYTES["gpu" if "gpu" in need.words else "cpu"] else passed(text)


def memfd(host: Host, need: Need) -> Verdict:
    file = "/proc/sys/vm/memfd_noexec"
    if (text := host.read_if(file)) is None:
        return passed(f"no {file}: the kernel refuses none")
    return fail(f"{file} is 2") if text == "2" else passed(f"{file} is {text}")


def memlock(host: Host, need: Need) -> Verdict:
    soft = _limit(host, "Max locked memory")
    text = f"memlock: {'unlimited' if soft is None else _gib(soft)}"
    if soft is None:
        return passed(text)
    if capability(host, IPC_LOCK):
        return passed(f"{text}, but CAP_IPC_LOCK lifts it")
    return fail(f"{text}, no CAP_IPC_LOCK")


def open_files(host: Host, need: Need) -> Verdict:
    soft, hard = _limit(host, "Max open files"), _limit(host, "Max open files", hard=True)
    text = f"nofile: {'unlimited' if soft is None else soft}"
    if soft is None or soft >= FILES_ENGINE:
        return passed(text)
    several = "nodes" in need.words
    advised = FILES_ENGINE if several else FILES_ONE_HOST
    if soft >= advised:
        return passed(text)
    if hard is None or hard >= FILES_ENGINE:
        if not (several and "vllm" in need.engines):
            return passed(f"{text}, which the engine raises to {FILES_ENGINE}")
        text = f"{text}, which vLLM raises on the leader's host only"
    else:
        text = f"{text}, at most {hard}"
    text = f"{text}, advised {advised}"
    return fail(text) if soft < FILES_LEAST else warn(text)


def threads(host: Host, need: Need) -> Verdict:
    given = {"ulimit -u": _limit(host, "Max processes"), "cgroup pids.max": _cgroup(host, "pids", "pids.max", "pids.max")}
    limits = {name: limit for name, limit in given.items() if limit is not None}
    if not limits:
        return passed("no limit on processes and threads")
    name, limit = min(limits.items(), key=lambda item: item[1])
    wanted = THREADS_A_RANK * max(1, need.ranks)
    text = f"{name}: {limit} processes and threads"
    return warn(f"{text}; {need.ranks} ranks want {wanted}") if limit < wanted else passed(text)


def clock_source(host: Host, need: Need) -> Verdict:
    now = host.read("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    return passed(now) if now in FAST_CLOCKS else warn(f"{now}: reading the time enters the kernel")


def clock_agreement(host: Host, need: Need) -> Verdict:
    said = host.say("timedatectl", "show", "--property=NTPSynchronized").strip()
    if said not in ("NTPSynchronized=yes", "NTPSynchronized=no"):
        raise Unknown(f"timedatectl says {said[:60]!r}, which is not understood")
    return passed(said) if said.endswith("yes") else warn(said)


def numa_balancing(host: Host, need: Need) -> Verdict:
    file = "/proc/sys/kernel/numa_balancing"
    if (text := host.read_if(file)) is None:
        return passed(f"no {file}")
    return passed(f"{file} is 0") if text == "0" else warn(f"{file} is {text}")


def hugepages(host: Host, need: Need) -> Verdict:
    page = _kib(host, "Hugepagesize")
    free = _number(host.field("/proc/meminfo", "HugePages_Free"), "HugePages_Free") * page
    wanted = EFA_POOL_BYTES * _count(host.field("/proc/self/status", "Cpus_allowed_list"))
    text = f"{_gib(free)} in free huge pages, EFA takes up to {_gib(wanted)}"
    return warn(text, f"sysctl vm.nr_hugepages={-(-wanted // page)}") if free < wanted else passed(text)


def capability(host: Host, bit: int) -> bool:
    text = host.field("/proc/self/status", "CapEff")
    try:
        return bool(int(text, 16) >> bit & 1)
    except ValueError:
        raise Unknown(f"CapEff is {text[:40]!r}, no number") from None


def _limit(host: Host, name: str, *, hard: bool = False) -> int | None:
    """A limit of this process, the soft one unless said otherwise; None: unlimited."""
    for line in host.read(LIMITS).splitlines():
        if line.startswith(name):
            word = line.removeprefix(name).split()[hard]
            return None if word == "unlimited" else _number(word, name)
    raise Unknown(f"{LIMITS} has no {name}")


def _cgroup(host: Host, controller: str, unified: str, old: str) -> int | None:
    """The least limit of a controller over this process's group and those above it; None: no limit."""
    found: list[int] = []
    for folder, name in _cgroup_folders(host, controller, unified, old):
        text = host.read_if(f"{folder}/{name}")
        if text is not None and text.split()[0] != "max":
            found.append(_number(text.split()[0], f"{folder}/{name}"))
    return min(found, default=None)


def _cgroup_folders(host: Host, controller: str, unified: str, old: str) -> Iterator[tuple[str, str]]:
    for line in host.read("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base, name = (f"/sys/fs/cgroup/{controllers}", old) if controllers else ("/sys/fs/cgroup", unified)
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):
            yield "/".join([base, *parts[:depth]]), name


def _cgroup_room(host: Host) -> int | None:
    limit = _cgroup(host, "memory", "memory.max", "memory.limit_in_bytes")
    if limit is None:
        return None
    used = [
        _number(text, name)
        for folder, name in _cgroup_folders(host, "memory", "memory.current", "memory.usage_in_bytes")
        if (text := host.read_if(f"{folder}/{name}"))
    ]
    return limit - (used[-1] if used else 0)


def _cpu_quota(host: Host) -> float | None:
    quotas: list[float] = []
    for folder, name in _cgroup_folders(host, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        words = (host.read_if(f"{folder}/{name}") or "").split()
        if not words or words[0] in ("max", "-1"):
            continue
        period = words[1] if len(words) > 1 else host.read(f"{folder}/cpu.cfs_period_us")
        quotas.append(_number(words[0], name) / _number(period, name))
    return min(quotas, default=None)


def _count(ranges: str) -> int:
    """How many numbers a list such as 0-3,8 holds."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", ranges):
        raise Unknown(f"Cpus_allowed_list is {ranges[:40]!r}, no list of CPUs")
    total = 0
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total


def _kib(host: Host, name: str) -> int:
    text = host.field("/proc/meminfo", name)
    return _number(text.removesuffix("kB").strip(), name) << 10


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise Unknown(f"{name} is {text[:40]!r}, no number") from None


def _gib(size: float) -> str:
    if 0 < size < GIB // 10:
        return f"{size / 2**20:.3g} MiB"
    return f"{size / GIB:.2g} GiB" if size < 10 * GIB else f"{size / GIB:.0f} GiB"
