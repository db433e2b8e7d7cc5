"""Packages, libraries, kernels and variables that this backend and its engines bring."""

import re
import sys

from ep_backend.deployment.engines import NVSHMEM_BUILT, SUPPORTED, number, table
from ep_backend.deployment.interpreters import SGLANG_PYTHON, VERSIONS, version_in
from ep_backend.deployment.lint.engine import NVSHMEM_PACKAGES
from ep_backend.doctor.host import Host, Unknown
from ep_backend.doctor.need import Need
from ep_backend.doctor.result import Verdict, fail, passed, skip, warn
from ep_backend.errors import EpError, did_you_mean
from ep_backend.fabric.nvshmem.images import PUTS_NEED, check, read, remedy

PLUGINS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
PACKAGES = ("nvshmem4py-cu13", "cuda-core")
# Loads the library as nvshmem4py does, in a process of its own, and says which file that was.
WHICH_NVSHMEM = """
import ctypes
try:
    from cuda.pathfinder import load_nvidia_dynamic_lib
    load_nvidia_dynamic_lib("nvshmem_host")
except Exception:
    pass
library = ctypes.CDLL("libnvshmem_host.so.3")
numbers = [ctypes.c_int() for _ in range(3)]
library.nvshmemx_vendor_get_version_info(*(ctypes.byref(number) for number in numbers))
path = next(line.split()[-1] for line in open("/proc/self/maps") if "libnvshmem_host" in line)
print(".".join(str(number.value) for number in numbers), path)
"""


def engine(host: Host, need: Need) -> Verdict:
    if not need.engines:
        return warn("neither vllm nor sglang is installed")
    found = {name: _version(host, name) for name in need.engines}
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    if missing := [name for name, version in found.items() if version is None]:
        return fail(text, f"pip install {missing[0]}")
    if len(found) > 1:
        return fail(f"{text}: they pin different torch versions", "give each engine an environment of its own")
    for name, version in found.items():
        first, beyond = SUPPORTED[name]
        if not number(first) <= number(version or "") < number(beyond):
            return fail(text, f"pip install '{name}>={first},<{beyond}'")
    return passed(text)


def torch_pin(host: Host, need: Need) -> Verdict:
    torch = host.version("torch")
    if elsewhere := [name for name in need.engines if _elsewhere(host, name)]:
        return skip(f"{elsewhere[0]} has an environment of its own: {host.env[SGLANG_PYTHON]}")
    for name in need.engines:
        version = host.version(name)
        if version is None or torch is None:
            raise Unknown(f"{'torch' if version else name} is not installed")
        known = table(name, version)
        if known.torch is None or known.version != version:
            return skip(f"no table for {name} {version}; torch {torch}")
        if number(torch) != number(known.torch):
            return warn(f"torch {torch}, but {name} {version} pins {known.torch}", f"pip install torch=={known.torch}")
    return passed(f"torch {torch}") if need.engines else skip("no engine is installed")


def plugin(host: Host, need: Need) -> Verdict:
    groups = [PLUGINS[name] for name in need.engines if not _elsewhere(host, name)]
    if not groups:
        return skip("no engine in this environment")
    for group in groups:
        if "ep_backend" not in host.entry_points(group):
            return fail(f"{group} has no ep_backend")
    env = {**host.env, **need.env}
    allowed = env.get("VLLM_PLUGINS")
    if "vllm" in need.engines and allowed is not None and "ep_backend" not in allowed.split(","):
        return fail(
            f"VLLM_PLUGINS={allowed} keeps ep_backend out",
            f"export VLLM_PLUGINS={','.join(filter(None, [allowed, 'ep_backend']))}",
        )
    return passed(f"{', '.join(groups)}: ep_backend")


