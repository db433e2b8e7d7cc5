"""Random sleeps at every point where order matters: 2,000 rounds, none of them wrong."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from ep_backend.fabric.host.faults import POINTS, Faults
from tests.core import oracle
from tests.core.pool import World
from tests.core.rounds import Round

MODES = ("normal", "direct", "low_latency", "hybrid")
TOPOLOGIES = [(2, 2), (4, 2), (3, 1)]
ROUNDS = 2000 // (len(TOPOLOGIES) * len(MODES)) + 1


def delayed(world: World, mode: str, gpus: int, rounds: int) -> int:
    """Each stretch delays other points on one or two ranks; the others run ahead as far as the protocol lets them."""
    choose = random.Random(gpus)
    tried: set[str] = set()
    for stretch in range(len(POINTS)):
        slow = [choose.randrange(world.size), stretch % world.size]
        points = (POINTS[stretch], choose.choice(POINTS))
        tried.update(points)
        seconds = choose.choice([0.0002, 0.0004])
        faults = Faults(seed=stretch * 10 + world.rank, max_delay_s=seconds, points=points)
        if world.rank not in slow:
            faults = Faults()
        form = "per_expert" if stretch % 3 == 2 else "auto"
        with world.make(
            gpus_per_node=gpus,
            faults=faults,
            hidden=32,
            payloads=("bf16",),
            ring_slots=2,
            max_tokens={mode: 6},
            low_latency_form=form if mode == "low_latency" else "auto",
        ) as buffer:
            for n in range(-(-rounds // len(POINTS))):
                tokens = [(n * 3 + 2 * r) % 7 for r in range(world.size)]
                case = oracle.make_case(n, tokens, kind=("uniform", "empty_ranks")[n % 2], hidden=32)
                Round(world, buffer, case, mode, lane=n % 2).run()
    return len(tried)


@pytest.mark.slow
@pytest.mark.parametrize("size,gpus", TOPOLOGIES, ids=["1node", "2x2", "3x1"])
@pytest.mark.parametrize("mode", MODES)
def test_rounds_with_delays(ranks: Any, mode: str, size: int, gpus: int) -> None:
    assert set(ranks(size).run(delayed, mode, gpus, ROUNDS, timeout=200)) == {len(POINTS)}


def changing(world: World, point: str) -> None:
    """Modes take turns on the same memory while one rank is late at one point, and other ranks have nothing to do."""
    delay = 0.003 if world.rank == 1 else 0.0
    faults = Faults(seed=world.rank, max_delay_s=delay, points=(point,))
    with world.make(gpus_per_node=2, faults=faults, hidden=32, payloads=("bf16",), ring_slots=2) as buffer:
        for n in range(24):
            tokens = [0] * world.size
            tokens[n % world.size] = tokens[(n + 1) % world.size] = 12
            case = oracle.make_case(n, tokens, hidden=32)
            Round(world, buffer, case, MODES[n % 4], lane=n % 8 // 4).run()


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_late_rank_while_modes_change(ranks: Any, point: str) -> None:
    ranks(4).run(changing, point)


def late(world: World, seconds: float) -> float:
    """A peer that is late by half the timeout is waited for, and the wait is counted against it alone."""
    with world.make(timeout_s=2 * seconds + 8) as buffer:
        case = oracle.make_case(1, [4] * world.size)
        Round(world, buffer, case, "direct").run()
        before = buffer.stats()["wait_s"].get("1", 0.0)
        if world.rank == 1:
            time.sleep(seconds)
        Round(world, buffer, case, "direct").run()
        found: float = buffer.stats()["wait_s"].get("1", 0.0) - before
        return found


def test_a_late_peer_is_waited_for_and_named_in_the_wait_times(ranks: Any) -> None:
    waits = ranks(3).run(late, 1.0)
    assert waits[0] > 0.7 and waits[2] > 0.7, waits
    assert waits[1] < 0.5, "the late rank did not wait for itself"


def test_every_point_is_reached(ranks: Any) -> None:
    seen = ranks(4).run(reached)
    assert set.union(*seen) == set(POINTS)


def reached(world: World) -> set[str]:
    seen: set[str] = set()

    class Spy(Faults):
        def at(self, point: str) -> None:
            seen.add(point)

    with world.make(gpus_per_node=2, faults=Spy(), ring_slots=2) as buffer:
        for mode in MODES:
            Round(world, buffer, oracle.make_case(1, [12] * world.size), mode).run()
    return seen
