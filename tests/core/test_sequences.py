"""Any sequence of modes on one buffer, without cleaning in between, on memory full of NaN."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ep_backend.routing import KINDS
from tests.core import oracle
from tests.core.pool import World, modes
from tests.core.rounds import Round

STEPS = 300
MANY = 1000  # where ranks need not share a GPU


def payloads(world: World) -> tuple[str, ...]:
    given = oracle.PAYLOADS if world.fabric == "host" else ("bf16", "fp8", "fp8_ue8m0")
    return given + tuple(oracle.CASTS)


def random_round(world: World, buffer: Any, choose: random.Random, lane: int) -> Round:
    """The same choice on every rank."""
    mode = choose.choice(list(buffer.config.max_tokens)).value
    forms = ["masked"] if mode == "low_latency" and buffer.config.shape.per_expert else None
    tokens = [choose.choice([0, 1, 3, choose.randrange(13), 12]) for _ in range(world.size)]
    case = oracle.make_case(choose.randrange(1 << 30), tokens, kind=choose.choice(list(KINDS)))
    return Round(
        world,
        buffer,
        case,
        mode,
        layout=choose.choice(forms or ["compact", "masked"]),
        payload=choose.choice(payloads(world)),
        lane=lane,
        hook=choose.random() < 0.4 and mode != "normal",
        ids_dtype=choose.choice([torch.int32, torch.int64]),
    )


def refused(world: World, buffer: Any, choose: random.Random, lane: int) -> None:
    """On every rank; the rounds after it must not notice."""
    mode = choose.choice(list(buffer.config.max_tokens)).value
    with pytest.raises(ValueError, match="13 tokens exceed max_tokens=12"):
        Round(world, buffer, oracle.make_case(0, [13] * world.size), mode, lane=lane).dispatch()


def sequence(world: World, seed: int, steps: int, **arguments: Any) -> dict[str, int]:
    """One lane after the other, or both in flight with their phases mixed."""
    choose = random.Random(seed)
    buffer = world.make(**arguments)
    done = 0
    while done < steps:
        lanes = [0, 1] if choose.random() < 0.5 else [choose.randrange(2)]
        if choose.random() < 0.1:
            refused(world, buffer, choose, lanes[0])
        rounds = [random_round(world, buffer, choose, lane) for lane in lanes]
        phases = [iter((r.dispatch, r.receive, r.combine, r.collect, r.poison)) for r in rounds]
        while phases:
            turn = choose.randrange(len(phases))
            step = next(phases[turn], None)
            if step is None:
                phases.pop(turn)
                continue
            try:
                step()
            except AssertionError as e:
                raise AssertionError(f"after {done} rounds, {[str(r) for r in rounds]}: {e}") from e
        done += len(rounds)
    stats = buffer.stats()
    assert sum(stats["lane_rounds"]) == done
    buffer.destroy()
    return {name: m["combines"] for name, m in stats["modes"].items()}


SHAPES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"low_latency_form": "per_expert"}),
    (3, {"gpus_per_node": 1}),
    (4, {"gpus_per_node": 2}),
    (4, {"gpus_per_node": 2, "rail": "put"}),
    (6, {"gpus_per_node": 3, "ring_slots": 2}),
    (8, {"gpus_per_node": 4, "low_latency_form": "per_expert"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "size,arguments",
    SHAPES,
    ids=lambda v: "-".join(map(str, v.values())) if isinstance(v, dict) else str(v),
)
def test_three_hundred_random_steps(ranks: Any, fabric: str, size: int, arguments: dict[str, Any]) -> None:
    steps = STEPS if size <= 4 else STEPS // 2  # more processes than cores
    if fabric == "emulated":
        steps //= 3
    found = ranks(size, fabric).run(sequence, size, steps, timeout=280, **arguments)
    assert all(done == found[0] for done in found)
    assert set(found[0]) == set(modes(fabric)) and sum(found[0].values()) >= steps
    assert min(found[0].values()) >= steps // 10, "every mode had its part"


@pytest.mark.multigpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size,gpus_per_node,rail", [(2, 2, "auto"), (2, 1, "put"), (4, 2, "auto")])
def test_a_thousand_random_steps(ranks: Any, size: int, gpus_per_node: int, rail: str) -> None:
    """One rank a GPU, and two a GPU."""
    found = ranks(size, "nvshmem").run(sequence, size, MANY, timeout=280, gpus_per_node=gpus_per_node, rail=rail)
    assert all(done == found[0] for done in found)
    assert sum(found[0].values()) >= MANY and min(found[0].values()) >= MANY // 10


def poisoned(world: World) -> None:
    """A full step of NaN in rows, scales and weights, then one token: what comes back is finite."""
    buffer = world.buffer()
    for mode in modes(world.fabric):
        for layout in ("compact", "masked"):
            for payload in ("bf16", "fp8"):
                full = oracle.make_case(1, [12, 12])
                r = Round(world, buffer, full, mode, layout=layout, payload=payload)
                nan = torch.full_like(full.x[world.rank], float("nan"), device=world.device)
                x: Any = nan.bfloat16()
                if payload == "fp8":
                    x = nan.to(torch.float8_e4m3fn), nan[:, :2].contiguous()
                ids = full.ids[world.rank].to(world.device)
                got = buffer.dispatch(
                    x,
                    ids,
                    torch.full(ids.shape, float("nan"), device=world.device),
                    mode=mode,
                    layout=layout,
                )
                y = torch.full(got.rows.shape, float("nan"), device=world.device).bfloat16()
                assert buffer.combine(y, got.handle).isnan().all(), "NaN of the caller is handed on"
                one = oracle.make_case(2, [1, 0])
                r = Round(world, buffer, one, mode, layout=layout, payload=payload).run()
                assert r.out is not None and r.out.isfinite().all()


def test_nothing_of_a_step_full_of_nan_is_left(ranks: Any, fabric: str) -> None:
    ranks(2, fabric).run(poisoned)


def garbage_behind_counts(world: World) -> None:
    """Rows at and beyond a count may hold anything; weights of -1 too."""
    buffer = world.buffer()
    for mode in modes(world.fabric):
        case = oracle.make_case(4, [7, 3], kind="holes")
        want = Round(world, buffer, case, mode, layout="masked").run().out
        for w, ids in zip(case.weights, case.ids, strict=True):
            w[ids < 0] = float("nan")
        got = Round(world, buffer, case, mode, layout="masked").run().out
        assert want is not None and got is not None
        assert torch.equal(got, want)
        empty = (case.ids[world.rank] < 0).all(1)
        assert (got.cpu()[empty] == 0).all(), "a token without experts gets zeros"


def test_garbage_where_there_is_no_token(ranks: Any, fabric: str) -> None:
    ranks(2, fabric).run(garbage_behind_counts)


def flipping(world: World, steps: int) -> None:
    """Prefill steps, decode steps, and back, on one allocation."""
    with world.make() as buffer:
        before = buffer.allocated_bytes
        for mode in ("normal", "low_latency", "normal", "hybrid", "direct"):
            if mode not in modes(world.fabric):
                continue
            for n in range(steps):
                Round(world, buffer, oracle.make_case(n, [12 - n % 3, n % 12]), mode).run()
        assert buffer.allocated_bytes == before
        assert buffer.stats()["mode_executed"] == "direct"
        assert buffer.stats()["epoch"] >= steps


def test_one_buffer_serves_prefill_then_decode_then_prefill(ranks: Any, fabric: str) -> None:
    ranks(2, fabric).run(flipping, 50)


def one_busy_rank(world: World, rounds: int) -> None:
    """Only rank 0 has tokens, all for experts 0 and 1: the same answer every time."""
    tokens = [1024] + [0] * (world.size - 1)
    with world.make(
        top_k=2,
        max_tokens=dict.fromkeys(modes(world.fabric), 1024),
        payloads=("bf16",),
        deterministic=True,  # the answer to the first round is given to all
    ) as buffer:
        case = oracle.make_case(1, tokens, top_k=2)
        for ids in case.ids:
            ids[:] = torch.tensor([0, 1])
        for mode in modes(world.fabric):
            first = Round(world, buffer, case, mode).run()
            x = case.x[world.rank].bfloat16().to(world.device)
            ids, weights = (t[world.rank].to(world.device) for t in (case.ids, case.weights))
            for n in range(rounds):
                got = buffer.dispatch(x, ids, weights, mode=mode)
                out = buffer.combine(first.y, got.handle)
                assert torch.equal(out, first.out), f"{mode}, round {n}"


def test_one_busy_rank_and_two_experts(ranks: Any, fabric: str) -> None:
    rounds = 250 if fabric == "nvshmem" else 25
    ranks(2, fabric).run(one_busy_rank, rounds, timeout=250)


def repeated(world: World) -> None:
    """Same bits and row order from run to run."""
    with world.make(deterministic=True, gpus_per_node=2 if world.size == 4 else None) as buffer:
        for mode in modes(world.fabric):
            for layout in ("compact", "masked"):
                case = oracle.make_case(8, [12, 7, 0, 5][: world.size])
                first = Round(world, buffer, case, mode, layout=layout).run()
                for _ in range(4):
                    again = Round(world, buffer, case, mode, layout=layout).run()
                    assert torch.equal(first.out, again.out)
                    if layout == "compact":
                        assert torch.equal(first.got.rows, again.got.rows)
                    else:
                        for e, n in enumerate(again.got.counts.tolist()):
                            assert torch.equal(first.got.rows[e, :n], again.got.rows[e, :n]), mode


def test_deterministic_order_and_bits(ranks: Any, fabric: str) -> None:
    ranks(2 if fabric == "emulated" else 4, fabric).run(repeated)


def withdrawing(world: World) -> list[int]:
    """What the last dispatch agreed on, after rank 0 alone has taken its proposal back, and after the dispatch that follows."""
    found = []
    with world.make(timeout_s=20.0) as buffer:
        for token in (5, 7):
            buffer.propose(token)
            for hook in (False, True):
                rounds = Round(world, buffer, oracle.make_case(0, [2] * world.size), "low_latency", hook=hook)
                rounds.dispatch()
                if hook and world.rank == 0:
                    buffer.propose(0)
                rounds.receive()
                rounds.combine()
                rounds.collect()
                found.append(buffer.agreed())
            for _ in range(2):
                Round(world, buffer, oracle.make_case(0, [2] * world.size), "low_latency").run()
                found.append(buffer.agreed())
    return found


def test_ranks_see_an_agreement_although_one_withdrew_at_once(ranks: Any, fabric: str) -> None:
    assert ranks(2, fabric).run(withdrawing) == [[5, 5, 0, 0, 7, 7, 0, 0]] * 2
