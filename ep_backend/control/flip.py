"""One rank's side of a change of mode at the same step on every rank.

A rank that can run the new mode proposes a token in its dispatches. When one dispatch carried the token on every rank,
all of them see so after that dispatch, and use the new mode from the next one on. No rank decides on its own, so no
barrier is needed, and a rank that cannot prepare keeps all of them in the old mode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ep_backend.modes import parse_mode
from ep_backend.policy import AUTO, Wish


class Carrier(Protocol):
    """The part of a buffer that a flip needs."""

    def propose(self, token: int) -> None: ...
    def agreed(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...


class FlipRefused(Exception):
    """This rank cannot prepare the change; the message says why."""


class Flip:
    """The wish of a rank, and how it changes. ``check`` raises ValueError for a wish that the rank cannot serve.

    Proposals travel in the first buffer, which is the same one on all ranks. Threads: the engine reads :attr:`mode` before
    each dispatch, the agent's thread does the rest.
    """

    def __init__(self, wish: Wish, *, buffers: Callable[[], Sequence[Carrier]], check: Callable[[Wish], None]) -> None:
        self._mode = wish
        self._buffers = buffers
        self._check = check
        # Kept after abandon(): a dispatch on its way may still carry the token, and then every rank must follow it.
        self._offers: dict[int, Wish] = {}
        self._proposed = self._settled = self._abandoned = 0
        self._epoch = 0
        self._flips = 0
        self._lock = threading.Lock()

    @property
    def mode(self) -> Wish:
        """The wish to decide the next dispatch by."""
        buffers = self._buffers()
        token = buffers[0].agreed() if buffers else 0
        if token and token != self._settled:
            self._settle(token, buffers[0])
        return self._mode

    def require(self, mode: str) -> Wish:
        """The wish for that mode; FlipRefused if this rank cannot serve it, ValueError if there is no such mode."""
        wish: Wish = AUTO if mode == AUTO else parse_mode(mode)
        if not self._buffers():
            raise FlipRefused("no buffer yet: the model is still loading; try again when the instance serves")
        try:
            self._check(wish)
        except ValueError as error:
            raise FlipRefused(str(error)) from None
        return wish

    def prepare(self, token: int, mode: str) -> None:
        """Propose the change; FlipRefused if this rank cannot serve the mode, ValueError for a bad token or mode."""
        wish = self.require(mode)
        _ = self.mode  # what the last dispatch agreed on is settled first
        with self._lock:
            if token == self._abandoned:
                raise FlipRefused(f"token {token} was abandoned; propose another one")
            if token == self._settled:  # ranks would take it for that agreement, and carry it for ever
                raise FlipRefused(f"token {token} was the last one agreed on; propose another one")
            if token == self._proposed and wish != self._offers[token]:  # which ranks may agree on before all hear of this
                raise FlipRefused(f"token {token} proposes another mode already; propose another one")
            self._offers[token] = wish
            self._buffers()[0].propose(token)
            self._proposed = token

    def abandon(self, token: int) -> None:
        """Withdraw the proposal, also one that is yet to arrive. No effect on a change that was agreed on."""
        with self._lock:
            self._abandoned = token
            if self._proposed == token:
                self._withdraw()

    def switch(self, wish: Wish) -> None:
        """Change at once. Only while no rank dispatches, and if every rank does the same before the next one."""
        with self._lock:
            self._mode = wish
            self._epoch = int(self._buffers()[0].stats()["epoch"])
            self._flips += 1
            self._withdraw()

    def state(self) -> dict[str, Any]:
        """JSON-ready. ``agreed_epoch``: the dispatch after which the mode changed, equal on all ranks."""
        mode = self.mode
        with self._lock:
            proposed = self._offers[self._proposed] if self._proposed else None
            return {
                "mode": str(getattr(mode, "value", mode)),
                "proposed": str(getattr(proposed, "value", proposed)) if proposed else None,
                "token": self._proposed,
                "agreed_token": self._settled,
                "agreed_epoch": self._epoch,
                "flips": self._flips,
            }

    def _settle(self, token: int, carrier: Carrier) -> None:
        with self._lock:
            if token == self._settled:
                return
            self._mode = self._offers[token]
            self._settled = token
            self._epoch = int(carrier.stats()["epoch"])
            self._flips += 1
            if self._proposed == token:
                self._withdraw()

    def _withdraw(self) -> None:
        self._proposed = 0
        self._buffers()[0].propose(0)
