"""Stopped, killed and disagreeing peers: an error with names, in time, on everyone, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_backend.errors import EpFailed
from tests.core import oracle
from tests.core.pool import Outcome, World, attempt
from tests.core.rounds import Round

MODES = ("normal", "direct", "low_latency", "hybrid")
SIZES = [(2, 2), (4, 2)]
WAIT_S = 2.0
SLACK_S = 8.0  # other processes may keep this machine busy; far below a hang


def timed(fn: Any) -> tuple[Outcome, float]:
    started = time.monotonic()
    outcome = attempt(fn)
    outcome.value = None
    return outcome, time.monotonic() - started


def lose_patience(buffer: Any) -> None:
    """From here on waits are short: before, a busy machine may need longer than a test wants to wait for a dead peer."""
    object.__setattr__(buffer.config, "timeout_s", WAIT_S)


def until_stopped(world: World, mode: str, gpus: int, victim: int, when: str) -> tuple[Outcome, float, str | None, float]:
    """A few rounds in lane 1, then the victim stops before its ``when``."""
    buffer = world.make(gpus_per_node=gpus)
    for n in range(3):
        Round(world, buffer, oracle.make_case(n, [4] * world.size), mode, lane=1).run()
    last = Round(world, buffer, oracle.make_case(9, [4] * world.size), mode, lane=1)
    if when == "combine":
        last.dispatch()
        last.receive()
    lose_patience(buffer)
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)

    def go_on() -> None:
        if when == "dispatch":
            last.dispatch()
            last.receive()
        last.combine()
        last.collect()

    outcome, took = timed(go_on)
    reason = buffer.failure()
    _, destroying = timed(buffer.destroy)
    return outcome, took, reason, destroying


STOPPED = [(2, 2, mode, "dispatch", 0) for mode in MODES]  # rank 0 also serves the group's store
STOPPED += [(4, 2, mode, when, 1) for mode in MODES for when in ("dispatch", "combine")]


@pytest.mark.slow
@pytest.mark.parametrize("size,gpus,mode,when,victim", STOPPED)
def test_a_stopped_peer_ends_the_wait_of_the_others(
    ranks: Any, size: int, gpus: int, mode: str, when: str, victim: int
) -> None:
    found = ranks(size).outcomes(until_stopped, mode, gpus, victim, when, stopped=(victim,))
    assert found[victim].kind == "ok", str(found[victim])
    late, took, _, _ = found[victim].value
    assert late.error == "EpFailed", f"the others gave up while it was stopped: {late}"
    others = [o for o in found if o.rank != victim]
    timeouts = 0
    for o in others:
        assert o.kind == "ok", str(o)
        outcome, took, reason, _ = o.value
        assert outcome.error in ("EpTimeout", "EpFailed"), outcome
        assert took < WAIT_S + SLACK_S, f"rank {o.rank} waited {took:.1f} s"
        assert reason, "a failed buffer says why"
        if outcome.error == "EpFailed":  # another rank's wait ended first
            assert "waited" in outcome.message
            continue
        timeouts += 1
        record = outcome.record
        assert record["op"] == when and record["mode"] == mode and record["lane"] == 1
        assert record["epoch"] == 4 and record["rank"] == o.rank
        assert record["expected"] != record["seen"]
        if size == 2:  # with relays a peer may be slow for want of another
            assert record["peer"] == victim
        for field, value in record.items():
            assert (f"{field}={value}" in outcome.message) or field == "op"
        assert f"{WAIT_S:g} s" in outcome.message and when in outcome.message
    assert timeouts, "nobody noticed on its own"


def mapped_files() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    # inode and path: all heaps have one name
    return sorted({m.group(1) for x in lines if (m := re.search(r"(\d+ +/(?:memfd:|dev/shm/).*)$", x))})


def until_killed(world: World, mode: str, victim: int) -> tuple[Outcome, float, float, list[str]]:
    before = set(mapped_files())
    buffer = world.make()
    mine = [name for name in mapped_files() if name not in before]
    Round(world, buffer, oracle.make_case(1, [4] * world.size), mode).run()
    lose_patience(buffer)
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    outcome, took = timed(lambda: Round(world, buffer, oracle.make_case(2, [4] * world.size), mode).run())
    _, destroying = timed(buffer.destroy)
    return outcome, took, destroying, mine


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_peer_leaves_nobody_hanging(ranks: Any, mode: str, victim: int) -> None:
    found = ranks(3).outcomes(until_killed, mode, victim)
    assert found[victim].kind == "dead" and "-9" in found[victim].message
    for o in (o for o in found if o.rank != victim):
        assert o.kind == "ok", str(o)
        outcome, took, destroying, files = o.value
        assert outcome.error in ("EpTimeout", "EpFailed"), outcome
        assert took < WAIT_S + SLACK_S and destroying < WAIT_S + SLACK_S
        assert files, "the heap is a mapped file"
        for name in files:
            path = name.split(maxsplit=1)[1]
            assert path.startswith("/memfd:") or not Path(path.split(" ")[0]).exists(), name


def gone_before(world: World) -> Outcome:
    if world.rank == 1:
        os._exit(0)
    outcome, took = timed(lambda: world.make(timeout_s=WAIT_S))
    assert took < WAIT_S + SLACK_S, took
    return outcome


def test_a_rank_that_leaves_before_the_rendezvous(ranks: Any) -> None:
    found = ranks(3).outcomes(gone_before)
    assert found[1].kind == "dead"
    for o in (found[0], found[2]):
        assert o.kind == "ok", str(o)
        assert o.value.error == "EpError" and "rank 1" in o.value.message, o.value


def aborting(world: World, mode: str) -> list[tuple[Outcome, float]]:
    """Rank 1 fails between dispatch and combine; everyone else waits in combine."""
    buffer = world.make()
    r = Round(world, buffer, oracle.make_case(1, [4] * world.size), mode)
    r.dispatch()
    r.receive()
    if world.rank == 1:
        time.sleep(0.2)
        buffer.abort("expert 3 is out of memory")

    def answer() -> None:
        r.combine()
        r.collect()

    found = [timed(answer), timed(r.dispatch)]
    found.append(timed(lambda: Round(world, buffer, r.case, mode, lane=1).dispatch()))
    assert buffer.failure() == buffer.stats()["failed"]
    buffer.destroy()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_abort_fails_the_buffer_on_all_ranks(ranks: Any, mode: str) -> None:
    for calls in ranks(3).run(aborting, mode):
        for outcome, took in calls:
            assert outcome.error == "EpFailed", outcome
            assert "rank 1: expert 3 is out of memory" in outcome.message
            assert took < SLACK_S
        assert "rebuilt" in calls[-1][0].message


def leaving(world: World, mode: str, pending: bool) -> Outcome:
    """Rank 1 destroys the buffer between a dispatch and its combine, or when the others go on to another round."""
    buffer = world.make(gpus_per_node=2)
    r = Round(world, buffer, oracle.make_case(1, [4] * world.size), mode)
    if pending:
        r.dispatch()
    else:
        r.run()
    torch.distributed.barrier(world.group)
    if world.rank == 1:
        buffer.destroy()
        return attempt(lambda: buffer.dispatch(r.x, mode=mode))

    def go_on() -> None:
        if not pending:
            r.dispatch()
        r.receive()
        r.combine()
        r.collect()

    outcome, took = timed(go_on)
    buffer.destroy()
    assert took < SLACK_S, f"{took:.1f} s of a timeout of 30"
    return outcome


@pytest.mark.parametrize("pending", [True, False], ids=["between dispatch and combine", "a round early"])
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_leaves(ranks: Any, mode: str, pending: bool) -> None:
    found = ranks(4).run(leaving, mode, pending)
    own = found.pop(1)
    assert own.error == "EpFailed" and "destroyed" in own.message
    where = f"combine: mode={mode}, lane=0, epoch=1" if pending else f"dispatch: mode={mode}, lane=0, epoch=2"
    for outcome in found:
        assert outcome.error == "EpFailed" and "rank 1 has destroyed the buffer" in outcome.message, outcome
        assert where in outcome.message, outcome


# rank 0's call, the others' call
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prefill or decode": ({"mode": "normal"}, {"mode": "low_latency"}),
    "one family": ({"mode": "direct"}, {"mode": "normal"}),
    "hybrid": ({"mode": "hybrid"}, {"mode": "direct", "layout": "masked"}),
    "same slots": (
        {"mode": "direct", "layout": "masked"},
        {"mode": "low_latency", "layout": "masked"},
    ),
    "layout": ({"mode": "direct"}, {"mode": "direct", "layout": "masked"}),
    "payload": ({"mode": "direct"}, {"mode": "direct", "payload": "fp8"}),
    "scale format": (
        {"mode": "low_latency", "payload": "fp8"},
        {"mode": "low_latency", "payload": "fp8_ue8m0"},
    ),
    "payload of normal": ({"mode": "normal", "payload": "fp32"}, {"mode": "normal"}),
}


def disagreeing(world: World, name: str, gpus: int, late: int) -> tuple[Outcome, float]:
    buffer = world.make(gpus_per_node=gpus)
    case = oracle.make_case(1, [4] * world.size)
    Round(world, buffer, case, "direct").run()
    if world.rank == late:
        time.sleep(0.3)
    wanted = CALLS[name][0 if world.rank == 0 else 1]

    def go() -> None:
        Round(world, buffer, case, **wanted).run()

    found = timed(go)
    buffer.destroy()
    return found


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("size,gpus", SIZES, ids=["1node", "2nodes"])
@pytest.mark.parametrize("name", CALLS)
def test_ranks_that_disagree_get_an_error_not_a_timeout(ranks: Any, name: str, size: int, gpus: int, late: int) -> None:
    for rank, (outcome, took) in enumerate(ranks(size).run(disagreeing, name, gpus, late)):
        assert outcome.kind == "error", f"rank {rank} noticed nothing"
        assert outcome.error in ("EpDisagree", "EpFailed"), outcome
        assert took < SLACK_S, f"rank {rank} took {took:.1f} s of a timeout of 30"
        assert "rank 0" in outcome.message, outcome.message
        for wanted in CALLS[name]:
            assert wanted["mode"] in outcome.message


def heard(buffer: Any, call: Round) -> tuple[Outcome, str, float]:
    """What became of a call whose host need not have waited for its kernels, why the buffer failed, and in how many seconds."""

    def steps() -> None:
        call.dispatch()
        buffer.combine(call.got.rows, call.got.handle)

    outcome, took = timed(steps)
    started = time.monotonic()
    while buffer.failure() is None and took + time.monotonic() - started < SLACK_S:
        time.sleep(0.01)
    return outcome, buffer.failure() or f"nothing: {outcome}", took + time.monotonic() - started


def more_than_a_rank_expects(world: World, mode: str, tokens: list[int]) -> tuple[Outcome, str]:
    """Rank 0 says that nobody sends more than 2 tokens, rank 1 sends more to it."""
    buffer = world.make()
    more = {"layout": "compact", "host_counts": False, "most_tokens": tokens[1] if world.rank else 2}
    case = oracle.make_case(1, tokens)
    outcome, reason, took = heard(buffer, Round(world, buffer, case, mode, **more))
    assert took < SLACK_S, reason
    buffer.destroy()
    return outcome, reason


# In the second, there would be room for what comes: rank 0 itself sends nothing.
@pytest.mark.parametrize("tokens,rows", [([2, 12], r"1\d"), ([0, 3], "3")], ids=["beyond the room", "within it"])
@pytest.mark.parametrize("mode", ["normal", "direct", "low_latency", "hybrid"])
def test_a_rank_that_expects_fewer_tokens_than_come(ranks: Any, fabric: str, mode: str, tokens: list[int], rows: str) -> None:
    (first, why), (second, told) = ranks(2, fabric).run(more_than_a_rank_expects, mode, tokens)
    assert re.search(rf"rank 1 sends {rows} rows to rank 0, whose most_tokens=2; give every rank the most", why)
    if fabric == "host":
        assert first.error == "EpDisagree" and second.error == "EpFailed", (first, second)
        assert first.message in why and first.message in second.message
    else:
        assert "rank 0 gave up" in told


def one_rank_refuses(world: World, mode: str, late: int, wrong: int, **arguments: Any) -> str:
    """What a rank is told when ``wrong`` refuses a call of all, and goes on to the next."""
    buffer = world.make(**arguments)
    Round(world, buffer, oracle.make_case(0, [3] * world.size), mode).run()
    torch.distributed.barrier(world.group)  # a rank that fails stops its peers' kernels, also in the round before
    if world.rank == late:
        time.sleep(0.3)
    tokens = [4] * world.size
    tokens[wrong] = 13
    call = Round(world, buffer, oracle.make_case(1, tokens), mode)
    if world.rank == wrong:
        assert attempt(call.dispatch).error == "ValueError"
        call = Round(world, buffer, oracle.make_case(2, [3] * world.size), mode)
    _, reason, took = heard(buffer, call)
    assert took < SLACK_S or (world.rank == wrong and "timeout_s" in arguments), reason
    buffer.destroy()
    with world.make() as buffer:
        Round(world, buffer, oracle.make_case(3, [3] * world.size), mode).run()
    return reason


# No rank maps another's heap, so that the one that refused hears nothing of its peer's failure.
ONLY_PUTS = {"gpus_per_node": 1, "rail": "put", "max_tokens": {"hybrid": 12}, "timeout_s": 8}


@pytest.mark.parametrize("late", [0, 1], ids=["peers wait", "the rank has gone on"])
@pytest.mark.parametrize(
    "mode,size,arguments",
    [*((mode, 2, {}) for mode in MODES), *((mode, 3, {"gpus_per_node": 1}) for mode in MODES), ("hybrid", 2, ONLY_PUTS)],
    ids=lambda value: str(value) if isinstance(value, (str, int)) else "-".join(map(str, value)),
)
def test_kernels_do_not_take_a_rank_s_next_call_for_the_one_that_it_refused(
    ranks: Any, kernels: str, mode: str, size: int, arguments: dict[str, Any], late: int
) -> None:
    wrong = 1 - late
    reasons = ranks(size, kernels).run(one_rank_refuses, mode, late, wrong, **arguments)
    assert any(f"rank {wrong} refused" in reason and "13 tokens exceed max_tokens=12" in reason for reason in reasons), reasons
    for rank, reason in enumerate(reasons):
        told = "refused" in reason or "gave up" in reason
        assert told or (rank == wrong and arguments is ONLY_PUTS and "waited 8 s" in reason), f"rank {rank}: {reason}"


def refused_without_a_store(world: World) -> Outcome:
    """Rank 1 refuses a call of all when the store, where it would say why, answers nobody."""
    buffer = world.make()
    call = Round(world, buffer, oracle.make_case(1, [3, 13]), "direct")
    if world.rank == 1:
        meeting = buffer._fabric._meeting
        store, meeting._store = meeting._store, None
        outcome = attempt(call.dispatch)
        meeting._store = store
    else:
        outcome = attempt(call.run)
    Round(world, buffer, oracle.make_case(2, [3, 3]), "direct").run()
    buffer.destroy()
    outcome.value = None
    return outcome


def test_a_refusal_reaches_peers_without_the_store(ranks: Any) -> None:
    told, own = ranks(2).run(refused_without_a_store)
    assert own.error == "ValueError" and "13 tokens exceed max_tokens=12" in own.message, own
    assert told.error == "EpRefused" and "the process group's store does not say why" in told.message, told


def half_with_a_handle(world: World) -> Outcome:
    """normal exchanges no counts when it repeats a routing, so either all ranks repeat it or none does."""
    buffer = world.make()
    case = oracle.make_case(1, [4, 4])
    first = Round(world, buffer, case, "normal").run()
    handle = first.got.handle if world.rank == 0 else None
    outcome, took = timed(lambda: Round(world, buffer, case, "normal", handle=handle).run())
    assert took < SLACK_S
    buffer.destroy()
    return outcome


def test_a_handle_on_some_ranks_only(ranks: Any) -> None:
    found = ranks(2).run(half_with_a_handle)
    assert {o.error for o in found} <= {"EpDisagree", "EpFailed"}, found
    assert any("with a handle" in o.message for o in found)


def different_handles(world: World) -> str:
    """Counts of one round in a call that others make with those of another: rows that nobody sends would be waited for."""
    buffer = world.make(gpus_per_node=2)
    handles = [
        Round(world, buffer, oracle.make_case(seed, [4] * world.size), "normal", lane=lane).run().got.handle
        for seed, lane in ((1, 0), (2, 1))
    ]
    x = torch.zeros(4, buffer.config.hidden, dtype=torch.bfloat16, device=world.device)
    outcome, took = timed(lambda: buffer.dispatch(x, mode="normal", handle=handles[world.rank == 1]))
    world.settle()
    assert took < SLACK_S and buffer.failure() is not None
    buffer.destroy()
    return outcome.message or str(buffer.failure())


def test_handles_of_different_rounds_are_told(ranks: Any, fabric: str) -> None:
    said = ranks(4, fabric).run(different_handles)
    told = [
        re.search(
            r"in dispatch of normal, lane 0, epoch 2, rank (.) repeats the dispatch of epoch 1 in lane (.) "
            r"and rank (.) that of epoch 1 in lane (.); give all ranks the handle of the same one",
            text,
        )
        for text in said
    ]
    assert any(told) and all(found or "gave up" in text for found, text in zip(told, said, strict=True)), said
    for found in filter(None, told):
        own, its_lane, peer, peers_lane = map(int, found.groups())
        assert (own == 1) != (peer == 1) and its_lane == (own == 1) and peers_lane == (peer == 1)


def raised_within(world: World) -> tuple[Outcome, float]:
    """The last rank leaves the buffer's block by an error of its own, between a dispatch and its combine."""

    def rounds() -> None:
        with world.make() as buffer:
            one = Round(world, buffer, oracle.make_case(0, [4] * world.size), "direct")
            one.dispatch()
            one.receive()
            if world.rank == world.size - 1:
                raise KeyError("the experts are gone")
            one.combine()
            world.settle()
            if reason := buffer.failure():  # on a GPU the next call would say so
                raise EpFailed(reason)

    return timed(rounds)


def test_peers_learn_of_an_error_that_ends_the_block(ranks: Any, fabric: str) -> None:
    (first, took), (last, _) = ranks(2, fabric).run(raised_within)
    assert last.error == "KeyError" and first.error == "EpFailed", (first, last)
    assert took < SLACK_S  # not the buffer's timeout
    if fabric == "host":  # on GPUs a peer's words say who gave up, not why
        assert "the experts are gone" in first.message


def interrupted(world: World) -> Outcome:
    """ctrl-C at rank 1, which waits in its combine."""
    buffer = world.make()
    one = Round(world, buffer, oracle.make_case(0, [4] * world.size), "direct")
    one.dispatch()
    one.receive()
    if world.rank == 1:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        return timed(one.combine)[0]
    while not buffer.failure():
        time.sleep(0.01)
    outcome = attempt(one.combine)
    outcome.value = None
    return outcome


def test_peers_learn_of_an_interrupt(ranks: Any) -> None:
    first, last = ranks(2).run(interrupted)
    assert last.error == "KeyboardInterrupt", last
    assert first.error == "EpFailed" and "rank 1: KeyboardInterrupt" in first.message, first
