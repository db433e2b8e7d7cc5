"""normal's kernels: rings far smaller than what goes through them, on one node and over relays."""

from __future__ import annotations

import ctypes
import os
import random
import time
from typing import Any

import pytest
import torch

from ep_backend import layout
from ep_backend.routing import KINDS
from tests.core import oracle
from tests.core.pool import Outcome, Pool, World, attempt
from tests.core.rounds import Round

PAYLOADS = ("bf16", "fp8", "fp8_cast", "fp8_ue8m0_cast")
TOPOLOGIES = [(2, 2), (2, 1), (4, 2)]
IDS = [f"{r}ranks-{g}" for r, g in TOPOLOGIES]


def rounds(world: World, count: int, tokens: int, seed: int = 0, **arguments: Any) -> int:
    """Random routings, forms and numbers of tokens, the same on every rank."""
    choose = random.Random(seed)
    options = {"hidden": 128, "max_tokens": {"normal": tokens}, **arguments}
    with world.make(**options) as buffer:
        for n in range(count):
            many = [choose.choice([0, 1, tokens // 2, tokens]) for _ in range(world.size)]
            case = oracle.make_case(seed + n, many, kind=choose.choice(list(KINDS)), hidden=128)
            form, payload = choose.choice(["compact", "masked"]), choose.choice(PAYLOADS)
            Round(world, buffer, case, "normal", layout=form, payload=payload, lane=choose.randrange(2)).run()
        assert buffer.failure() is None
    return count


@pytest.mark.parametrize("slots", [1, 2, 7, 33])
@pytest.mark.parametrize("size,gpus", TOPOLOGIES, ids=IDS)
def test_tiny_rings(ranks: Any, kernels: str, size: int, gpus: int, slots: int) -> None:
    """One slot a ring; one of a channel; channels that share a ring unevenly; more channels than a rank has blocks."""
    done = ranks(size, kernels).run(rounds, 6, 40, slots, gpus_per_node=gpus, ring_slots=slots)
    assert set(done) == {6}


def through(world: World, tokens: int, gpus: int, hidden: int = 64) -> int:
    options = {"hidden": hidden, "payloads": ("bf16",), "lanes": 1, "ring_slots": 8, "gpus_per_node": gpus}
    with world.make(**options, max_tokens={"normal": tokens}) as buffer:
        for seed, kind in enumerate(("uniform", "hot_rank")):
            Round(world, buffer, oracle.make_case(seed, [tokens] * world.size, kind=kind, hidden=hidden), "normal").run()
        return int(buffer.allocated_bytes)


@pytest.mark.parametrize("size,gpus", TOPOLOGIES, ids=IDS)
def test_more_tokens_than_rings_hold(ranks: Any, kernels: str, size: int, gpus: int) -> None:
    pool = ranks(size, kernels)
    assert pool.run(through, 8, gpus) == pool.run(through, 700, gpus, timeout=200), "the heap does not depend on the tokens"


def test_relays_add_rows_of_one_line(ranks: Any, kernels: str) -> None:
    ranks(4, kernels).run(through, 8, 2, 8)


def skewed(world: World) -> None:
    """One rank has all tokens, another one all experts, so that two relays and two streams carry everything."""
    options = {"hidden": 64, "payloads": ("bf16",), "lanes": 1, "ring_slots": 4, "gpus_per_node": 2}
    with world.make(**options, max_tokens={"normal": 150}) as buffer:
        for owner in range(world.size):
            tokens = [0] * world.size
            tokens[(owner + 3) % world.size] = 150
            case = oracle.make_case(owner, tokens, hidden=64)
            for ids in case.ids:
                ids[:] = owner * case.local + ids % case.local
            Round(world, buffer, case, "normal").run()


def test_one_source_and_one_destination(ranks: Any, kernels: str) -> None:
    ranks(4, kernels).run(skewed)


def repeated(world: World) -> tuple[int, int, list[int]]:
    """A handle repeats a routing, in the other layout too, and with other numbers of rows known to the host."""
    with world.make(gpus_per_node=2) as buffer:
        case = oracle.make_case(5, [12, 0, 7, 3][: world.size])
        launched: list[str] = []
        launch = buffer._fabric._launch

        def spy(op: str, *args: Any, **kw: Any) -> None:
            launched.append(op)
            launch(op, *args, **kw)

        first = Round(world, buffer, case, "normal").run()
        asked = 0
        await_rows = buffer._fabric._await_rows

        def count(call: Any) -> int:
            nonlocal asked
            asked += 1
            return await_rows(call)

        buffer._fabric._launch, buffer._fabric._await_rows = spy, count
        handle = first.got.handle
        sizes = []
        for n, (form, payload) in enumerate((("compact", "bf16"), ("masked", "fp8_cast"), ("compact", "fp8_cast"))):
            again = Round(world, buffer, case, "normal", layout=form, payload=payload, lane=n % 2, handle=handle).run()
            sizes.append(len(again.got.rows))
        masked = again.got.handle
        Round(world, buffer, case, "normal", layout="compact", handle=masked, host_counts=False).run()
        return asked, len(launched), sizes


@pytest.mark.parametrize("size", [2, 4])
def test_a_handle_repeats_without_counting(ranks: Any, kernels: str, size: int) -> None:
    for asked, launched, sizes in ranks(size, kernels).run(repeated):
        assert asked == 0, "the host knows the number of rows already"
        assert launched == 4 * 3 and sizes[0] == sizes[2]


def some_with_a_handle(world: World) -> str | None:
    buffer = world.make(timeout_s=20.0)
    case = oracle.make_case(1, [4] * world.size)
    first = Round(world, buffer, case, "normal").run()
    handle = first.got.handle if world.rank == 0 else None
    attempt(lambda: Round(world, buffer, case, "normal", handle=handle).run())
    world.settle()
    why = buffer.failure()
    buffer.destroy()
    return why


def test_a_handle_on_some_ranks_only(ranks: Any, kernels: str) -> None:
    whys = ranks(2, kernels).run(some_with_a_handle)
    assert all(whys) and any("with a handle" in str(w) for w in whys), whys


def one_warp_gives_up(world: World, gpus: int) -> int:
    """The last rank has four slots for five records of rank 0 and takes none; the fifth token goes to the rank before it, too.
    What that one is told."""
    buffer = world.make(timeout_s=2.0, ring_slots=4, lanes=1, gpus_per_node=gpus)
    last = world.size - 1
    case = oracle.make_case(0, [6] + [0] * last)
    case.ids[0][:] = -1
    case.ids[0][:5, 0] = last * case.local
    case.ids[0][4:, 1] = (last - 1) * case.local
    fabric = buffer._fabric
    launch = fabric._launch

    def late(which: str, *args: Any, **kw: Any) -> None:
        if which == "dispatch" and world.rank == last:
            time.sleep(6)
        launch(which, *args, **kw)

    fabric._launch = late
    outcome = attempt(lambda: Round(world, buffer, case, "normal").run())
    assert buffer.failure() and (outcome.kind == "error" or world.rank == 1), "rank 1 may have nothing to wait for"
    at = fabric._heap.base + layout.lane_offset(fabric.shape, 0) + layout.words(fabric.shape).ring_tail
    told = ctypes.c_uint64.from_address(at).value & layout.COUNT_MASK
    buffer.destroy()
    return told


@pytest.mark.parametrize("size,gpus", [(3, 3), (4, 2)], ids=["senders", "relays"])
def test_no_reader_is_told_of_what_was_not_written(ranks: Any, size: int, gpus: int) -> None:
    """Other warps are done with their records, the sixth too, when the one with the fifth gives up."""
    assert ranks(size, "emulated").run(one_warp_gives_up, gpus)[size - 2] == 0


def stalled(world: World, op: str) -> tuple[Outcome, float, str | None]:
    """Rank 1 has told its counts, then its kernel of ``op`` comes later than anybody waits."""
    buffer = world.make(timeout_s=3.0, gpus_per_node=2)
    Round(world, buffer, oracle.make_case(0, [12] * world.size), "normal").run()
    launch = buffer._fabric._launch

    def late(which: str, *args: Any, **kw: Any) -> None:
        if which == op and world.rank == 1:
            time.sleep(8)
        launch(which, *args, **kw)

    buffer._fabric._launch = late
    started = time.monotonic()
    outcome = attempt(lambda: Round(world, buffer, oracle.make_case(1, [12] * world.size), "normal").run())
    world.settle()
    took, why = time.monotonic() - started, buffer.failure()
    assert attempt(lambda: Round(world, buffer, oracle.make_case(2, [1] * world.size), "normal").run()).error == "EpFailed"
    buffer.destroy()
    return outcome, took, why


@pytest.mark.slow
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_peer_that_stalls_in_a_stream_fails_the_buffer(ranks: Any, kernels: str, op: str) -> None:
    found = ranks(4, kernels).run(stalled, op, timeout=90)
    assert all(outcome.kind == "error" or why for outcome, _, why in found)
    whys = [why for _, _, why in found]
    assert any(why and f"{op}: mode=normal, lane=0, epoch=2" in why and "peer=" in why for why in whys), whys
    assert all(took < 16 for _, took, _ in found)


def budgets(world: World) -> None:
    options = {"hidden": 128, "payloads": ("bf16",), "lanes": 1, "ring_slots": 16, "gpus_per_node": 2}
    with world.make(**options, max_tokens={"normal": 60}) as buffer:
        case = oracle.make_case(0, [60] * world.size, hidden=128)
        x = case.x[world.rank].bfloat16().to(world.device)
        ids, weights = (t[world.rank].to(world.device) for t in (case.ids, case.weights))
        want = None
        for sms in (None, 1, 2 + world.rank % 2, 1 + world.rank):
            got = buffer.dispatch(x, ids, weights, mode="normal", sms=sms)
            out = buffer.combine(got.rows, got.handle)
            assert want is None or (torch.equal(want[0], got.rows) and torch.equal(want[1], out)), sms
            want = got.rows, out


def test_any_sm_budget_of_any_rank_gives_the_same_bits(ranks: Any, kernels: str) -> None:
    ranks(4, kernels).run(budgets)


def capturing(world: World, mode: str) -> tuple[Outcome, int]:
    with world.make() as buffer:
        now, buffer._fabric._gpu.capturing = buffer._fabric._gpu.capturing, lambda: True
        x = torch.zeros(2, 256, dtype=torch.bfloat16, device=world.device)
        ids = torch.zeros(2, 4, dtype=torch.int64, device=world.device)
        outcome = attempt(lambda: buffer.dispatch(x, ids, torch.zeros(2, 4, device=world.device), mode=mode))
        buffer._fabric._gpu.capturing = now
        Round(world, buffer, oracle.make_case(1, [3]), mode).run()
        return outcome, buffer.stats()["epoch"]


@pytest.mark.parametrize("mode,says", [("normal", ("normal", "direct")), ("direct", ("host_counts=False", "masked"))])
def test_a_capture_is_refused_and_told_what_to_use(ranks: Any, kernels: str, mode: str, says: tuple[str, ...]) -> None:
    ((found, epoch),) = ranks(1, kernels).run(capturing, mode)
    assert epoch == 1, "the buffer goes on working"
    assert found.error == "ValueError" and all(word in found.message for word in says)


def unanswered(world: World) -> tuple[bool, str | None]:
    """Every sum of rank 0 is there, but rank 1 never says that it has read its rings."""
    buffer = world.make(lanes=1, timeout_s=1.0)
    case = oracle.make_case(3, [12] * world.size)
    for rank, ids in enumerate(case.ids):
        ids[:] = rank * case.local + ids % case.local
    late = Round(world, buffer, case, "normal")
    late.dispatch()
    late.receive()
    if world.rank == 0:
        late.combine()
    world.settle()
    out, why = late.out, buffer.failure()
    poisoned = out is not None and bool(out.isnan().all())
    buffer.destroy()
    return poisoned, why


def test_a_combine_that_fails_at_its_end_leaves_no_sums(ranks: Any, kernels: str) -> None:
    (poisoned, why), _ = ranks(2, kernels).run(unanswered)
    assert why is not None and "combine: mode=normal" in why and "peer=1" in why
    assert poisoned


def delayed(world: World, seed: int) -> int:
    os.environ["EP_EMULATOR_DELAY_US"] = "200" if (seed + world.rank) % 2 else "0"
    return rounds(world, 8, 20, seed, gpus_per_node=2, ring_slots=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_words_that_come_late(seed: int) -> None:
    pool = Pool(4, "emulated")  # the delay is read when a process first needs it
    try:
        assert set(pool.run(delayed, seed, timeout=200)) == {8}
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("size,gpus", [(2, 2), (2, 1), (4, 4), (4, 2), (4, 1)])
def test_fifty_random_rounds(ranks: Any, kernels: str, size: int, gpus: int) -> None:
    """Each launch interleaves its threads by another seed."""
    assert set(ranks(size, kernels).run(rounds, 50, 12, 100, gpus_per_node=gpus, ring_slots=5, timeout=250)) == {50}


@pytest.mark.slow
@pytest.mark.parametrize("size,gpus", [(8, 4), (8, 2), (6, 2), (8, 1)])
def test_many_ranks(ranks: Any, size: int, gpus: int) -> None:
    """Relays that share a stream, and with nodes of one GPU relays that have several."""
    done = ranks(size, "emulated").run(rounds, 6, 12, gpus, gpus_per_node=gpus, ring_slots=8, timeout=250)
    assert set(done) == {6}
