"""The oracle itself: it must reject what is wrong, or the other tests prove nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_backend import routing
from ep_backend.fabric.host.faults import Faults
from tests.core import oracle
from tests.core.pool import World, attempt, gpus_for
from tests.core.rounds import Round


def perfect(payload: str = "bf16") -> tuple[oracle.Case, Any]:
    """A case of one rank and the only right compact answer to it."""
    case = oracle.make_case(1, [6], experts=8, kind="holes")
    ids, weights = case.ids[0], case.weights[0]
    here = (ids >= 0).any(1)
    assert here.all()
    rows, scales = oracle.wire(case.x[0], payload)
    got = SimpleNamespace(
        rows=rows,
        scales=scales,
        topk_ids=ids.int(),
        topk_weights=torch.where(ids >= 0, weights, 0.0),
        counts=torch.bincount(ids[ids >= 0], minlength=8).int(),
        num_rows=6,
    )
    return case, got


SPOILED: dict[str, Any] = {
    "row": lambda g: g.rows[3, 7].neg_(),
    "order": lambda g: g.rows.copy_(g.rows.flip(0)),
    "id": lambda g: g.topk_ids[2].copy_(g.topk_ids[2].roll(1)),
    "weight": lambda g: g.topk_weights[5, 0].add_(1e-6),
    "count": lambda g: g.counts[4].add_(1),
    "number": lambda g: setattr(g, "num_rows", 5),
}


def check(case: oracle.Case, got: Any) -> None:
    oracle.check_dispatch(case, 0, got, layout="compact", payload="bf16", max_tokens=12)


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_dispatch_is_rejected(name: str) -> None:
    case, got = perfect()
    check(case, got)
    SPOILED[name](got)
    with pytest.raises(AssertionError):
        check(case, got)


def test_one_ulp_past_the_bound_is_rejected() -> None:
    case, got = perfect()
    y = oracle.run_experts(case, 0, got, layout="compact", payload="bf16")
    oracle.check_combine(case, 0, y, layout="compact", payload="bf16")
    for factor in (1 + 2**-6, 1 - 2**-6):
        with pytest.raises(AssertionError, match="tokens are off"):
            oracle.check_combine(case, 0, y * factor, layout="compact", payload="bf16")
    y[2, 2] = float("nan")
    with pytest.raises(AssertionError, match="1 of 6 tokens are off, first 2"):
        oracle.check_combine(case, 0, y, layout="compact", payload="bf16")


def corrupted(world: World) -> str:
    with world.make(faults=Faults(corrupt_combine=True)) as buffer:
        r = Round(world, buffer, oracle.make_case(1, [4, 4]), "direct")
        return attempt(r.run).message


def test_a_buffer_with_a_wrong_combine_is_rejected(ranks: Any) -> None:
    assert all("tokens are off" in text for text in ranks(2).run(corrupted))


@pytest.mark.parametrize("kind", routing.KINDS)
@pytest.mark.parametrize("experts,top_k,ranks", [(24, 4, 4), (8, 8, 8), (256, 8, 64), (4, 32, 2)])
def test_routings_are_what_they_say(kind: str, experts: int, top_k: int, ranks: int) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    ids = routing.make_routing(kind, rng, tokens=200, experts=experts, top_k=top_k, ranks=ranks)
    assert ids.shape == (200, top_k) and ids.dtype == np.int64
    assert ids.min() >= -1 and ids.max() < experts
    valid = [[e for e in row if e >= 0] for row in ids.tolist()]
    owners = {e // (experts // ranks) for row in valid for e in row}
    if kind == "none":
        assert owners == set()
        return
    if kind != "duplicates":
        assert all(len(set(row)) == len(row) for row in valid)
    elif top_k > 1:
        assert any(len(set(row)) < len(row) for row in valid)
    if kind == "hot_rank":
        assert owners == {0}
    if kind == "empty_ranks":
        assert owners and all(r % 2 == 0 for r in owners)
    if kind == "holes":
        assert any(len(row) < top_k for row in valid) and any(valid)
    if kind == "zipf" and experts == 256:
        share = np.sort(np.bincount(ids.ravel(), minlength=experts))[::-1]
        assert share[:16].sum() > 2 * 16 / experts * share.sum(), "a few experts are popular"
    weights = routing.make_weights(rng, ids)
    assert (weights[ids < 0] == 0).all() and (weights[ids >= 0] > 0).all()
    some = (ids >= 0).any(1)
    assert abs(weights[some].sum(1) - 1).max() < 1e-5


def test_an_unknown_routing_names_the_choices() -> None:
    import numpy as np

    with pytest.raises(ValueError, match="'skew' is unknown; choose one of uniform, zipf"):
        routing.make_routing("skew", np.random.default_rng(0), tokens=1, experts=2, top_k=1, ranks=1)


@pytest.mark.parametrize(("size", "found", "used"), [(2, 1, 1), (2, 2, 2), (4, 2, 2), (3, 2, 1), (3, 4, 3), (6, 4, 3)])
def test_ranks_share_gpus_evenly(size: int, found: int, used: int) -> None:
    assert gpus_for(size, found) == used
