"""A deployment with its presets filled in: the machines, the model's shape and each role's EP group."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ep_backend.deployment.presets import models, topologies
from ep_backend.deployment.schema import Deployment, Model, Role, Topology
from ep_backend.files import read_text
from ep_backend.plan.model import EXPERTS, ModelShape, model_shape


class ModelUnknown(Exception):
    """The model's shape cannot be told; the text says why."""


def topology(given: Topology) -> Topology:
    """The topology with its preset's numbers where it gives none."""
    if given.preset is None:
        return given
    preset = Topology.model_validate(topologies()[given.preset])
    own = {name: value for name in given.model_fields_set if (value := getattr(given, name)) is not None}
    if given.gpus_per_node is not None:
        own.setdefault("nvlink_domain", given.gpus_per_node)
    return preset.model_copy(update=own)


def _model_config(model: Model) -> dict[str, Any]:
    """The model's config.json, or its preset's, with the file's own numbers over it. Raises ModelUnknown."""
    if model.path is not None:
        config = _read_config(model.path / "config.json")
    elif model.preset is not None:
        config = dict(models()[model.preset])
    else:
        raise ModelUnknown("has neither path nor preset")
    experts = next((key for key in EXPERTS if config.get(key)), None)
    if experts is None:
        raise ModelUnknown(f"{model.path} has no n_routed_experts, so the model has no experts to spread")
    keys = {
        "hidden_size": model.hidden,
        experts: model.experts,
        "num_experts_per_tok": model.top_k,
        "n_group": model.groups,
        "topk_group": model.top_groups,
    }
    return config | {key: value for key, value in keys.items() if value is not None}


def shape_of(model: Model) -> ModelShape:
    """The model's shape. Raises ModelUnknown."""
    try:
        shape = model_shape(_model_config(model))
    except ValueError as error:
        raise ModelUnknown(f"{model.path or model.preset} is no config of a mixture of experts: {error}") from None
    if model.moe_layers is None:
        return shape
    if model.moe_layers > shape.layers:
        raise ModelUnknown(f"{model.path or model.preset} has {shape.layers} layers, but moe_layers is {model.moe_layers}")
    return replace(shape, moe_layers=model.moe_layers)


@dataclass(frozen=True)
class Group:
    """One role's EP group."""

    ranks: int
    nodes: int
    """Scale-up domains that the group spans."""
    tensor_parallel: int

    @property
    def gpus_per_node(self) -> int:
        return self.ranks // self.nodes


def group_of(deployment: Deployment, role: Role) -> Group:
    """How a role's ranks lie on the machines; ValueError if the domains do not divide them."""
    machine = topology(deployment.topology)
    ranks, on_a_node = role.ep_size, -(-role.ep_size // role.nodes)
    domain = machine.nvlink_domain or machine.gpus_per_node or on_a_node
    spans_nodes = machine.gpus_per_node is not None and domain > machine.gpus_per_node
    if not spans_nodes:
        domain = min(domain, on_a_node)
    domain = role.ep.gpus_per_node or min(domain, ranks)
    if ranks % domain:
        raise ValueError(f"{ranks} EP ranks cannot be split into NVLink domains of {domain}")
    return Group(ranks, ranks // domain, max(1, ranks // role.data_parallel))


def limited_as_grouped(shape: ModelShape, group: Group, redundant: int) -> bool:
    """Does every rank and node hold whole groups of experts, or part of one? Only then a limit of groups limits places."""
    per_group = shape.experts // shape.groups
    places = (shape.experts // group.ranks, shape.experts // group.nodes)
    return not redundant and all(own and (per_group % own == 0 or own % per_group == 0) for own in places)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_text(file))
    except OSError as error:
        raise ModelUnknown(f"{file} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ModelUnknown(f"{file} is not JSON ({error})") from None
    except RecursionError:
        raise ModelUnknown(f"{file} is nested too deeply to be read") from None
    if not isinstance(config, dict):
        raise ModelUnknown(f"{file} holds no mapping")
    return config
