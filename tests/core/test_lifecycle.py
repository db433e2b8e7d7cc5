"""Construction, agreement, memory and the end of a buffer."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ep_backend.errors import EpTimeout, WaitRecord
from tests.core import oracle
from tests.core.pool import Outcome, World, attempt, modes
from tests.core.rounds import Round

# what rank 1 asks for instead, and the field and both values that everyone must be told
MISMATCHES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"hidden": 512}, ("hidden", "256", "512")),
    ({"num_experts": 48}, ("num_experts", "24", "48")),
    ({"top_k": 8}, ("top_k", "4", "8")),
    (
        {"max_tokens": {"direct": 7, "low_latency": 12}},
        ("max_tokens", "'direct': 12", "'direct': 7"),
    ),
    ({"lanes": 1}, ("lanes", "1", "2")),
    ({"payloads": ("bf16",)}, ("payloads", "bf16", "fp8")),
    ({"gpus_per_node": 1}, ("gpus_per_node", "1", "2")),
    ({"timeout_s": 31}, ("timeout_s", "30.0", "31.0")),
    ({"low_latency_form": "per_expert"}, ("low_latency_form", "auto", "per_expert")),
    ({"rail": "put"}, ("rail", "auto", "put")),
    ({"ring_slots": 9}, ("ring_slots", "8", "9")),
    ({"deterministic": True}, ("deterministic", "False", "True")),
    ({"lanes": 1, "top_k": 2}, ("lanes", "top_k")),
]


def mismatched(world: World, changes: dict[str, Any]) -> Outcome:
    outcome = attempt(lambda: world.make(**(changes if world.rank == 1 else {})))
    with world.make() as buffer:  # nothing is left in the way
        Round(world, buffer, oracle.make_case(1, [2, 2]), "direct").run()
    return Outcome(world.rank, outcome.kind, None, outcome.error, outcome.message)


@pytest.mark.parametrize("changes,words", MISMATCHES, ids=lambda v: "-".join(v))
def test_different_arguments_raise_on_every_rank(
    ranks: Any, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    for outcome in ranks(2).run(mismatched, changes):
        assert outcome.error == "EpConfigMismatch", outcome
        assert all(word in outcome.message for word in words), outcome.message
        assert "rank 0" in outcome.message and "rank 1" in outcome.message


def test_wrong_arguments_of_one_rank_raise_on_every_rank(ranks: Any) -> None:
    own, told = reversed(ranks(2).run(mismatched, {"top_k": 33}))
    assert own.error == told.error == "ValueError"
    assert "top_k=33" in own.message and "1..32" in own.message
    assert told.message.startswith("rank 1: ") and own.message in told.message


def hints(world: World) -> None:
    from ep_backend.buffer import EpBuffer

    few = {m: 5 for m in modes(world.fabric)}
    for changes in (
        {},
        {"lanes": 1},
        {"gpus_per_node": 1},
        {"low_latency_form": "per_expert"},
        {"max_tokens": {"direct": 3}},
        {"max_tokens": {**few, "low_latency": 11}, "hidden": 1024},
    ):
        arguments = world.arguments(**changes)
        hint = EpBuffer.size_hint(world.size, **arguments)
        with world.make(**changes) as buffer:
            assert buffer.allocated_bytes == hint["total"], changes
            text = buffer.describe()
        assert str(hint["total"]) in text
        for mode, tokens in arguments["max_tokens"].items():
            line = f"{mode}: {tokens} tokens a rank, {tokens * world.size} in total"
            assert line in text


def test_size_hint_is_what_is_allocated(ranks: Any, fabric: str) -> None:
    ranks(2, fabric).run(hints)


def mapped_bytes(world: World) -> tuple[int, int]:
    """What the kernel says the heap takes in this process, and the hint for all ranks."""
    with world.make() as buffer:
        total = 0
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "ep_backend" in line and "memfd" in line:
                low, high = (int(v, 16) for v in line.split()[0].split("-"))
                total += high - low
        return total, buffer.allocated_bytes * world.size


def test_every_rank_maps_exactly_the_heaps(ranks: Any) -> None:
    pool = ranks(2)
    pool.close()  # buffers of other tests are mapped too
    for mapped, allocated in pool.run(mapped_bytes):
        page = os.sysconf("SC_PAGE_SIZE")
        assert allocated <= mapped < allocated + 2 * page


def far_away(world: World) -> None:
    """Lane 1 lies past 4 GiB of a heap that is mostly untouched."""
    with world.make(
        hidden=4096, top_k=1, max_tokens={"direct": 300_000, "low_latency": 8}, payloads=("bf16",)
    ) as buffer:
        assert buffer.allocated_bytes > 8 << 30
        for lane in (0, 1, 0):
            case = oracle.make_case(lane, [9], hidden=4096, top_k=1)
            Round(world, buffer, case, "direct", lane=lane).run()


def test_offsets_past_4_gib(ranks: Any) -> None:
    free = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0])
    if free < 10 << 20:
        pytest.skip(
            f"a heap of 9 GiB is refused with {free >> 20} GiB free, though little of it is touched"
        )
    ranks(1).run(far_away)


def too_much(world: World) -> tuple[str, str]:
    outcome = attempt(lambda: world.make(max_tokens={"direct": 1 << 22}, hidden=65536))
    with world.make() as buffer:
        Round(world, buffer, oracle.make_case(1, [2, 2]), "direct").run()
    return outcome.error, outcome.message


def test_too_much_memory_names_asked_and_free(ranks: Any) -> None:
    for error, message in ranks(2).run(too_much):
        assert error == "EpError" and "free" in message and "size_hint" in message
        numbers = [int(word) for word in message.split() if word.isdigit()]
        assert any(n > 1 << 40 for n in numbers) and any(1 << 25 < n < 1 << 45 for n in numbers)


def transports(world: World) -> str:
    with world.make(gpus_per_node=2) as buffer:
        text: str = buffer.describe()
        return text


def test_describe_names_the_transport_to_each_peer(ranks: Any) -> None:
    text = ranks(4).run(transports)[1]
    for line in ("local: ranks 1", "scale_up: ranks 0", "scale_out: ranks 2, 3"):
        assert line in text.splitlines()


def resources() -> tuple[int, int]:
    """Open files, resident KiB."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0])
    return len(os.listdir("/proc/self/fd")), resident


