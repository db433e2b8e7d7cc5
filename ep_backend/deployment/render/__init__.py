"""From a deployment file to what starts it elsewhere: scripts, a batch job, manifests."""

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ep_backend.deployment.form import apart_from
from ep_backend.deployment.lint import lint
from ep_backend.deployment.lint.texts import rules
from ep_backend.deployment.load import read
from ep_backend.deployment.problems import DeploymentError, Finding, Problem
from ep_backend.deployment.reach import out_of_reach
from ep_backend.deployment.render import kubernetes, slurm
from ep_backend.deployment.render.podmonitor import POD_MONITOR, pod_monitor
from ep_backend.deployment.render.role import ENGINE, FIRST_PORT, LAUNCH, SETTINGS, role_files
from ep_backend.deployment.render.router import ROUTER, router_script
from ep_backend.deployment.schema import KUBERNETES, Deployment, TargetKind
from ep_backend.serving import is_loopback, url_host

LWS, DISAGGREGATED_SET = "lws.yaml", "disaggregatedset.yaml"
FILES = {ROUTER, slurm.JOB, LWS, DISAGGREGATED_SET, POD_MONITOR} | {
    f"{role}/{name}" for role in FIRST_PORT for name in (LAUNCH, ENGINE, SETTINGS)
}
"""Everything that may be written, by its path in the folder."""
LONGEST_NAME = 40
EVERY_ADDRESS = "0.0.0.0"


class FolderRefused(Exception):
    """The folder holds something that render did not write."""


@dataclass(frozen=True)
class Rendered:
    """Files by their paths, what lint warns of, and where clients find it.

    Settings and manifests hold the control key, if there is one.
    """

    files: dict[str, str]
    warnings: list[Finding]
    listens: str
    has_key: bool


def render(file: Path, kinds: Sequence[TargetKind] = ()) -> Rendered:
    """The files for a deployment.

    `kinds`: targets; none: the file's own. Raises DeploymentError if lint finds an error for any of them.
    """
    loaded, faults = read(file)
    deployment = loaded.deployment
    wanted, found = list(dict.fromkeys(kinds)) or [deployment.target.kind], list[Problem]()
    for kind in wanted:
        aimed = deployment.model_copy(update={"target": deployment.target.model_copy(update={"kind": kind})})
        found += [*lint(aimed), *_missing(aimed)]
    findings = loaded.findings(list(dict.fromkeys([*faults, *apart_from(faults, found)])))
    errors = [finding for finding in findings if rules()[finding.problem.code].severity == "error"]
    if errors:
        raise DeploymentError.of(errors)
    aimed = aimed_at(deployment, wanted)
    return Rendered(files_for(aimed, wanted), findings, _listens(aimed, file), deployment.control.key is not None)


def aimed_at(deployment: Deployment, kinds: Sequence[TargetKind]) -> Deployment:
    """The deployment with an address that clients reach, where the file gives none: the default is for `up`'s one machine."""
    router = deployment.router
    one_host = set(kinds) <= {"local", "shell"} and deployment.topology.nodes == 1
    if "host" in router.model_fields_set or one_host:
        return deployment
    return deployment.model_copy(update={"router": router.model_copy(update={"host": EVERY_ADDRESS})})


def _listens(deployment: Deployment, file: Path) -> str:
    host, port = url_host(deployment.router.host), deployment.router.port
    if is_loopback(deployment.router.host):
        return f"clients reach {host}:{port} on its own host only; for others set `router: {{host: {EVERY_ADDRESS}}}` in {file}"
    if host == EVERY_ADDRESS:
        return f"whoever reaches the router at port {port} can send requests; `router: {{host: ADDRESS}}` in {file} narrows it"
    return f"clients reach {host}:{port}"


def files_for(deployment: Deployment, kinds: Sequence[TargetKind]) -> dict[str, str]:
    """The files of a deployment that has no errors."""
    roles = [role_files(deployment, name, role) for name, role in deployment.roles.items()]
    files = {f"{part.name}/{name}": text for part in roles for name, text in part.files.items()}
    if len(roles) > 1:
        files[ROUTER] = router_script(deployment)
    if "slurm" in kinds:
        files[slurm.JOB] = slurm.job(deployment, roles)
    if "lws" in kinds:
        files[LWS] = kubernetes.lws(deployment, roles)
    if "disaggregatedset" in kinds:
        files[DISAGGREGATED_SET] = kubernetes.disaggregated_set(deployment, roles)
    if not set(kinds).isdisjoint(KUBERNETES) and (monitor := pod_monitor(deployment, roles)):
        files[POD_MONITOR] = monitor
    return files


def write(rendered: Rendered, folder: Path) -> None:
    """Makes `folder` hold exactly these files.

    It may exist if it holds nothing but files that render writes: raises FolderRefused otherwise, before anything changes.
    """
    if folder.exists() and not folder.is_dir():
        raise FolderRefused(f"--out {folder} is a file, must be a folder of render's own; choose another")
    present = sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    foreign = [path for path in present if str(path.relative_to(folder)) not in FILES]
    if foreign:
        raise FolderRefused(
            f"--out {folder} holds {foreign[0].relative_to(folder)}, which render did not write; choose a new folder, or "
            "empty this one"
        )
    for path in present:
        path.unlink()
    for role in FIRST_PORT:
        if (folder / role).is_dir():
            shutil.rmtree(folder / role)
    for name, text in rendered.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600 if rendered.has_key and path.name in (SETTINGS, LWS, DISAGGREGATED_SET, POD_MONITOR) else 0o644)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)


def _missing(deployment: Deployment) -> Iterator[Problem]:
    """What a target needs and lint has no reason to ask for."""
    kind, model, image = deployment.target.kind, deployment.model, deployment.target.image
    roles = deployment.roles.items()

    def problem(place: tuple[str, ...], what: str, fix: str) -> Problem:
        return Problem(place, what, fix, "EP015")

    yield from out_of_reach(deployment)
    if model.source is None and model.path is None:
        yield problem(
            ("model",),
            "has a preset only, so there is nothing to load",
            "set source to a folder on the nodes or an id of a hub",
        )
    if deployment.router.hold:
        yield problem(("router", "hold"), "is true, but the door that holds requests is part of `up`", "remove it")
    if kind == "local":
        yield problem(
            ("target", "kind"),
            "is local, which `up` starts without files",
            "give --for, or choose shell, slurm, lws or disaggregatedset",
        )
    if kind == "slurm" and (need := sum(role.nodes for _, role in roles)) > deployment.topology.nodes:
        what = f"is {deployment.topology.nodes}, but each role takes nodes of its own, {need} in all"
        yield problem(("topology", "nodes"), what, f"use {need}")
    if kind not in KUBERNETES:
        return
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", deployment.name) or len(deployment.name) > LONGEST_NAME:
        what = f"is {deployment.name}, which names services: a letter, then letters, digits and hyphens, at most {LONGEST_NAME}"
        yield problem(("name",), what, "choose such a name")
    for name, role in roles:
        if (role.image or image).name is None and image.name is None:
            yield problem(("roles", name), f"has no image for its pods, target.kind {kind}", "set target.image.name")
    if kind == "disaggregatedset" and deployment.roles.unified is not None:
        yield problem(("target", "kind"), "is disaggregatedset, which has at least two roles", "use lws, or prefill and decode")
