"""Split phases, lanes and handles: what may be in flight together, and what is said when it may not."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.core import oracle
from tests.core.pool import World, attempt, modes
from tests.core.rounds import Round

HOOKED = ("direct", "low_latency", "hybrid")


def said(fn: Any) -> tuple[str, str]:
    outcome = attempt(fn)
    return outcome.error, outcome.message


def two_micro_batches(world: World, mode: str, hook: bool, rounds: int) -> None:
    """a.dispatch, b.dispatch, b.combine, a.combine; with hooks every receive phase comes as late as it may."""
    buffer = world.buffer(gpus_per_node=2 if world.size == 4 else None)
    before = buffer.stats()["lane_rounds"]
    for n in range(rounds):
        tokens = [(5 * r + n) % 13 for r in range(world.size)]
        a = Round(world, buffer, oracle.make_case(2 * n, tokens), mode, lane=0, hook=hook)
        b = Round(world, buffer, oracle.make_case(2 * n + 1, tokens[::-1]), mode, lane=1, hook=hook)
        a.dispatch()
        b.dispatch()
        b.receive()
        a.receive()
        b.combine()
        a.combine()
        a.collect()
        b.collect()
    assert [after - was for was, after in zip(before, buffer.stats()["lane_rounds"], strict=True)] == [rounds, rounds]


@pytest.mark.parametrize("mode,hook", [("normal", False), *itertools.product(HOOKED, (False, True))])
def test_two_alternating_micro_batches(ranks: Any, fabric: str, mode: str, hook: bool) -> None:
    size = 4 if fabric == "host" else 2
    ranks(size, fabric).run(two_micro_batches, mode, hook, 10)


def in_its_own_order(world: World, mode: str) -> None:
    """Odd ranks take lane 0 first, the others lane 1, in every phase."""
    buffer = world.buffer(gpus_per_node=2)
    for n in range(5):
        cases = [oracle.make_case(2 * n + lane, [(5 * r + n) % 13 for r in range(world.size)]) for lane in (0, 1)]
        lanes = [Round(world, buffer, case, mode, lane=lane, hook=True) for lane, case in enumerate(cases)]
        for phase in (Round.dispatch, Round.receive, Round.combine, Round.collect):
            for one in lanes if world.rank % 2 else lanes[::-1]:
                phase(one)


@pytest.mark.parametrize("mode", HOOKED)
def test_ranks_may_drive_lanes_in_different_orders(ranks: Any, fabric: str, mode: str) -> None:
    ranks(4, fabric).run(in_its_own_order, mode)


def rules(world: World, mode: str) -> dict[str, Any]:
    buffer = world.buffer()
    case = oracle.make_case(1, [6, 3])
    found: dict[str, Any] = {}
    r = Round(world, buffer, case, mode, hook=True)
    r.dispatch()
    found["read early"] = said(lambda: r.got.rows)
    found["counts early"] = said(lambda: r.got.counts)
    found["dispatch without hook"] = said(lambda: Round(world, buffer, case, mode).dispatch())
    y = torch.zeros(1, 256, dtype=torch.bfloat16, device=world.device)
    found["combine without hook"] = said(lambda: buffer.combine(y, r.got.handle))
    r.receive()
    found["hook twice"] = said(r.got.hook)
    found["dispatch before combine"] = said(lambda: Round(world, buffer, case, mode).dispatch())
    r.combine()
    found["combine twice"] = said(lambda: buffer.combine(r.y, r.got.handle))
    found["dispatch before the combine hook"] = said(lambda: Round(world, buffer, case, mode).dispatch())
    r.collect()
    found["combine hook twice"] = said(r._finish)
    found["handle of an answered dispatch"] = said(lambda: buffer.combine(r.y, r.got.handle))
    Round(world, buffer, case, mode).run()
    return found


@pytest.mark.parametrize("mode", HOOKED)
def test_rules_of_hooks(ranks: Any, fabric: str, mode: str) -> None:
    for found in ranks(2, fabric).run(rules, mode):
        assert {error for error, _ in found.values()} == {"RuntimeError"}, found
        for name in ("read early", "counts early"):
            assert "hook()" in found[name][1]
        text = found["dispatch without hook"][1]
        assert "dispatch hook" in text and mode in text and "lane 0" in text and "epoch" in text
        assert "dispatch hook" in found["combine without hook"][1]
        assert "already run" in found["hook twice"][1]
        assert "combine pending" in found["dispatch before combine"][1]
        assert "combine hook" in found["dispatch before the combine hook"][1]
        assert "combine hook" in found["combine twice"][1]
        assert "already run" in found["combine hook twice"][1]
        assert "nothing pending" in found["handle of an answered dispatch"][1]


def third_operation(world: World, mode: str) -> tuple[str, str]:
    buffer = world.buffer()
    case = oracle.make_case(1, [6, 3])
    a = Round(world, buffer, case, mode, lane=0)
    b = Round(world, buffer, case, mode, lane=1)
    for r in (a, b):
        r.dispatch()
        r.receive()
    third = said(lambda: Round(world, buffer, case, mode).dispatch())
    for r in (a, b):
        r.combine()
        r.collect()
    return third


@pytest.mark.parametrize("mode", ["normal", *HOOKED])
def test_a_third_operation_is_refused_and_names_the_pending(ranks: Any, fabric: str, mode: str) -> None:
    for error, text in ranks(2, fabric).run(third_operation, mode):
        assert error == "RuntimeError"
        assert f"combine of {mode} in lane 0" in text and f"combine of {mode} in lane 1" in text


def in_fresh_threads(world: World, mode: str) -> str | None:
    """Each hook in a thread of its own, which has used nothing of CUDA; at last one gives up."""
    buffer = world.make()
    r = Round(world, buffer, oracle.make_case(1, [6, 3]), mode, hook=True)
    raised: list[BaseException] = []

    def run(step: Callable[[], None]) -> None:
        def within() -> None:
            try:
                step()
            except BaseException as e:
                raised.append(e)

        thread = threading.Thread(target=within)
        thread.start()
        thread.join()
        assert not raised, raised

    r.dispatch()
    r.got.hook = functools.partial(run, r.got.hook)
    r.receive()
    r.combine()
    r._finish = functools.partial(run, r._finish)
    r.collect()
    dist.barrier(world.group)
    if world.rank == 0:
        run(lambda: buffer.abort("enough"))
        world.settle()
    dist.barrier(world.group)
    attempt(lambda: Round(world, buffer, r.case, mode).run())
    world.settle()  # kernels end at once, and say why to the next call
    why = buffer.failure()
    buffer.destroy()
    return why


@pytest.mark.parametrize("mode", HOOKED)
def test_hooks_and_abort_from_threads_of_their_own(ranks: Any, fabric: str, mode: str) -> None:
    for why in ranks(2, fabric).run(in_fresh_threads, mode):
        assert why is not None and ("enough" in why or "rank 0 gave up" in why)


def normal_hook(world: World) -> list[tuple[str, str]]:
    buffer = world.buffer()
    case = oracle.make_case(1, [6, 3])
    found = [said(lambda: Round(world, buffer, case, "normal", hook=True).dispatch())]
    r = Round(world, buffer, case, "normal")
    r.dispatch()
    r.receive()
    y = oracle.run_experts(case, world.rank, r.got, layout="compact", payload="bf16")
    found.append(said(lambda: buffer.combine(y, r.got.handle, return_hook=True)))
    r.combine()
    r.collect()
    return found


def test_normal_mode_refuses_hooks(ranks: Any) -> None:
    for dispatch, combine in ranks(2).run(normal_hook):
        for error, text in (dispatch, combine):
            assert error == "ValueError" and "normal" in text and "async_finish" in text


def asynchronous(world: World) -> None:
    buffer = world.buffer()
    case = oracle.make_case(1, [6, 3])
    for mode in modes(world.fabric):
        x, _ = oracle.given(case.x[world.rank].to(world.device), "bf16")
        got = buffer.dispatch(
            x,
            case.ids[world.rank].to(world.device),
            case.weights[world.rank].to(world.device),
            mode=mode,
            async_finish=True,
        )
        if got.event is not None:
            got.event.synchronize()
        r = Round(world, buffer, case, mode)
        y = oracle.run_experts(case, world.rank, got, layout=r.layout, payload="bf16")
        r.out, event = buffer.combine(y, got.handle, async_finish=True)
        if event is not None:
            event.synchronize()
        r.collect()


def test_async_finish(ranks: Any, fabric: str) -> None:
    ranks(2, fabric).run(asynchronous)


def cached_handle(world: World, mode: str) -> list[tuple[str, str]]:
    """The routing of an earlier dispatch again, with other rows."""
    buffer = world.buffer(gpus_per_node=2)
    tokens = [7, 0, 11, 2]
    first = oracle.make_case(1, tokens, kind="holes")
    done = Round(world, buffer, first, mode).run()
    for seed in range(2, 5):
        again = oracle.make_case(seed, tokens)
        again.ids, again.weights = first.ids, first.weights
        Round(world, buffer, again, mode, handle=done.got.handle).run()
        Round(world, buffer, oracle.make_case(seed, tokens[::-1]), mode).run()
    ids, weights = (t[world.rank].to(world.device) for t in (first.ids, first.weights))
    both = {"topk_ids": ids, "topk_weights": weights}
    x = first.x[world.rank].bfloat16().to(world.device)
    handle = done.got.handle
    other = world.buffer()
    return [
        said(lambda: buffer.dispatch(x, **both, handle=handle, mode=mode)),
        said(lambda: other.dispatch(x, handle=handle, mode=mode)),
        said(lambda: other.combine(done.y, handle)),
        said(lambda: buffer.dispatch(x.new_zeros(len(x) + 1, x.shape[1]), handle=handle, mode=mode)),
    ]


@pytest.mark.parametrize("mode", ["normal", *HOOKED])
def test_a_handle_repeats_its_routing(ranks: Any, fabric: str, mode: str) -> None:
    for both, foreign, foreign_answer, other_size in ranks(4, fabric).run(cached_handle, mode):
        assert both[0] == "ValueError" and "handle" in both[1]
        for error, text in (foreign, foreign_answer):
            assert error == "ValueError" and "another buffer" in text
        assert other_size[0] == "ValueError" and "the handle's topk_ids has shape" in other_size[1]


def repeated_without_tokens(world: World) -> None:
    """A rank with nothing to send or receive still takes part in a repeated dispatch of normal mode."""
    buffer = world.buffer()
    case = oracle.make_case(1, [0, 5, 0])
    for ids in case.ids:
        ids[:] = case.local  # an expert of rank 1
    first = Round(world, buffer, case, "normal").run()
    for late in range(world.size):
        if world.rank == late:
            time.sleep(0.2)
        before = time.monotonic()
        again = Round(world, buffer, case, "normal", handle=first.got.handle)
        again.dispatch()
        took = time.monotonic() - before
        assert took > 0.1 or late == world.rank, "dispatch returned before every rank had called it"
        again.receive()
        again.combine()
        again.collect()


def test_a_repeated_dispatch_waits_for_ranks_without_tokens(ranks: Any) -> None:
    ranks(3).run(repeated_without_tokens)


def repeated_from_the_last(world: World, mode: str) -> int:
    """Earlier calls whose rows are still there when each call repeats the routing of the one before it."""
    buffer = world.buffer()
    case = oracle.make_case(1, [5, 3])
    last, made = None, []
    for _ in range(5):
        last = Round(world, buffer, case, mode, handle=last).run().got
        made.append(weakref.ref(last.rows))
        last = last.handle
    gc.collect()
    return sum(t() is not None for t in made)


@pytest.mark.parametrize("mode", ["normal", *HOOKED])
def test_a_handle_keeps_its_routing_alone(ranks: Any, fabric: str, mode: str) -> None:
    assert ranks(2, fabric).run(repeated_from_the_last, mode) == [0, 0]


def answered_in_place(world: World, mode: str, hook: bool) -> None:
    buffer = world.buffer()
    r = Round(world, buffer, oracle.make_case(3, [9, 4]), mode, layout="compact", hook=hook)
    r.dispatch()
    r.receive()
    y = oracle.run_experts(r.case, world.rank, r.got, layout=r.layout, payload=r.payload)
    tokens = len(r.case.x[world.rank])
    both = torch.empty(max(len(y), tokens), y.shape[1], dtype=y.dtype, device=y.device)
    both[: len(y)] = y
    answer = buffer.combine(both[: len(y)], r.got.handle, out=both[:tokens], return_hook=hook)
    r.out, r._finish = answer if hook else (answer, None)
    r.collect()
    assert r.out is not None and r.out.data_ptr() == both.data_ptr()


@pytest.mark.parametrize("hook", [False, True], ids=["whole", "hooks"])
@pytest.mark.parametrize("mode", HOOKED)
def test_out_may_be_part_of_y(ranks: Any, fabric: str, mode: str, hook: bool) -> None:
    ranks(2, fabric).run(answered_in_place, mode, hook)


def phases_in_and_out_of_inference_mode(world: World, mode: str) -> None:
    buffer = world.buffer()
    for inside in itertools.product([False, True], repeat=4):
        r = Round(world, buffer, oracle.make_case(4, [9, 4]), mode, layout="compact", hook=mode in HOOKED)
        for here, phase in zip(inside, (r.dispatch, r.receive, r.combine, r.collect), strict=True):
            with torch.inference_mode(here):
                phase()
    for in_y in (False, True):
        r.dispatch()
        r.receive()
        with torch.inference_mode():
            y = oracle.run_experts(r.case, world.rank, r.got, layout=r.layout, payload=r.payload)
            tokens = len(r.case.x[world.rank])
            both = torch.empty(len(y) + tokens, y.shape[1], dtype=y.dtype, device=y.device)
            both[: len(y)] = y
        out = both[:tokens] if in_y else torch.empty_like(both[:tokens])
        answer = buffer.combine(both[: len(y)], r.got.handle, out=out, return_hook=r.split)
        r.out, r._finish = answer if r.split else (answer, None)
        r.collect()


@pytest.mark.parametrize("mode", modes("host"))
def test_phases_may_be_in_and_out_of_inference_mode(ranks: Any, fabric: str, mode: str) -> None:
    """torch lets nobody write outside of inference mode what was made in it, as `out` may have been."""
    ranks(2, fabric).run(phases_in_and_out_of_inference_mode, mode)
