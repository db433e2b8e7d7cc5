"""What one SGLang instance is: resolved once where its arguments are, carried to every scheduler, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from ep_backend.modes import Family, Layout, Mode
from ep_backend.policy import AUTO, Forward, Role, Situation, Wish, modes_of
from ep_backend.settings import Settings
from server_plugins.sglang import NAME

MARK = f"{NAME}:"  # a deepep_config that begins so is a plan

FORWARD = {Family.PREFILL: Forward.EXTEND, Family.DECODE: Forward.DECODE}
LAYOUT = {Family.PREFILL: Layout.COMPACT, Family.DECODE: Layout.MASKED}


class Plan(BaseModel):
    """Families are the formats towards SGLang: prefill is deepep_normal, decode is deepep_ll."""

    model_config = ConfigDict(frozen=True)

    role: Role
    families: tuple[Family, ...]
    capacity: dict[Mode, int]
    """max_tokens of the buffers."""
    tokens: dict[Family, int]
    """Most tokens that SGLang makes one rank dispatch in a batch of the family."""
    lanes: int
    ranks: int
    gpus_per_node: int
    decode_graphs: bool
    """Decode batches replay CUDA graphs, which keep the mode that they captured."""
    fabric: str

    def __str__(self) -> str:
        return MARK + self.model_dump_json()

    @classmethod
    def parse(cls, deepep_config: str | None) -> Plan | None:
        """The plan that a deepep_config carries, or None if it is somebody else's."""
        if not deepep_config or not deepep_config.startswith(MARK):
            return None
        return cls.model_validate_json(deepep_config.removeprefix(MARK))

    @property
    def nodes(self) -> int:
        return self.ranks // self.gpus_per_node

    def wish_for(self, family: Family, wish: Wish) -> Wish:
        """An instance with both families gives a mode to batches of the mode's own family, and leaves the other to auto."""
        return wish if wish == AUTO or family in serves(Mode(wish), self.families) else AUTO

    def situation(
        self,
        family: Family,
        wish: Wish,
        tokens: int,
        capacity: Mapping[Mode, int],
        top_k: int,
        settings: Settings,
        capture: bool = False,
    ) -> Situation:
        """What the mode of a batch is decided from. SGLang has fixed the batch's format, so the family alone counts."""
        role = Role.DECODE if family is Family.DECODE else Role.PREFILL
        chosen = self.wish_for(family, wish)
        return Situation(role, FORWARD[family], tokens, capacity, top_k, self.nodes, capture, chosen, settings.estimates)


def serves(mode: Mode, families: tuple[Family, ...]) -> tuple[Family, ...]:
    """Those of an instance's families that the mode serves: with both, its own; alone, whichever it can serve."""
    if len(families) > 1:
        return tuple(family for family in families if mode.spec.family is family)
    return tuple(family for family in families if mode in modes_of(family))
