"""Construction, agreement, memory and the end of a buffer."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_backend import layout
from ep_backend.errors import EpError, EpTimeout, WaitRecord
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
def test_different_arguments_raise_on_every_rank(ranks: Any, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    for outcome in ranks(2).run(mismatched, changes):
        assert outcome.error == "EpConfigMismatch", outcome
        assert all(word in outcome.message for word in words), outcome.message
        assert "rank 0" in outcome.message and "rank 1" in outcome.message


def test_wrong_arguments_of_one_rank_raise_on_every_rank(ranks: Any) -> None:
    own, told = reversed(ranks(2).run(mismatched, {"top_k": 33}))
    assert own.error == told.error == "ValueError"
    assert "top_k=33" in own.message and "1..32" in own.message
    assert told.message.startswith("rank 1: ") and own.message in told.message


@pytest.mark.parametrize("changes", [{"hidden": "256"}, {"timeout_s": None}, {"max_tokens": 12}], ids=str)
def test_a_wrong_type_on_one_rank_raises_on_every_rank(ranks: Any, changes: dict[str, Any]) -> None:
    own, told = reversed(ranks(2).run(mismatched, changes))
    assert own.error == told.error == "TypeError"
    (name, value), *_ = changes.items()
    assert own.message.startswith(f"{name}={value!r}")
    assert told.message == f"rank 1: {own.message}"


def wrong_alone(world: World) -> Outcome:
    import torch.distributed as dist

    outcome = attempt(lambda: world.make(timeout_s=0.2, top_k=33)) if world.rank else Outcome(0, "ok")
    dist.barrier()
    world.make().destroy()
    return outcome


def test_a_rank_alone_is_told_its_own_wrong_argument(ranks: Any) -> None:
    outcome = ranks(2).run(wrong_alone)[1]
    assert outcome.error == "ValueError" and "top_k=33" in outcome.message
    assert "waited 0.2 s for rank 0" in outcome.detail


def rebuilt(world: World, late: int, seconds: float) -> int:
    """As a caller does it: try until all ranks are there. The tries."""
    import torch.distributed as dist

    dist.barrier()
    if world.rank == late:
        time.sleep(seconds)
    for tries in range(1, 20):
        try:
            buffer = world.make(timeout_s=0.4)
        except EpError as e:
            assert "'here'" in str(e) and f"rank {late}" in str(e), e
            continue
        with buffer:
            Round(world, buffer, oracle.make_case(1, [2] * world.size), "direct").run()
        return tries
    raise AssertionError("the ranks did not meet again")


@pytest.mark.parametrize("late", [0, 2])
def test_ranks_that_retry_meet_a_late_one(ranks: Any, late: int) -> None:
    tries = ranks(3).run(rebuilt, late, 1.0)
    assert tries.pop(late) == 1
    assert all(n == 3 for n in tries), tries


def alone(world: World, uneven: int) -> Outcome:
    """Rank 1 is alone some times; then rank 0 is, which must not take rank 1's posts for its presence."""
    import torch.distributed as dist

    dist.barrier()
    outcome = Outcome(world.rank, "ok")
    if world.rank == 1:
        for _ in range(uneven):
            outcome = attempt(lambda: world.make(timeout_s=0.2))
    dist.barrier()
    if world.rank == 0:
        outcome = attempt(lambda: world.make(timeout_s=0.2))
    dist.barrier()
    with world.make() as buffer:
        Round(world, buffer, oracle.make_case(1, [2, 2]), "direct").run()
    return outcome


@pytest.mark.parametrize("uneven", [1, 2, 3])
def test_lone_constructors_do_not_part_the_ranks(ranks: Any, uneven: int) -> None:
    for rank, outcome in enumerate(ranks(2).run(alone, uneven)):
        assert outcome.error == "EpError"
        assert f"rank {rank} waited 0.2 s for rank {1 - rank} at 'here'" in outcome.message


def gives_up(world: World, after: int) -> tuple[Outcome, float]:
    """Rank 1 leaves after some exchanges of one of two groups' meetings; then all meet in both."""
    import torch.distributed as dist

    from ep_backend.fabric.meeting import Meeting

    one, two = Meeting(world.group), Meeting(dist.new_group([0, 1]))

    def first() -> None:
        with one.together(5):
            for step in range(3):
                if world.rank == 1 and step == after:
                    raise ValueError("gave up")
                assert one.exchange(f"step {step}", ("old", world.rank)) == [("old", 0), ("old", 1)]

    started = time.monotonic()
    outcome = attempt(first)
    took = time.monotonic() - started
    for meeting in (two, one, two, one):
        with meeting.together(5):
            for step in range(3):
                assert meeting.exchange(f"step {step}", world.rank) == [0, 1]
    return outcome, took


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_rank_that_gives_up_is_waited_for_no_longer(ranks: Any, after: int) -> None:
    (told, took), (own, _) = ranks(2).run(gives_up, after)
    assert own.error == "ValueError" and told.error == "EpError"
    assert f"rank 0 waits at 'step {after}' for rank 1, which gave up" in told.message
    assert took < 2, "the timeout is 5 s"


def two_threads(world: World) -> Outcome:
    import threading

    import torch.distributed as dist

    from ep_backend.fabric.meeting import Meeting

    entered, end = threading.Event(), threading.Event()

    def hold() -> None:
        with Meeting(world.group).together(5):
            entered.set()
            end.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(5)
    outcome = attempt(lambda: world.make(timeout_s=0.2))
    end.set()
    thread.join()
    dist.barrier()
    world.make().destroy()
    return outcome


def test_threads_of_one_group_take_turns(ranks: Any) -> None:
    for outcome in ranks(2).run(two_threads):
        assert outcome.error == "EpError" and "0.2 s for another thread" in outcome.message


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
        usual = {"payloads": ("bf16",), "rail": "auto"}  # of every fabric
        assert EpBuffer.size_hint(world.size, **arguments | usual | {"fabric": None}) == EpBuffer.size_hint(
            world.size, **arguments | usual
        )
        with world.make(**changes) as buffer:
            assert buffer.allocated_bytes == hint["total"], changes
            text = buffer.describe()
        assert str(hint["total"]) in text
        for mode, tokens in arguments["max_tokens"].items():
            line = f"{mode}: {tokens} tokens a rank, {tokens * world.size} in total"
            assert line in text


def test_size_hint_is_what_is_allocated(ranks: Any, fabric: str) -> None:
    ranks(2, fabric).run(hints)


def wide(world: World, mode: str) -> dict[int, int]:
    """Bytes by max_tokens in the shape of DeepSeek-V3: as hinted, as asked of the allocator, and there to the last one."""
    found = {}
    for most in (4096, 8192):
        arguments = {"hidden": 7168, "num_experts": 256, "top_k": 8, "lanes": 1, "max_tokens": {mode: most}}
        arguments |= {"gpus_per_node": 1, "ring_slots": 256, "payloads": ("bf16", "fp8")}
        with world.make(**arguments) as buffer:
            heap = buffer._fabric._heap
            if world.device.type == "cuda":
                from ep_backend.fabric.nvshmem.world import check, driver

                size = heap.size
                for base in heap.peers:
                    check(driver().cuMemcpy(base + size - 8, heap.base + size - 8, 8))
            else:
                size = getattr(heap, "_heap", heap).bytes[world.rank].nbytes
            hint = buffer.size_hint(world.size, **world.arguments(**arguments))
            assert buffer.allocated_bytes == size == hint["total"], (buffer.allocated_bytes, size, hint)
            found[most] = size
    return found


@pytest.mark.parametrize("mode", ["normal", "direct", "low_latency", "hybrid"])
def test_memory_of_each_mode(ranks: Any, fabric: str, mode: str) -> None:
    (found, other) = ranks(2, fabric).run(wide, mode)
    assert found == other
    if mode == "normal":
        assert found[4096] == found[8192] < 32 << 20, "rings do not depend on the tokens"
    else:
        assert 1.9 < found[8192] / found[4096] < 2.0, "slots do, control words do not"


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


def far_away(world: World) -> int:
    """Few tokens. Lane 1 lies past 4 GiB of a heap that is mostly untouched, expert 1's masked rows past 2 GiB of theirs."""
    most = 152_000 // world.size
    shape: dict[str, Any] = {"experts": 2 * world.size, "top_k": 2, "hidden": 7168}
    with world.make(
        **{"hidden": 7168, "num_experts": 2 * world.size, "top_k": 2, "gpus_per_node": 1, "payloads": ("bf16",)},
        max_tokens={"normal": 9, "direct": most, "low_latency": most, "hybrid": most // 2},
        ring_slots=most // 2,
    ) as buffer:
        assert layout.lane_offset(buffer.config.shape, 1) > 1 << 32
        for lane in (1, 0, 1):
            for n, mode in enumerate(modes(world.fabric)):
                case = oracle.make_case(n, [9, 4][: world.size], **shape)
                r = Round(world, buffer, case, mode, lane=lane)
                r.dispatch()
                r.receive()
                # Experts are the identity: an answer of their full shape is too much for a CPU.
                y = r.got.rows
                if r.layout == "compact":
                    y = y * r.got.topk_weights.sum(1, keepdim=True).to(y.dtype)
                out = buffer.combine(y, r.got.handle).float().cpu()
                want = case.x[world.rank] * case.weights[world.rank].sum(1, keepdim=True)
                torch.testing.assert_close(out, want, rtol=0.02, atol=0.02, msg=f"{r}")
        return int(buffer.allocated_bytes)


def test_offsets_past_4_gib(ranks: Any, fabric: str) -> None:
    free = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0])
    if fabric != "nvshmem" and free < 10 << 20:
        pytest.skip(f"a heap of 9 GiB is refused with {free >> 20} GiB free, though little of it is touched")
    size = 2 if fabric == "nvshmem" else 1
    assert all(n > 8 << 30 for n in ranks(size, fabric).run(far_away, timeout=120))


