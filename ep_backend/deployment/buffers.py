"""The buffer that each rank of a role makes."""

from collections.abc import Iterable

from ep_backend.config import BufferConfig
from ep_backend.deployment.batches import tokens_a_sequence
from ep_backend.deployment.resolve import group_of
from ep_backend.deployment.schema import Deployment, Role, RoleName, modes_of, serves_both_families
from ep_backend.modes import Family, Mode
from ep_backend.plan.model import ModelShape


def payload_of(deployment: Deployment, role: Role) -> str:
    """What the buffer's rows are: fp8 where asked for, else the model's type."""
    if role.ep.fp8:
        return "fp8"
    return "fp32" if deployment.topology.device == "cpu" and role.arg("dtype") == "float32" else "bf16"


def tokens_by_mode(name: RoleName, role: Role, modes: Iterable[Mode], max_tokens: int) -> dict[Mode, int]:
    """Tokens that a rank may dispatch in each mode: `max_tokens`, but where the modes of decoding serve nothing else, at most
    those of the sequences that run at once. Less is faster there, and rows of masked experts take a slot each.
    """
    sequences = role.number("max-running-requests")
    if not serves_both_families(name, role.engine) or not sequences:
        return dict.fromkeys(modes, max_tokens)
    running = max(1, sequences // role.data_parallel) * tokens_a_sequence(role)
    return {mode: min(max_tokens, running) if mode.spec.family is Family.DECODE else max_tokens for mode in modes}


def buffer_config(
    deployment: Deployment, name: RoleName, role: Role, shape: ModelShape, max_tokens: int, modes: list[Mode] | None = None
) -> BufferConfig:
    """The buffer that a rank of this role makes; ValueError as the buffer itself raises it.

    `modes` None: those that the role's instance makes it for.
    """
    group = group_of(deployment, role)
    made_for = modes or modes_of(name, role.ep.mode, group.nodes > 1, role.engine, role.ep.rail)
    return BufferConfig.make(
        group.ranks,
        hidden=shape.hidden,
        num_experts=shape.experts + role.ep.redundant_experts,
        top_k=shape.top_k,
        max_tokens={mode.value: n for mode, n in tokens_by_mode(name, role, made_for, max_tokens).items()},
        lanes=role.ep.lanes,
        payloads=(payload_of(deployment, role),),
        gpus_per_node=group.gpus_per_node,
        rail=role.ep.rail or "auto",
        fabric="host" if deployment.topology.device == "cpu" else "nvshmem",
        timeout_s=role.ep.timeout_s,
    )
