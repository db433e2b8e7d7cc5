"""What `up` asks of this machine before anything is loaded; what the file itself shows is in `lint`."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack

from ep_backend.deployment import interpreters
from ep_backend.deployment.problems import Problem
from ep_backend.deployment.schema import Deployment
from ep_backend.serving import family_of, is_foreign, url_host


def check_startable(deployment: Deployment) -> list[Problem]:
    """`up` starts engines on this machine, behind a port that must be free."""
    problems = []
    if deployment.target.kind != "local":
        what = f"is {deployment.target.kind}, but `up` starts processes on this machine"
        problems.append(Problem(("target", "kind"), what, "use target: {kind: local}", "EP013"))
    return [*problems, *check_restartable(deployment), *_check_namespaces(deployment), *_check_ports_free(deployment)]


def check_restartable(deployment: Deployment) -> list[Problem]:
    """What a restart of roles asks of this machine, beside what runs already."""
    return [*_check_sglang(deployment), *_check_launches(deployment)]


def _check_sglang(deployment: Deployment) -> Iterator[Problem]:
    names = [name for name, role in deployment.roles.items() if role.engine == "sglang"]
    if not names:
        return
    try:
        python, _ = interpreters.sglang()
        has_router = deployment.roles.unified is not None or interpreters.has_sglang_router(python)
    except interpreters.NoInterpreter as error:
        yield Problem(("roles", names[0], "engine"), f"is sglang, but {error}", error.fix, "EP013")
        return
    if not has_router:
        what = f"are a pair of sglang, but {python} has no sglang_router to stand before it"
        yield Problem(("roles",), what, f"{python} -m pip install sglang-router", "EP013")


def _check_launches(deployment: Deployment) -> Iterator[Problem]:
    for name, role in deployment.roles.items():
        if role.nodes > 1 and not role.traits.launches_share_a_machine:
            # In network namespaces, too: ranks that share /dev/shm meet on loopback.
            what = f"is {role.nodes}, but launches of {role.traits.title} on one machine claim the same ports"
            yield Problem(("roles", name, "nodes"), what, "use nodes: 1, and ep.gpus_per_node for virtual nodes", "EP013")


def _check_namespaces(deployment: Deployment) -> Iterator[Problem]:
    place = ("target", "namespaces")
    if not deployment.target.namespaces:
        return
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield Problem(
            place, "is true, but making them takes root and the program `ip`", "become root, or set it to false", "EP013"
        )
    if deployment.control.key is None:
        yield Problem(place, "is true, so that the agents are not on loopback, and there is no key", "set control.key", "EP013")
    if deployment.roles.unified is not None and not deployment.router.hold:
        what = "is true, and clients cannot reach into a unified role's namespace without a door"
        yield Problem(place, what, "set router.hold", "EP013")


def _check_ports_free(deployment: Deployment) -> Iterator[Problem]:
    """The addresses that clients use must be this machine's, and their ports free and not the same."""
    router, control = deployment.router, deployment.control
    wanted = (("router", router.host, router.port), ("control", control.host, control.port))
    with ExitStack() as held:
        for part, host, port in wanted:
            probe = held.enter_context(socket.socket(family_of(host)))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port or 0))
                probe.listen()
            except OSError as error:
                if is_foreign(error):
                    what = f"is {host}, which is no address of this machine ({error.strerror})"
                    yield Problem((part, "host"), what, "give one of its own, as 127.0.0.1 or 0.0.0.0", "EP013")
                    continue
                what = f"{url_host(host)}:{port} cannot be listened on ({error.strerror})"
                if part == "control" and port == router.port:
                    what = f"{port} is the router's port too"
                yield Problem((part, "port"), what, "stop what uses it, or choose another port", "EP014")
