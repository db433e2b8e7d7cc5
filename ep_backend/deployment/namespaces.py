"""A network namespace a launch, on one bridge: launches then see of each other what machines would."""

import contextlib
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping

BRIDGE = "epb0"
DEVICE = "eth0"  # in each namespace
NETWORK, HERE = "10.213.{role}.{node}", "10.213.255.254"
PREFIX = 16
REMOVAL_S = 3.0


def address(role: int, node: int) -> str:
    """Of a node of the deployment's role with that number."""
    return NETWORK.format(role=role, node=node + 1)


def inside(namespace: str, command: list[str]) -> list[str]:
    """The command, in a namespace."""
    return ["ip", "netns", "exec", namespace, *command]


@contextlib.contextmanager
def namespaces(addresses: Mapping[str, str]) -> Iterator[None]:
    """Make these namespaces with these addresses, and take them down at the end. OSError says which step failed."""
    _remove_leftovers(addresses)
    with contextlib.ExitStack() as stack:
        _ip("link", "add", BRIDGE, "type", "bridge")
        stack.callback(_ip, "link", "del", BRIDGE)
        _ip("addr", "add", f"{HERE}/{PREFIX}", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for number, (name, own) in enumerate(addresses.items()):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("link", "add", f"epb0-{number}", "type", "veth", "peer", "name", f"epb0-{number}-in")
            stack.callback(_ip, "link", "del", f"epb0-{number}")
            _ip("link", "set", f"epb0-{number}", "master", BRIDGE, "up")
            _ip("link", "set", f"epb0-{number}-in", "netns", name)
            _ip("-n", name, "link", "set", f"epb0-{number}-in", "name", DEVICE)
            _ip("-n", name, "addr", "add", f"{own}/{PREFIX}", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield


def _remove_leftovers(names: Collection[str]) -> None:
    """What a killed `up` left: these namespaces, and the bridge unless another deployment is on it."""
    for name in names:
        with contextlib.suppress(OSError):
            _ip("netns", "del", name)
    deadline = time.monotonic() + REMOVAL_S
    with contextlib.suppress(OSError):
        while _ip("link", "show", "master", BRIDGE) and time.monotonic() < deadline:
            time.sleep(0.05)  # a link goes a moment after its namespace
        if not _ip("link", "show", "master", BRIDGE):
            _ip("link", "del", BRIDGE)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout
