"""From the command lines or manifests that started an engine before to a deployment file, and what became of each word."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ep_backend.deployment.batches import ASSUMED_HBM, batch_limit, largest_bucket
from ep_backend.deployment.lint import lint
from ep_backend.deployment.lint.view import RoleView, views
from ep_backend.deployment.load import read as read_file
from ep_backend.deployment.migrate import manifest
from ep_backend.deployment.migrate.images import set_images
from ep_backend.deployment.migrate.launches import Launch, launches
from ep_backend.deployment.migrate.notes import Note, Unmovable, shown
from ep_backend.deployment.migrate.pods import Pods
from ep_backend.deployment.migrate.repair import checked, repaired
from ep_backend.deployment.migrate.roles import Draft, draft, told_role
from ep_backend.deployment.migrate.shell import Unreadable, commands
from ep_backend.deployment.presets import models, topologies
from ep_backend.deployment.problems import Finding
from ep_backend.deployment.reach import out_of_reach
from ep_backend.deployment.render.text import as_yaml
from ep_backend.deployment.schema import RoleName
from ep_backend.files import read_text
from ep_backend.plan.model import GIB

# What a shell replaces.
EXPANSION = re.compile(r"[$][({\w]|`")
# What DeepEP reserves where nothing says how many tokens a rank dispatches in decode.
DEEPEP_TOKENS = 128
USUAL_GPUS = 8


@dataclass(frozen=True)
class Migrated:
    """A deployment file, what is not in it as it was given, and what lint still says of it."""

    text: str
    notes: list[Note]
    findings: list[Finding]


def migrate(
    inputs: Sequence[tuple[str, str]],
    *,
    name: str | None = None,
    role: RoleName | None = None,
    model: str | None = None,
    topology: str | None = None,
    file: Path = Path("deployment.yaml"),
) -> Migrated:
    """`inputs`: a name and a text each: shell commands, or a manifest; together they are one deployment.

    `role`: of a command that does not tell; `model` and `topology`: presets, where the texts do not tell. `file`: where the
    result will stand, for the places of findings. Raises Unmovable.
    """
    pods: Pods | None = None
    found: list[Launch] = []
    for where, text in inputs:
        if manifest.is_manifest(text):
            pods = pods or Pods()
            found += manifest.read(text, pods, _reachable(where))
        else:
            found += _launches(where, text)
    told = [told_role(launch) for launch in found]
    if role is not None and role not in told and None not in told:
        raise Unmovable(f"--role is {role}, but the command says {told[0]} itself; leave --role out, or correct the command")
    drafts = [draft(launch, role) for launch in found]
    if pods:
        names = {launch.hints[-1]: each.name for launch, each in zip(found, drafts, strict=True)}
        pods.notes = [replace(note, role=names.get(note.role, note.role)) for note in pods.notes]
    drafts = _by_role(drafts)
    notes = [note for each in drafts for note in each.notes]
    if pods:
        notes += pods.notes
    hints = [hint for launch in found for hint in [str(launch.flags.get("model-path")), *launch.hints]]
    hints += [shown(volume["source"]) for volume in pods.volumes.values()] if pods else []
    chosen = name or _name(pods, found)
    document = _document(drafts, pods, chosen, model or _preset(drafts, hints), topology, notes)
    notes += repaired(document)
    notes += _unexpanded(document)
    notes += _capacities(document)
    text = f"# From {', '.join(where for where, _ in inputs)} by `ep-backend migrate`.\n\n" + as_yaml(document)
    loaded, problems = read_file(file, text)
    problems += [*lint(loaded.deployment), *out_of_reach(loaded.deployment)]
    return Migrated(text, notes, loaded.findings(problems))


def _launches(where: str, text: str) -> list[Launch]:
    try:
        found = launches(commands(text), _reachable(where))
    except Unreadable as error:
        raise Unmovable(f"{where}: {error}") from None
    if not found:
        raise Unmovable(
            f"{where}: no command starts an engine; must hold `vllm serve`, `sglang serve` or `-m sglang.launch_server`, or be "
            "a LeaderWorkerSet or DisaggregatedSet"
        )
    for launch in found:
        launch.hints.append(Path(where).stem)
    return found


def _reachable(where: str) -> Callable[[str], str | None]:
    """Reads files that a text names, relative to the text's own folder or to the current one."""

    def text_of(path: str) -> str | None:
        for candidate in (Path(where).parent / path, Path(path)):
            try:
                return read_text(candidate)
            except (OSError, UnicodeDecodeError):
                continue
        return None

    return text_of


def _by_role(drafts: Sequence[Draft]) -> list[Draft]:
    """One draft a role, in the file's order. Further nodes of a role have the same command, or the difference is noted."""
    kept: dict[str, Draft] = {}
    for each in drafts:
        first = kept.setdefault(each.name, each)
        if first is each:
            continue
        first.notes += [note for note in each.notes if note not in first.notes]
        images = ({"image": str(first.image)}, {"image": str(each.image)})
        for kind, ours, theirs in (
            ("", *images),
            ("--", first.args, each.args),
            ("", first.env, each.env),
            ("ep.", first.ep, each.ep),
        ):
            for key in sorted({*ours, *theirs} - {"api-server-count"}):
                if ours.get(key) != theirs.get(key):
                    why = "two commands of one role differ; the first one's value is rendered for every node"
                    first.note("changed", f"{kind}{key} {theirs.get(key)}", str(ours.get(key)), why)
        if (first.engine, first.data_parallel, first.nodes) != (each.engine, each.data_parallel, each.nodes):
            sizes = [f"{d.engine} on {d.nodes} nodes with {d.data_parallel} data-parallel ranks" for d in (first, each)]
            raise Unmovable(f"two {each.name} commands differ: {sizes[0]}, and {sizes[1]}; give those of one deployment only")
    order = ("prefill", "decode", "unified")
    return sorted(kept.values(), key=lambda each: order.index(each.name))


def _document(
    drafts: Sequence[Draft],
    pods: Pods | None,
    name: str,
    preset: str | None,
    topology: str | None,
    notes: list[Note],
) -> dict[str, Any]:
    gpus = topologies()[topology].get("gpus_per_node", USUAL_GPUS) if topology else USUAL_GPUS
    for each in drafts:
        if each.nodes == 1 and each.ranks > gpus:
            each.nodes = -(-each.ranks // gpus)
            why = f"the command does not say how its {each.ranks} ranks lie; {gpus} GPUs a node are assumed, --topology tells"
            notes.append(Note("added", each.name, "nodes", str(each.nodes), why))
    machines: dict[str, Any] = {"preset": topology} if topology else {}
    machines["nodes"] = sum(each.nodes for each in drafts)
    if not topology:
        machines["gpus_per_node"] = max(-(-each.ranks // each.nodes) for each in drafts)
    first = drafts[0]
    for each in drafts[1:]:
        for what, ours, theirs in (("model", first.model, each.model), ("served-model-name", first.served, each.served)):
            if ours != theirs:
                notes.append(Note("changed", each.name, f"{what} {theirs}", ours, "the file has one for all roles"))
    fp8 = preset is not None and models()[preset].get("quantization_config", {}).get("quant_method") == "fp8"
    document: dict[str, Any] = {
        "name": name,
        "topology": machines,
        "model": _model(first.model, preset) | {"served_name": first.served},
        "roles": {each.name: _role(each, fp8) for each in drafts},
    }
    if first.name == "unified":
        host, port = first.listens
        router = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
        document |= {"router": router} if router else {}
    target: dict[str, Any] = {"kind": pods.kind if pods else "shell"}
    if pods and (granted := pods.granted()):
        target["pod"] = granted
    document["target"] = target
    notes += set_images(document, drafts)
    return document


def _role(made: Draft, fp8: bool) -> dict[str, Any]:
    role: dict[str, Any] = {"engine": made.engine, "nodes": made.nodes, "data_parallel": made.data_parallel}
    role["ep"] = {"mode": made.ep.get("mode", "auto"), **made.ep, **({"fp8": True} if fp8 else {})}
    return role | {key: value for key, value in (("args", dict(made.args)), ("env", dict(made.env))) if value}


def _model(given: str, preset: str | None) -> dict[str, Any]:
    if (Path(given) / "config.json").is_file():
        return {"path": str(Path(given).resolve())}
    if preset is None:
        raise Unmovable(
            f"model {given} is none that is known here, and its shape decides bytes and memory; give --model with one of "
            f"{', '.join(models())}, or run this where {given}/config.json is"
        )
    return {"preset": preset, "source": given}


def _preset(drafts: Sequence[Draft], hints: Sequence[str]) -> str | None:
    """The model that a name tells: the longest preset whose letters and digits stand in it."""
    names = [_letters(text) for each in drafts for text in (each.model, each.served)] + [_letters(h) for h in hints]
    known = sorted(models(), key=lambda preset: -len(preset))
    return next((preset for preset in known if any(_letters(preset) in name for name in names)), None)


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _name(pods: Pods | None, found: Sequence[Launch]) -> str:
    hint = found[0].hints[0] if pods and found[0].hints else "migrated"
    plain = re.sub(r"[^a-z0-9-]+", "-", re.sub(r"-?(prefill|decode)(-main)?", "", hint.lower())).strip("-")
    return plain if re.match(r"[a-z]", plain) else "migrated"


def _capacities(document: dict[str, Any]) -> list[Note]:
    """Gives every role the rows that its own limits can make a rank dispatch."""
    notes = []
    for view in views(checked(document)):
        ep = document["roles"][view.name]["ep"]
        given, need = ep.get("max_tokens"), _need(view)
        if given is None:
            why = "what the engine's own limits admit in a step"
            if _depends_on_gpu(view):
                why += f" on GPUs of {ASSUMED_HBM // GIB} GiB; nothing tells what yours have, --topology does"
            notes.append(Note("added", view.name, "ep.max_tokens", str(need), why))
        elif given < need:
            why = f"the engine's own limits admit {need} tokens a rank in a step"
            notes.append(Note("changed", view.name, f"{given} dispatch tokens a rank", f"ep.max_tokens: {need}", why))
        ep["max_tokens"] = max(given or 0, need)
    return notes


def _unexpanded(document: Mapping[str, Any]) -> list[Note]:
    """Words that a shell would have replaced: the file's values are read by none."""
    places = [("all", f"model.{key}", value) for key, value in document["model"].items()]
    for name, role in document["roles"].items():
        places += [(name, f"{part}.{key}", value) for part in ("args", "env") for key, value in role.get(part, {}).items()]
    why = "only a shell knows what it stands for, and none reads the file: write what is meant, or remove it"
    return [
        Note("changed", role, shown(value), f"{place}, as it is written", why)
        for role, place, value in places
        if EXPANSION.search(str(value))
    ]


def _need(view: RoleView) -> int:
    """What the role's limits admit; DeepEP's own number where no flag of an SGLang decode role bounds it."""
    bounded = view.role.number("max-running-requests") or largest_bucket(view.role)[1]
    if view.role.engine == "sglang" and view.name == "decode" and not bounded:
        return DEEPEP_TOKENS
    return max(batch_limit(view.deployment, view.name, view.role), largest_bucket(view.role)[1])


def _depends_on_gpu(view: RoleView) -> bool:
    """Is the batch a default that would be another one on a larger GPU?"""
    large = view.deployment.topology.model_copy(update={"hbm": 1 << 40})
    larger = view.deployment.model_copy(update={"topology": large})
    limits = (batch_limit(made, view.name, view.role) for made in (view.deployment, larger))
    return view.machine.hbm is None and len(set(limits)) > 1


def as_rows(notes: Sequence[Note]) -> list[Mapping[str, str]]:
    return [{"kind": n.kind, "role": n.role, "what": n.what, "became": n.became, "why": n.why} for n in notes]
