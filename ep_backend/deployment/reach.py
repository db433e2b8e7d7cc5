"""What the kernels do not reach yet. A file may ask for it all the same: to plan with, and to render."""

from collections.abc import Iterator

from ep_backend.config import MAX_RANKS
from ep_backend.deployment.problems import Problem
from ep_backend.deployment.resolve import group_of
from ep_backend.deployment.schema import Deployment, Role


def beyond_kernels(deployment: Deployment, role: Role) -> str | None:
    """Why engines of the role would refuse to start; None where they would not."""
    if deployment.topology.device == "cuda" and role.ep_size > MAX_RANKS:
        return f"has {role.ep_size} ranks, and the kernels serve up to {MAX_RANKS}"
    if role.ep.rail is None and (domains := _unmapped_domains(deployment, role)):
        return f"spans {domains} NVLink domains, between which only hybrid goes, with ep.rail: put"
    return None


def out_of_reach(deployment: Deployment) -> Iterator[Problem]:
    """A warning for each role whose engines would refuse to start."""
    for name, role in deployment.roles.items():
        if beyond := beyond_kernels(deployment, role):
            fix = "take fewer ranks; over several domains set mode: hybrid and rail: put"
            yield Problem(("roles", name, "nodes"), f"{beyond}: engines will refuse to start", fix, "EP016")


def _unmapped_domains(deployment: Deployment, role: Role) -> int:
    """NVLink domains of a role whose ranks do not all map each other's memory, virtual nodes apart; else 0, also where the
    domains do not divide the ranks, as lint tells."""
    if deployment.topology.device != "cuda" or role.nodes == 1:
        return 0
    ep = role.ep.model_copy(update={"gpus_per_node": None})
    try:
        domains = group_of(deployment, role.model_copy(update={"ep": ep})).nodes
    except ValueError:
        return 0
    return domains if domains > 1 else 0
