"""Counters are kept where bytes are written, so they must equal what the routing says has to be written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ep_backend import layout
from ep_backend.layout import Payload
from ep_backend.plan.copies import group_limited
from tests.core import oracle
from tests.core.pool import World, modes
from tests.core.rounds import Round
from tests.plan.simulation import crossing, pick

TOPOLOGIES = [(1, 1), (4, 4), (4, 2), (6, 2), (8, 4), (8, 2), (3, 1)]


class Written:
    """Records counted by the rank that writes them and the path they take."""

    def __init__(self, ranks: int, gpus: int) -> None:
        self.by_rank: list[Counter[str]] = [Counter() for _ in range(ranks)]
        self._gpus = gpus

    def write(self, writer: int, to: int, forwarded: bool = False) -> None:
        path = "scale_up" if writer // self._gpus == to // self._gpus else "scale_out"
        self.by_rank[writer]["local" if writer == to else path] += 1
        self.by_rank[writer]["forwarded"] += forwarded


def routed(case: oracle.Case, per_expert: bool) -> Iterator[tuple[int, list[int]]]:
    """Each token's source, and the owner of each of its copies."""
    for source, ids in enumerate(case.ids):
        for row in ids.tolist():
            owners = [e // case.local for e in {e for e in row if e >= 0}]
            yield source, owners if per_expert else sorted(set(owners))


def copies(case: oracle.Case, gpus: int, hops: bool, per_expert: bool) -> list[Counter[str]]:
    """Records that each rank must write for a dispatch, by path; ``hops``: over a relay between nodes."""
    written = Written(case.ranks, gpus)
    for source, owners in routed(case, per_expert):
        if not hops:
            for owner in owners:
                written.write(source, owner)
            continue
        for node in {owner // gpus for owner in owners}:
            relay = node * gpus + source % gpus
            if relay != source:
                written.write(source, relay)
            for owner in owners:
                if owner // gpus == node:
                    written.write(relay, owner, forwarded=relay != source)
    return written.by_rank


def answers(case: oracle.Case, gpus: int, hops: bool, per_expert: bool) -> list[Counter[str]]:
    """Partial sums go back the way their records came."""
    written = Written(case.ranks, gpus)
    for source, owners in routed(case, per_expert):
        for owner in owners:
            written.write(owner, owner // gpus * gpus + source % gpus if hops else source)
        if hops:
            for node in {owner // gpus for owner in owners} - {source // gpus}:
                written.write(node * gpus + source % gpus, source, forwarded=True)
    return written.by_rank


def counted(world: World, gpus: int, form: str, payload: str) -> dict[str, Any]:
    """Counters of two equal rounds of each mode on a fresh buffer."""
    with world.make(gpus_per_node=gpus, low_latency_form=form) as buffer:
        for mode in modes(world.fabric):
            case = cases(world.size)[mode]
            for _ in range(2):
                Round(world, buffer, case, mode, layout="masked", payload=payload).run()
        found: dict[str, Any] = buffer.stats()
        return found


def cases(size: int) -> dict[str, oracle.Case]:
    kinds = {
        "normal": "uniform",
        "direct": "duplicates",
        "low_latency": "duplicates",
        "hybrid": "holes",
    }
    return {
        mode: oracle.make_case(n, [(5 * r + 3 * n) % 13 for r in range(size)], kind=kind)
        for n, (mode, kind) in enumerate(kinds.items())
    }


@pytest.mark.parametrize("form", ["per_rank", "per_expert"])
@pytest.mark.parametrize("size,gpus", TOPOLOGIES, ids=[f"{r}ranks-{g}" for r, g in TOPOLOGIES])
def test_copies_equal_the_analytic_numbers(ranks: Any, fabric: str, size: int, gpus: int, form: str) -> None:
    payload, wire = ("bf16", Payload.BF16) if form == "per_rank" else ("fp8", Payload.FP8)
    record = layout.record(wire, 256, 4).bytes
    everyone = ranks(size, fabric).run(counted, gpus, form, payload)
    crossed = 0
    for mode in modes(fabric):
        case = cases(size)[mode]
        how = {"gpus": gpus, "hops": mode in ("normal", "hybrid")}
        how["per_expert"] = mode == "low_latency" and form == "per_expert"
        sent, back = copies(case, **how), answers(case, **how)
        for rank, stats in enumerate(everyone):
            s = stats["modes"][mode]
            assert (s["dispatches"], s["combines"]) == (2, 2)
            assert s["tokens"] == 2 * len(case.x[rank]) and s["slots_high_water"] == len(case.x[rank])
            for path in ("local", "scale_up", "scale_out", "forwarded"):
                where = f"{mode}, rank {rank}, {path}"
                assert s["records"][path] == 2 * sent[rank][path], where
                assert s["bytes"][path] == 2 * sent[rank][path] * record, where
                assert s["combine_records"][path] == 2 * back[rank][path], where
                assert s["combine_bytes"][path] == 2 * back[rank][path] * 256 * 2, where
            crossed += s["records"]["scale_out"]
    assert bool(crossed) == (size > gpus), "several nodes mean records between them"


def limited(world: World, gpus: int, top_groups: int) -> dict[str, tuple[int, int]]:
    """By mode of two hops: records of one round that went out to other nodes, and the distinct remote nodes of this rank's
    tokens. A group of experts is a node's."""
    nodes, experts, tokens = world.size // gpus, 8 * world.size, 48
    case = oracle.make_case(1, [tokens] * world.size, experts=experts, hidden=128)
    for rank in range(world.size):
        scores = np.random.default_rng(rank).random((tokens, experts))
        case.ids[rank] = torch.from_numpy(pick(scores, 4, nodes, top_groups).astype(np.int64))
    found = {}
    tokens_of = dict.fromkeys(("normal", "hybrid"), tokens)
    with world.make(gpus_per_node=gpus, num_experts=experts, hidden=128, max_tokens=tokens_of) as buffer:
        for mode in tokens_of:
            Round(world, buffer, case, mode).run()
        each = crossing(case.ids[world.rank].numpy(), experts, world.size, nodes, world.rank // gpus).per_node
        for mode, s in buffer.stats()["modes"].items():
            # What this rank relays stays in its node.
            found[mode] = s["records"]["scale_out"], round(each * tokens)
    return found


@pytest.mark.parametrize("size,gpus", [(4, 2), (8, 2)], ids=["2x2", "4x2"])
def test_node_limited_routing_crosses_the_rail_as_the_model_says(ranks: Any, fabric: str, size: int, gpus: int) -> None:
    """Each token crosses once for each of its remote nodes; with fewer nodes a token, fewer do."""
    nodes, totals = size // gpus, {}
    for top_groups in (nodes, nodes // 2):
        each = ranks(size, fabric).run(limited, gpus, top_groups)
        for mode in ("normal", "hybrid"):
            assert all(found[mode][0] == found[mode][1] for found in each), (mode, top_groups, each)
        totals[top_groups] = sum(found["hybrid"][0] for found in each)
        assert totals[top_groups] == sum(found["normal"][0] for found in each)
        model = group_limited(8 * size, 4, size, nodes, nodes, top_groups).nodes * (1 - 1 / nodes) * 48 * size
        assert abs(totals[top_groups] / model - 1) < 0.1, (totals, model)
    assert totals[nodes // 2] < 0.8 * totals[nodes]


def test_copies_a_token_of_the_known_decode_shape() -> None:
    """4 GPUs of one domain, 256 experts, 8 picks: 2.71 remote copies a token when one goes to a GPU, 6 to an expert."""
    case = oracle.make_case(0, [2000, 0, 0, 0], experts=256, top_k=8, hidden=8)
    one = copies(case, 4, False, False)[0]["scale_up"] / 2000
    each = copies(case, 4, False, True)[0]["scale_up"] / 2000
    assert abs(one - 2.71) < 0.03 and abs(each - 6.0) < 0.1


def rows_by_expert(world: World) -> tuple[list[int], dict[str, Any]]:
    with world.make() as buffer:
        want = torch.zeros(buffer.local_experts, dtype=torch.int64)
        for seed, mode in enumerate(modes(world.fabric)):
            case = oracle.make_case(seed, [9, 4], kind="zipf")
            want += Round(world, buffer, case, mode, layout="masked").run().got.counts.cpu()
        stats = buffer.stats()
        assert stats["mode_executed"] == modes(world.fabric)[-1]
        assert stats["epoch"] == len(modes(world.fabric)) and stats["failed"] is None
        return want.tolist(), stats


def test_rows_by_expert_and_json(ranks: Any, fabric: str) -> None:
    for want, stats in ranks(2, fabric).run(rows_by_expert):
        assert stats["expert_rows"] == want and sum(want) > 0
        assert json.loads(json.dumps(stats)) == stats
