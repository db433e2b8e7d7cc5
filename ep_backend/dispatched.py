"""What a dispatch gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ep_backend.fabric.base import Call, Received, Routing


@dataclass(slots=True, eq=False)
class Handle:
    """What combine needs to answer a dispatch. Opaque. Its combine ends it; a later dispatch may still repeat its routing, for
    which it keeps the caller's topk_ids and topk_weights."""

    call: Call | None  # until its combine
    routing: Routing
    owner: object  # the buffer


class Dispatched:
    """Result of a dispatch. With ``return_hook`` the tensors exist once ``hook()`` has run.

    compact: ``rows`` [N, H] in order of source rank and token, ``topk_ids`` [N, K] int32 local expert ids (-1 elsewhere),
    ``topk_weights`` [N, K] fp32 (0 elsewhere), ``scales`` [N, H/128] fp32 or [N, ceil(H/512)] int32, row-major.
    N is exact when the host knows the count (``num_rows``), else R x most_tokens with ids -1 behind the last row.
    masked: ``rows`` [e, R x max_tokens, H], ``scales`` [e, R x max_tokens, H/128] fp32 or [.., ceil(H/512)] int32 with
    dimension 1 contiguous (column-major, padded to 16 bytes, as TMA wants it); ids and weights are None.
    ``counts`` [e] int32: received rows by local expert (compact: picks by local expert).
    """

    __slots__ = ("_found", "handle", "hook", "event")

    def __init__(self, found: list[Received], handle: Handle, hook: Callable[[], None] | None, event: Any = None) -> None:
        self._found = found  # empty until the dispatch is finished; nothing else keeps the tensors
        self.handle = handle
        self.hook = hook
        self.event = event

    @property
    def _received(self) -> Received:
        if not self._found:
            raise RuntimeError("dispatch is not finished: call its hook() before reading the result")
        return self._found[0]

    @property
    def rows(self) -> torch.Tensor:
        return self._received.rows

    @property
    def scales(self) -> torch.Tensor | None:
        return self._received.scales

    @property
    def topk_ids(self) -> torch.Tensor | None:
        return self._received.topk_ids

    @property
    def topk_weights(self) -> torch.Tensor | None:
        return self._received.topk_weights

    @property
    def counts(self) -> torch.Tensor:
        return self._received.counts

    @property
    def num_rows(self) -> int | None:
        return self._received.num_rows
