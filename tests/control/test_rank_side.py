"""The corner cases of one rank's side of a flip: what arrives late, twice, or too early."""

from __future__ import annotations

from typing import Any

import pytest

from ep_backend.control.flip import Flip, FlipRefused
from ep_backend.modes import Mode
from ep_backend.policy import Role, Wish, check_wish


class Carrier:
    """A buffer's proposal and what its last dispatch agreed on, set by the test."""

    def __init__(self) -> None:
        self.proposed = self.agreement = 0
        self.epoch = 0

    def propose(self, token: int) -> None:
        self.proposed = token

    def agreed(self) -> int:
        return self.agreement

    def stats(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def dispatch(self, agreed: int) -> None:
        """One that carried this token on every rank."""
        self.epoch += 1
        self.agreement = agreed


@pytest.fixture
def carrier() -> Carrier:
    return Carrier()


@pytest.fixture
def flip(carrier: Carrier) -> Flip:
    def check(wish: Wish) -> None:
        check_wish(Role.PREFILL, wish)

    return Flip(Mode.DIRECT, buffers=lambda: [carrier], check=check)


def test_the_mode_changes_after_the_dispatch_that_agreed(flip: Flip, carrier: Carrier) -> None:
    flip.prepare(7, "normal")
    assert carrier.proposed == 7
    carrier.dispatch(agreed=0)
    assert flip.mode == Mode.DIRECT
    carrier.dispatch(agreed=7)
    assert flip.mode == Mode.NORMAL
    assert carrier.proposed == 0
    state = flip.state()
    assert (state["mode"], state["agreed_token"], state["agreed_epoch"], state["flips"]) == ("normal", 7, 2, 1)
    carrier.dispatch(agreed=0)
    assert flip.mode == Mode.NORMAL and flip.state()["agreed_epoch"] == 2


def test_an_agreement_on_its_way_counts_although_abandoned(flip: Flip, carrier: Carrier) -> None:
    """The token left with a dispatch before it was withdrawn, and every other rank follows that dispatch."""
    flip.prepare(7, "normal")
    flip.abandon(7)
    assert carrier.proposed == 0
    carrier.dispatch(agreed=7)
    assert flip.mode == Mode.NORMAL


def test_an_agreement_counts_although_another_was_proposed_since(flip: Flip, carrier: Carrier) -> None:
    flip.prepare(7, "normal")
    carrier.dispatch(agreed=7)
    flip.prepare(8, "auto")
    assert flip.mode == Mode.NORMAL
    assert carrier.proposed == 8
    carrier.dispatch(agreed=8)
    assert flip.mode == "auto"


def test_a_proposal_that_arrives_after_its_end_is_refused(flip: Flip, carrier: Carrier) -> None:
    flip.abandon(7)
    with pytest.raises(FlipRefused, match="token 7 was abandoned"):
        flip.prepare(7, "normal")
    assert carrier.proposed == 0
    flip.prepare(9, "normal")
    flip.abandon(7)
    assert carrier.proposed == 9


def test_a_token_may_come_again_later(flip: Flip, carrier: Carrier) -> None:
    for mode, token in (("normal", 7), ("direct", 8), ("auto", 7)):
        flip.prepare(token, mode)
        carrier.dispatch(agreed=token)
        assert flip.state()["mode"] == mode
        carrier.dispatch(agreed=0)
    assert flip.state()["flips"] == 3


def test_a_token_in_use_stands_for_no_other_change(flip: Flip, carrier: Carrier) -> None:
    """Some ranks would agree on the one mode, others on the other."""
    flip.prepare(7, "normal")
    with pytest.raises(FlipRefused, match="token 7 proposes another mode already; propose another one"):
        flip.prepare(7, "auto")
    flip.prepare(7, "normal")
    carrier.dispatch(agreed=7)
    with pytest.raises(FlipRefused, match="token 7 was the last one agreed on; propose another one"):
        flip.prepare(7, "auto")
    assert flip.mode == Mode.NORMAL and carrier.proposed == 0


def test_what_cannot_be_prepared_is_not_proposed(flip: Flip, carrier: Carrier) -> None:
    with pytest.raises(FlipRefused, match="mode low_latency does not serve role prefill"):
        flip.prepare(7, "low_latency")
    with pytest.raises(ValueError, match="mode 'fast' is unknown"):
        flip.prepare(7, "fast")
    assert carrier.proposed == 0
    with pytest.raises(FlipRefused, match="no buffer yet"):
        Flip("auto", buffers=lambda: [], check=lambda wish: None).prepare(7, "normal")
