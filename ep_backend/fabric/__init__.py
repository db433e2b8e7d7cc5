"""Fabrics: "host" (processes of one machine, shared memory) and "nvshmem" (GPUs, NVSHMEM symmetric memory)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep_backend.config import BufferConfig
    from ep_backend.fabric.base import Fabric
    from ep_backend.fabric.host.faults import Faults
    from ep_backend.fabric.meeting import Meeting


def make_fabric(name: str, config: BufferConfig, meeting: Meeting, faults: Faults | None) -> Fabric:
    """The fabric of that name, collectively made by all ranks of the meeting."""
    if name == "host":
        from ep_backend.fabric.host.fabric import HostFabric
        from ep_backend.fabric.host.faults import Faults

        return HostFabric(config, meeting, faults or Faults.from_env())
    if faults is not None:
        raise ValueError(f"faults are injected on the host fabric only, not on {name!r}")
    from ep_backend.fabric.nvshmem.fabric import NvshmemFabric

    return NvshmemFabric(config, meeting)