def too_much(world: World) -> tuple[str, str]:
    world.buffer()
    outcome = attempt(lambda: world.make(max_tokens={"direct": 1 << 23}, hidden=8192))
    with world.make() as buffer:
        Round(world, buffer, oracle.make_case(1, [2, 2]), "direct").run()
    return outcome.error, outcome.message


def test_too_much_memory_names_asked_and_free(ranks: Any, fabric: str) -> None:
    for error, message in ranks(2, fabric).run(too_much):
        assert error == "EpError" and "free" in message and "lower max_tokens" in message.lower()
        numbers = [int(digits) for digits in re.findall(r"\d+", message)]
        assert any(n > 1 << 38 for n in numbers) and any(1 << 25 < n < 1 << 38 for n in numbers)


def beyond_a_limit(world: World, limit: str) -> Outcome:
    """Rank 1 may not take or map what the others may."""
    import resource

    world.make().destroy()  # what is imported and connected once is, now
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    lowest_free = os.dup(0)  # the only number below the limit, whatever is open above
    os.close(lowest_free)
    # Threads have room, two heaps have not.
    most = {"RLIMIT_FSIZE": 4096, "RLIMIT_AS": mapped + (400 << 20), "RLIMIT_NOFILE": lowest_free + 1}
    which = getattr(resource, limit)
    before = resource.getrlimit(which)
    if world.rank == 1:
        resource.setrlimit(which, (most[limit], before[1]))
    try:
        outcome = attempt(lambda: world.make(max_tokens={"direct": 100_000}, timeout_s=10.0))
    finally:
        resource.setrlimit(which, before)
    world.make().destroy()
    return outcome


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("RLIMIT_FSIZE", "File too large"),
        ("RLIMIT_AS", "Cannot allocate memory"),
        ("RLIMIT_NOFILE", "Too many open files"),
    ],
)
def test_a_limit_of_the_process_is_told_by_every_rank(ranks: Any, limit: str, reason: str) -> None:
    peer, own = ranks(2).run(beyond_a_limit, limit)
    assert own.error == "EpError" and "rank 1 cannot take or map" in own.message, own
    assert reason in own.message and "`ulimit -a`" in own.message, own
    assert peer.error == "EpError" and "rank 1" in peer.message and "namespace" not in peer.message, peer


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
    bases = set()

    def one(n: int) -> None:
        with world.make(max_tokens=dict.fromkeys(modes(world.fabric), 256)) as buffer:
            if world.device.type == "cuda":
                bases.add(buffer._fabric._heap.base)
            for mode in modes(world.fabric):
                Round(world, buffer, oracle.make_case(n, [256, 256]), mode).run()

    one(0)
    one(1)
    before = resources()
    for n in range(20):
        one(n)
    after = resources()
    assert len(bases) <= 2, "symmetric memory was not given back"
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


def given_up(world: World, mode: str) -> bool:
    """Engines keep the handle alone while their experts work."""
    with world.make() as buffer:
        one = Round(world, buffer, oracle.make_case(1, [4, 5]), mode, hook=mode != "normal")
        one.dispatch()
        one.receive()
        one.y = oracle.run_experts(one.case, world.rank, one.got, layout=one.layout, payload=one.payload)
        handle, rows = one.got.handle, weakref.ref(one.got.rows)
        one.got = None
        gone = rows() is None
        one.out = buffer.combine(one.y, handle)
        one.collect()
        return gone


@pytest.mark.parametrize("mode", ["normal", "direct", "low_latency", "hybrid"])
def test_rows_are_the_caller_s_alone(ranks: Any, fabric: str, mode: str) -> None:
    assert ranks(2, fabric).run(given_up, mode) == [True, True]


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


def forked(world: World) -> list[str]:
    """What a child of rank 0 is told while the parents' rounds go on."""
    with world.make() as buffer:
        Round(world, buffer, oracle.make_case(1, [2, 2]), "direct").run()
        said = []
        if world.rank == 0:
            here, there = os.pipe()
            child = os.fork()
            if child == 0:
                call = Round(world, buffer, oracle.make_case(2, [2, 2]), "direct")
                outcome = attempt(call.dispatch)
                buffer.abort("of the child")
                buffer.destroy()
                os.write(there, f"{outcome.error} {outcome.message}".encode())
                os._exit(0)
            os.waitpid(child, 0)
            said.append(os.read(here, 4096).decode())
        Round(world, buffer, oracle.make_case(3, [2, 2]), "direct").run()
        return said


def test_a_forked_child_cannot_break_the_parent_s_buffer(ranks: Any) -> None:
    (said,), _ = ranks(2).run(forked)
    assert said.startswith("EpFailed") and "is a fork of the buffer's process" in said


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