def images(host: Host, need: Need) -> Verdict:
    fix = remedy(host.images)
    try:
        build = read(host.images)
        capabilities = sorted({gpu.capability for gpu in host.gpus()})
        wanted = ["".join(map(str, capability)) for capability in capabilities]
        text = f"GPUs are sm_{', sm_'.join(wanted)}; kernels for {', '.join(build.architectures)}"
        if missing := [sm for sm in wanted if f"sm_{sm}a" not in build.architectures]:
            what = "add it to kernels/build.py's ARCHITECTURES" if int(missing[0]) >= 90 else "use GPUs of sm_90 or later"
            return fail(text, f"{what}; then {fix}")
        for sm in wanted:
            check(build, host.images, f"sm_{sm}a", puts=build.nvshmem is not None)
    except EpError as error:
        return fail(str(error), fix)
    if build.nvshmem is not None and number(build.nvshmem)[:2] == number(NVSHMEM_BUILT)[:2]:
        return passed(text)
    puts = "none for puts over a NIC"
    if build.nvshmem is not None:
        puts = f"those for puts over a NIC hold NVSHMEM {build.nvshmem}, must be {NVSHMEM_BUILT}"
    verdict = fail if "remote" in need.words else warn
    return verdict(f"{text}; {puts}", f"{fix} with {PUTS_NEED}; or stay in one NVLink domain")


def cuda_packages(host: Host, need: Need) -> Verdict:
    found = {name: host.version(name) for name in PACKAGES}
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    return passed(text) if all(found.values()) else fail(text)


def nvshmem(host: Host, need: Need) -> Verdict:
    built = f"kernels are for {NVSHMEM_BUILT}"
    try:
        version, _, path = host.say(sys.executable, "-c", WHICH_NVSHMEM).strip().partition(" ")
    except Unknown as error:
        return fail(f"libnvshmem_host.so.3 cannot be loaded: {error}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise Unknown(f"the loaded NVSHMEM says {version[:40]!r}, no version")
    packaged = next((known for name in NVSHMEM_PACKAGES if (known := host.version(name))), None)
    text = f"loaded {version} from {path}; {built}"
    if number(version) != number(NVSHMEM_BUILT):
        return fail(text)
    if packaged and number(packaged) != number(version):
        return warn(f"{text}; the package here is {packaged}", "take the other one off LD_LIBRARY_PATH, or uninstall it")
    return passed(text)


def variables(host: Host, need: Need) -> Verdict:
    """What is set for every process here; the roles' own variables are lint's."""
    env = {key: value for key, value in host.env.items() if key.startswith("NVSHMEM_")}
    known = table("nvshmem", None).env
    for key in env:
        if key not in known:
            return warn(f"{key} is read by nothing", did_you_mean(key, known, f"unset {key}", cutoff=0.75))
    if "NVSHMEM_MAX_TEAMS" in env:
        return warn("NVSHMEM_MAX_TEAMS is set", "unset NVSHMEM_MAX_TEAMS")
    if env.get("NVSHMEM_DISABLE_P2P", "0").lower() in ("1", "true") and "gpus" in need.words:
        return fail("NVSHMEM_DISABLE_P2P is set: no peer is mapped", "unset NVSHMEM_DISABLE_P2P")
    if host.env.get("CUDA_LAUNCH_BLOCKING") == "1":
        return warn("CUDA_LAUNCH_BLOCKING=1: every launch waits", "unset CUDA_LAUNCH_BLOCKING")
    if (size := env.get("NVSHMEM_SYMMETRIC_SIZE")) is not None:
        given = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", size.upper().removesuffix("B"))
        if given is None:
            return warn(f"NVSHMEM_SYMMETRIC_SIZE={size} is no size", "write bytes, or a number with K, M, G or T")
    return passed(f"{len(env)} NVSHMEM variables, all known" if env else "no NVSHMEM variable is set")


def _elsewhere(host: Host, engine: str) -> bool:
    """SGLang may run by a Python of its own, since it and vLLM pin different versions of torch."""
    return engine == "sglang" and SGLANG_PYTHON in host.env


def _version(host: Host, engine: str) -> str | None:
    if not _elsewhere(host, engine):
        return host.version(engine)
    python = host.env[SGLANG_PYTHON]
    try:
        return version_in(host.say(python, "-c", VERSIONS))
    except ValueError as error:
        raise Unknown(f"{SGLANG_PYTHON}={python} is no Python: {error}") from None
