"""The rules, each a function that yields problems; `rules.toml` has their texts."""

from collections.abc import Iterator

from ep_backend.deployment.lint import capacity, engine, hosts, modes, ranks
from ep_backend.deployment.lint.texts import rules
from ep_backend.deployment.lint.view import RoleView, views
from ep_backend.deployment.problems import Problem
from ep_backend.deployment.schema import Deployment

# What the file alone decides, role by role.
ROLE_RULES = (
    ranks.check_parallel,
    ranks.check_stages,
    ranks.check_experts,
    modes.check_mode,
    modes.check_rail,
    modes.check_overlap,
    modes.check_layout,
    modes.check_sms,
    capacity.check_engine_limits,
    capacity.check_chunk,
    capacity.check_capacity,
    capacity.check_lanes,
    capacity.check_payload,
    capacity.check_shape,
    capacity.check_memory,
    engine.check_owned,
    engine.check_reachable,
    hosts.check_network,
)


def check(deployment: Deployment) -> list[Problem]:
    """Every error that the file alone shows: what would fail only after minutes of loading."""
    return [p for p in _of_the_file(deployment, list(views(deployment))) if rules()[p.code].severity == "error"]


def lint(deployment: Deployment) -> list[Problem]:
    """Errors and warnings, also those that need the engines' tables, installed packages or this host."""
    roles = list(views(deployment))
    problems = [*_of_the_file(deployment, roles), *engine.check_one_environment(roles), *hosts.check_host_memory(roles)]
    for view in roles:
        problems += [*engine.check_flags(view), *engine.check_env(view), *engine.check_versions(view)]
    return list(dict.fromkeys(problems))


def _of_the_file(deployment: Deployment, roles: list[RoleView]) -> Iterator[Problem]:
    wrong = {view.name: list(engine.check_values(view)) for view in roles}
    for problems in wrong.values():
        yield from problems
    # What the engine refuses says nothing of the numbers that it stands for.
    roles = [view for view in roles if not wrong[view.name]]
    yield from ranks.check_roles(deployment)
    yield from ranks.check_model(deployment)
    yield from ranks.check_machines(deployment, roles)
    yield from capacity.check_measurements(deployment, roles)
    yield from hosts.check_target(deployment, roles)
    yield from hosts.check_router(deployment)
    yield from hosts.check_ports(deployment)
    yield from hosts.check_control(deployment, roles)
    yield from hosts.check_agreement(deployment, roles)
    for view in roles:
        for rule in ROLE_RULES:
            yield from rule(view)
