"""What the rules look at: one role of a deployment, with everything derived that several rules ask for."""

from collections.abc import Iterator
from dataclasses import dataclass

from ep_backend.deployment.batches import capacity
from ep_backend.deployment.problems import Problem
from ep_backend.deployment.resolve import Group, ModelUnknown, group_of, shape_of, topology
from ep_backend.deployment.schema import Deployment, Image, Role, RoleName, Topology
from ep_backend.plan.model import ModelShape

Place = tuple[str, ...]


@dataclass(frozen=True)
class RoleView:
    """One role. `group` and `shape` are None where the file does not say enough; other rules report that."""

    deployment: Deployment
    name: RoleName
    role: Role
    machine: Topology
    group: Group | None
    shape: ModelShape | None

    @property
    def place(self) -> Place:
        return ("roles", self.name)

    @property
    def experts(self) -> int | None:
        return None if self.shape is None else self.shape.experts

    @property
    def image(self) -> Image:
        return self.role.image or self.deployment.target.image

    @property
    def capacity(self) -> int:
        return capacity(self.deployment, self.name, self.role)

    def flag_place(self, *flags: str) -> Place:
        """Where the first of these flags stands under args, as the file spells it."""
        for key in self.role.args:
            if key.replace("_", "-").lstrip("-").split(".")[0] in flags:
                return (*self.place, "args", key)
        return self.place


def views(deployment: Deployment) -> Iterator[RoleView]:
    machine = topology(deployment.topology)
    try:
        shape = shape_of(deployment.model)
    except ModelUnknown:
        shape = None
    for name, role in deployment.roles.items():
        try:
            group = group_of(deployment, role)
        except ValueError:
            group = None
        yield RoleView(deployment, name, role, machine, group, shape)


def problem(code: str, place: Place, what: str, fix: str) -> Problem:
    return Problem(place, what, fix, code)