def many_buffers(world: World) -> tuple[int, int]:
    def one(n: int) -> None:
        with world.make(max_tokens=dict.fromkeys(modes(world.fabric), 256)) as buffer:
            for mode in modes(world.fabric):
                Round(world, buffer, oracle.make_case(n, [256, 256]), mode).run()

    one(0)
    one(1)
    before = resources()
    for n in range(20):
        one(n)
    after = resources()
    return after[0] - before[0], after[1] - before[1]


def test_twenty_buffers_leave_no_growth(ranks: Any, fabric: str) -> None:
    for files, kib in ranks(2, fabric).run(many_buffers, timeout=240):
        assert files <= 0, f"{files} more open files"
        if fabric != "emulated":  # whose threads' stacks stay
            assert kib < 16 << 10, f"{kib} KiB more; one heap is larger than that"


def several(world: World) -> None:
    """Buffers of one process do not see each other."""
    one, two = world.make(), world.make(hidden=128, top_k=2)
    for n in range(4):
        for mode in modes(world.fabric):
            a = Round(world, one, oracle.make_case(n, [5, 1]), mode)
            case = oracle.make_case(n, [2, 8], hidden=128, top_k=2)
            b = Round(world, two, case, mode)
            a.dispatch()
            b.dispatch()
            for r in (a, b):
                r.receive()
            for r in (b, a):
                r.combine()
                r.collect()
    one.destroy()
    Round(world, two, oracle.make_case(1, [2, 8], hidden=128, top_k=2), "direct").run()
    two.destroy()


def test_several_buffers_in_one_process(ranks: Any, fabric: str) -> None:
    ranks(2, fabric).run(several)


def twice(world: World) -> tuple[str, str]:
    buffer = world.make()
    Round(world, buffer, oracle.make_case(1, [2, 2]), "direct").run()
    buffer.destroy()
    started = time.monotonic()
    buffer.destroy()
    assert time.monotonic() - started < 0.1
    after = attempt(lambda: Round(world, buffer, oracle.make_case(1, [2, 2]), "direct").run())
    return after.error, after.message


def test_destroy_twice(ranks: Any, fabric: str) -> None:
    for error, message in ranks(2, fabric).run(twice):
        assert error == "EpFailed" and "destroyed" in message


def without_peer(world: World, victim: int) -> float:
    buffer = world.make(timeout_s=2)
    Round(world, buffer, oracle.make_case(1, [2, 2]), "direct").run()
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    buffer.destroy()
    return time.monotonic() - started


@pytest.mark.parametrize("victim", [0, 1])
def test_destroy_with_a_dead_peer(ranks: Any, victim: int) -> None:
    found = ranks(2).outcomes(without_peer, victim)
    survivor = found[1 - victim]
    assert found[victim].kind == "dead" and survivor.kind == "ok", str(survivor)
    assert survivor.value < 3


def without_group(world: World) -> float:
    import torch.distributed as dist

    buffer = world.make(timeout_s=2)
    Round(world, buffer, oracle.make_case(1, [2, 2]), "direct").run()
    dist.destroy_process_group()
    started = time.monotonic()
    buffer.destroy()
    return time.monotonic() - started


def test_destroy_after_the_process_group(ranks: Any) -> None:
    pool = ranks(2)
    assert all(seconds < 3 for seconds in pool.run(without_group))
    pool.close()  # its workers have no group any more


def forgotten(world: World) -> None:
    """No destroy at all: the interpreter's exit must not hang or complain."""
    buffer = world.make()
    Round(world, buffer, oracle.make_case(1, [2, 2]), "direct").run()
    world.buffers["forgotten"] = buffer
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_worker_can_be_ended_with_a_live_buffer(ranks: Any) -> None:
    for outcome in ranks(2).outcomes(forgotten):
        assert outcome.kind == "dead" and "-15" in outcome.message


def subgroup(world: World) -> Any:
    """A buffer over ranks 3 and 1 of four, as engines make them; the others have their own."""
    import torch.distributed as dist

    from ep_backend.buffer import EpBuffer

    halves = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    mine = halves[0] if world.rank in (1, 3) else halves[1]
    part = World(world.rank // 2, 2, world.fabric, mine, world.device)
    with EpBuffer(mine, **part.arguments()) as buffer:
        assert buffer.rank == part.rank and buffer.num_ranks == 2
        for seed in range(3):
            case = oracle.make_case(10 * seed + world.rank % 2, [5, 9])
            for mode in modes(world.fabric):
                Round(part, buffer, case, mode).run()
    for group in halves:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)


def test_buffers_of_two_subgroups(ranks: Any) -> None:
    ranks(4).run(subgroup)


def test_errors_survive_pickling() -> None:
    """Engines send a worker's exceptions between processes."""
    record = WaitRecord("dispatch", "direct", 1, 7, 0, 3, (7, 0), (6, 2))
    error = EpTimeout(record, 2.0)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, EpTimeout) and again.record == record and str(again) == str(error)
