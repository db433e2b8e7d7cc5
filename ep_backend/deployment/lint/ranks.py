"""Rules on roles, ranks, nodes and experts."""

from collections.abc import Iterator

from ep_backend.deployment.lint.view import RoleView, problem
from ep_backend.deployment.problems import Problem
from ep_backend.deployment.resolve import ModelUnknown, shape_of
from ep_backend.deployment.schema import Deployment, whole_number

STAGES = ("pipeline-parallel-size", "pp-size", "pp")
CHECKPOINT = (
    "give a folder of this machine with a Hugging Face checkpoint, absolute or from this file's folder (`ep-backend checkpoint "
    "OUT` writes a small one), or a preset, with `source` where the nodes load it from elsewhere"
)


def check_roles(deployment: Deployment) -> Iterator[Problem]:
    names = {name for name, _ in deployment.roles.items()}
    if names not in ({"prefill", "decode"}, {"unified"}):
        what = f"has {', '.join(sorted(names)) or 'none'}, must have prefill and decode, or unified alone"
        yield problem("EP010", ("roles",), what, "add or remove a role")


def check_model(deployment: Deployment) -> Iterator[Problem]:
    model = deployment.model
    if model.path is None and deployment.target.kind == "local":
        yield problem("EP011", ("model",), "has no path, and a local deployment loads a checkpoint", CHECKPOINT)
        return
    try:
        shape_of(model)
    except ModelUnknown as error:
        yield problem("EP011", ("model", "path") if model.path else ("model",), str(error), CHECKPOINT)


def check_machines(deployment: Deployment, views: list[RoleView]) -> Iterator[Problem]:
    """Too few machines are one mistake, not also one of each role that wants them."""
    if not views:
        return
    machine, need = views[0].machine, sum(view.role.ep_size for view in views)
    gpus = (machine.gpus_per_node or 0) if deployment.topology.device == "cuda" else 0
    if 0 < machine.nodes * gpus < need and not any(map(_crowded, views)):
        parts = " + ".join(f"{view.name} {view.role.ep_size}" for view in views)
        what = f"is {machine.nodes}, so there are {machine.nodes * gpus} GPUs, but the roles need {need} ({parts})"
        enough = max(-(-need // gpus), *(view.role.nodes for view in views))
        yield problem("EP114", ("topology", "nodes"), what, f"use {enough}, or smaller roles")
        return
    for view in views:
        if view.role.nodes > machine.nodes:
            what = f"is {view.role.nodes}, but topology.nodes is {machine.nodes}"
            yield problem("EP113", (*view.place, "nodes"), what, "raise topology.nodes or lower it here")


def check_parallel(view: RoleView) -> Iterator[Problem]:
    role, place, size = view.role, view.place, view.role.ep_size
    if role.data_parallel == 1 and not role.traits.one_data_parallel_rank:
        yield problem(
            "EP116",
            (*place, "data_parallel"),
            f"is 1, must be above 1: with tensor parallelism alone {role.traits.title} calls no all-to-all backend",
            _parallel_fix(view),
        )
    if gpus := _crowded(view):
        what = f"is {role.nodes}, which have {gpus * role.nodes} GPUs for {size} ranks"
        yield problem("EP117", (*place, "nodes"), what, f"use {-(-size // gpus)}, or fewer ranks")
    elif role.data_parallel % role.nodes and role.nodes <= view.machine.nodes:
        what = f"is {role.data_parallel}, must be a multiple of the role's {role.nodes} nodes"
        fix = f"use {role.nodes * (role.data_parallel // role.nodes + 1)}"
        yield problem("EP111", (*place, "data_parallel"), what, fix)
    elif view.group is None:
        per_node = role.ep.gpus_per_node
        at = (*place, "ep", "gpus_per_node") if per_node else (*place, "data_parallel")
        if per_node:
            yield problem("EP112", at, f"is {per_node}, must divide the {size} EP ranks", "use a divisor")
        else:
            yield problem("EP112", at, f"gives {size} EP ranks, no multiple of an NVLink domain", "use whole domains")


def check_stages(view: RoleView) -> Iterator[Problem]:
    if (stages := view.role.number(*STAGES) or 1) > 1:
        what = f"is {stages}, and each pipeline stage would be an EP group of its own"
        yield problem("EP119", view.flag_place(*STAGES), what, "remove it; data_parallel spreads the experts over more ranks")


def _crowded(view: RoleView) -> int:
    """The GPUs of a node, where the role's nodes have fewer than it has ranks; else 0."""
    gpus = view.machine.gpus_per_node or 0
    return gpus if view.deployment.topology.device == "cuda" and 0 < gpus * view.role.nodes < view.role.ep_size else 0


def _parallel_fix(view: RoleView) -> str:
    """Attention ranks in place of tensor-parallel ones, where there are such; else one a GPU."""
    tensor_parallel = view.role.number("tensor-parallel-size", "tp-size", "tp")
    if tensor_parallel and tensor_parallel > 1:
        key = view.flag_place("tensor-parallel-size", "tp-size", "tp")[-1]
        return f"set data_parallel: {tensor_parallel} and remove args.{key}"
    what = "ranks" if view.deployment.topology.device == "cpu" else "GPUs"
    return f"set data_parallel to the role's number of {what}, 2 or more"


def check_experts(view: RoleView) -> Iterator[Problem]:
    size, spare, traits = view.role.ep_size, view.role.ep.redundant_experts, view.role.traits
    if view.experts and (view.experts + spare) % size:
        total = f"{view.experts} experts" if not spare else f"{view.experts} + {spare} experts"
        missing = -(view.experts + spare) % size
        yield problem(
            "EP110",
            (*view.place, "data_parallel"),
            f"gives {size} EP ranks, but the model's {total} are not divisible by {size}",
            f"use a divisor of {view.experts + spare}, or set ep.redundant_experts: {spare + missing}",
        )
    elif view.experts and spare > (most := view.experts * (size - 1)):
        what = f"is {spare}, but {size} ranks that each hold all {view.experts} experts have {most} replicas"
        yield problem("EP118", (*view.place, "ep", "redundant_experts"), what, f"use {most} or fewer")
    elif spare and not traits.cpu_replicas and view.deployment.topology.device == "cpu":
        place = (*view.place, "ep", "redundant_experts")
        yield problem("EP124", place, f"is {spare}, but {traits.title} makes replicas of experts on GPUs only", "remove it")
    given = _engine_redundancy(view)
    if given is not None and given != spare:
        yield problem(
            "EP115",
            view.flag_place("eplb-config", "ep-num-redundant-experts"),
            f"says {given} redundant experts, but ep.redundant_experts is {spare}",
            f"set ep.redundant_experts: {given}",
        )


def _engine_redundancy(view: RoleView) -> int | None:
    config = view.role.arg("eplb-config")
    given = config.get("num_redundant_experts") if isinstance(config, dict) else view.role.arg("ep-num-redundant-experts")
    return whole_number(given)
