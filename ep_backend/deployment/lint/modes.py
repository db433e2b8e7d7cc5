"""Rules on the mode of each role, against its family, graphs and the network."""

from collections.abc import Iterator

from ep_backend.deployment.lint.view import RoleView, problem
from ep_backend.deployment.problems import Problem
from ep_backend.deployment.schema import modes_of, serves_both_families
from ep_backend.modes import Family, Mode

HOPPER = ("H100", "H200", "H800", "H20")
ELASTIC = ("enable-elastic-ep", "elastic-ep-backend")


def check_mode(view: RoleView) -> Iterator[Problem]:
    role, place = view.role, (*view.place, "ep", "mode")
    if any(check_rail(view)):  # else the fault is told there
        return
    several = view.group is not None and view.group.nodes > 1
    allowed = modes_of(view.name, role.ep.mode, several, role.engine, role.ep.rail)
    if role.ep.mode == "auto":
        yield from _check_auto(view, several)
        return
    mode = Mode(role.ep.mode)
    if mode not in allowed:
        choices = ", ".join([*(candidate.value for candidate in allowed), "auto"])
        what = f"is {mode.value}, must be one of {choices} for the {view.name} role"
        yield problem("EP202", place, what, f"choose one of those, or move {mode.value} to the other role")
    elif several and not mode.spec.two_hops and _rail_only(view):
        what = f"is {mode.value}, but topology.nic.fabric is rail_only"
        yield problem("EP205", place, what, "use hybrid" if mode is Mode.LOW_LATENCY else "use hybrid or normal")
    elif mode is Mode.DIRECT and several:
        nodes = view.group.nodes if view.group else 0
        yield problem("EP203", place, f"is direct over {nodes} nodes", "use auto, hybrid or normal")
    elif mode is Mode.HYBRID and view.group is not None and not several:
        yield problem("EP204", place, f"is hybrid for {view.group.ranks} ranks of one domain", "use low_latency or auto")
    if not mode.spec.graph and (flag := _captures(view)):
        what = f"asks for captured graphs, but {mode.value} cannot be captured"
        yield problem("EP201", view.flag_place(flag), what, "remove it, or use direct")


def check_rail(view: RoleView) -> Iterator[Problem]:
    """By puts hybrid is the role's only mode, since all others store to peers' memory."""
    role, place = view.role, (*view.place, "ep", "rail")
    if role.ep.rail is None or view.group is None:
        return
    if serves_both_families(view.name, role.engine):
        what = f"is {role.ep.rail}, which leaves hybrid alone, but a unified role of {role.traits.title} needs two modes"
        yield problem("EP208", place, what, "remove it, or use roles for prefill and decode")
    elif role.ep.mode not in ("auto", Mode.HYBRID.value):
        what = f"is {role.ep.rail}, which leaves hybrid alone, but ep.mode is {role.ep.mode}"
        yield problem("EP208", place, what, "set mode: hybrid, or remove rail")
    elif view.group.nodes == 1:
        what = f"is {role.ep.rail}, but the role's {view.group.ranks} ranks are one NVLink domain"
        yield problem("EP208", place, what, "remove it")


def check_overlap(view: RoleView) -> Iterator[Problem]:
    role, own = view.role, view.role.traits.overlap
    if role.ep.overlap not in ("none", own):
        what = f"is {role.ep.overlap}, which {role.engine} does not have"
        yield problem("EP211", (*view.place, "ep", "overlap"), what, f"use {own}")
    if role.arg("enable-single-batch-overlap") and view.machine.gpu in HOPPER:
        what = f"is set, but {view.machine.gpu} is SM90"
        yield problem("EP212", view.flag_place("enable-single-batch-overlap"), what, "remove it; overlap: tbo")
    for flag in ELASTIC:
        if role.arg(flag):
            yield problem("EP213", view.flag_place(flag), "resizes a running EP group", "remove it")


def check_layout(view: RoleView) -> Iterator[Problem]:
    ep, traits, place = view.role.ep, view.role.traits, (*view.place, "ep", "layout")
    if ep.layout is None:
        return
    if traits.both_families:
        yield problem("EP214", place, f"is {ep.layout}, but {traits.title}'s layout follows from the batch", "remove it")
    elif ep.layout == "masked" and not any(mode.spec.family is Family.DECODE for mode in modes_of(view.name, ep.mode)):
        yield problem("EP214", place, "is masked, but the role runs the prefill family", "remove it")


def check_sms(view: RoleView) -> Iterator[Problem]:
    sms, have = view.role.ep.sms, view.machine.sms
    if sms is not None and have is not None and sms > have:
        what = f"is {sms}, but a {view.machine.gpu or 'GPU'} has {have}"
        yield problem("EP230", (*view.place, "ep", "sms"), what, "use 24 or fewer")


def _check_auto(view: RoleView, several: bool) -> Iterator[Problem]:
    """On a rail-only fabric auto may still choose a mode that writes to any GPU."""
    if several and _rail_only(view) and view.role.ep.rail is None:
        what = "is auto, which may choose low_latency or direct, but topology.nic.fabric is rail_only"
        yield problem("EP205", (*view.place, "ep", "mode"), what, "name hybrid")


def _rail_only(view: RoleView) -> bool:
    return view.machine.nic is not None and view.machine.nic.fabric == "rail_only"


def _captures(view: RoleView) -> str | None:
    """The flag that asks for graphs of the batches this role runs in the mode."""
    role = view.role
    compilation = role.arg("compilation-config")
    mode = compilation.get("cudagraph_mode") if isinstance(compilation, dict) else None
    if isinstance(mode, str) and mode.upper().startswith("FULL"):
        return "compilation-config"
    flags = ("cuda-graph-bs-prefill", "cuda-graph-max-bs-prefill")
    return next((flag for flag in flags if role.arg(flag)), None)
