"""Memory of one rank: weights, the backend's buffer by region, and what is left for the KV cache. Bytes throughout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ep_backend.deployment.batches import tokens_a_sequence
from ep_backend.deployment.buffers import buffer_config
from ep_backend.deployment.engines.traits import FRACTION_FLAGS
from ep_backend.deployment.resolve import group_of, topology
from ep_backend.deployment.schema import Deployment, Role, RoleName, decimal
from ep_backend.layout import COUNT_BITS
from ep_backend.plan.model import GIB, ModelShape

# CUDA context, captured graphs and activations of a rank: a judgement, not a measurement.
RESERVE_BYTES = 2 * GIB
# Where neither --max-model-len nor --context-length is given.
ASSUMED_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Memory:
    """What a GPU holds. kv_bytes = fraction x hbm - weights - buffer - reserve, and may be below zero."""

    hbm_bytes: int
    fraction: float
    weight_bytes: float
    buffer_bytes: int
    reserve_bytes: int
    kv_bytes_a_token: float
    context: int | None
    """Longest sequence, if the file gives it."""
    largest_capacity: int
    """The most max_tokens whose buffer leaves KV memory at all."""
    largest_batch: int
    """The most sequences a rank of that context, with a buffer just large enough to dispatch them."""

    @property
    def kv_bytes(self) -> float:
        return self.fraction * self.hbm_bytes - self.weight_bytes - self.buffer_bytes - self.reserve_bytes

    @property
    def kv_tokens(self) -> int:
        return max(0, int(self.kv_bytes / self.kv_bytes_a_token))

    @property
    def sequences(self) -> int:
        """Sequences a rank of full context with the buffer as configured."""
        return self.kv_tokens // (self.context or ASSUMED_CONTEXT)

    @staticmethod
    def gib(size: float) -> str:
        return f"{size / GIB:.1f} GiB"


def memory(deployment: Deployment, name: RoleName, role: Role, shape: ModelShape, max_tokens: int) -> Memory:
    """Memory of a rank of that role; ValueError as the buffer raises it, or if the GPU's memory is not known."""
    hbm = topology(deployment.topology).hbm
    if hbm is None:
        raise ValueError("the GPU's memory is not known; give topology.preset or topology.hbm")
    group = group_of(deployment, role)
    fractions = [decimal(role.arg(flag)) for flag in FRACTION_FLAGS]
    fraction = next((f for f in fractions if f is not None), role.traits.fraction)
    weights = shape.weight_bytes(group.ranks, group.tensor_parallel, role.ep.redundant_experts)
    kv_type = role.arg("kv-cache-dtype")
    element = 1 if isinstance(kv_type, str) and "fp8" in kv_type else shape.bytes_per_element
    kv_a_token = shape.kv_bytes(group.tensor_parallel, element)
    context = role.number("max-model-len", "context-length")
    room = fraction * hbm - weights - RESERVE_BYTES

    def buffer_bytes(tokens: int) -> int:
        return int(buffer_config(deployment, name, role, shape, tokens).size_hint()["total"])

    def batch_bytes(sequences: int) -> float:
        tokens = sequences * tokens_a_sequence(role)
        return buffer_bytes(tokens) + sequences * (context or ASSUMED_CONTEXT) * kv_a_token

    return Memory(
        hbm,
        fraction,
        weights,
        buffer_bytes(max_tokens),
        RESERVE_BYTES,
        kv_a_token,
        context,
        _most(buffer_bytes, room),
        _most(batch_bytes, room),
    )


def _most(bytes_of: Callable[[int], float], room: float) -> int:
    """The largest n from 0 whose bytes fit into `room`; `bytes_of` grows with n."""
    fits, limit = 0, (1 << COUNT_BITS) - 1
    while fits < limit:
        middle = (fits + limit + 1) // 2
        try:
            ok = bytes_of(middle) <= room
        except ValueError:  # beyond what the buffer can count
            ok = False
        fits, limit = (middle, limit) if ok else (fits, middle - 1)
    return fits
