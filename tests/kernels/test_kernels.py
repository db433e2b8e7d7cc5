"""What only the nvshmem fabric has: two ways through the kernels, graphs, SM budgets, bounded waits, large offsets.

``kernels`` is "nvshmem" on a GPU, and "emulated" on any machine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_backend.fabric.nvshmem import device
from ep_backend.fabric.nvshmem import world as nvshmem_world
from ep_backend.routing import KINDS
from ep_backend.watchdog import EXIT_CODE, Watchdog
from tests.core import oracle
from tests.core.pool import Outcome, World, attempt, modes
from tests.core.rounds import Round
from tests.kernels.graphs import graph

PAYLOADS = ("bf16", "fp8", "fp8_cast", "fp8_ue8m0_cast")


def one_kernel_for_everything(world: World) -> int:
    """The fused kernels of large batches, with batches that are checked quickly."""
    from ep_backend.fabric.nvshmem import launches

    small, launches.SMALL = launches.SMALL, -1
    try:
        done = 0
        with world.make() as buffer:
            for kind in KINDS:
                for mode, layout in (("direct", "compact"), ("direct", "masked"), ("low_latency", "masked")):
                    for payload in PAYLOADS:
                        tokens = [(3 * r + done) % 13 for r in range(world.size)]
                        case = oracle.make_case(done, tokens, kind=kind)
                        hook = done % 3 == 0
                        Round(world, buffer, case, mode, layout=layout, payload=payload, lane=done % 2, hook=hook).run()
                        done += 1
        return done
    finally:
        launches.SMALL = small


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fused_kernels(ranks: Any, kernels: str, size: int) -> None:
    done = ranks(size, kernels).run(one_kernel_for_everything, timeout=200)
    assert set(done) == {len(KINDS) * 3 * len(PAYLOADS)}


def many_tokens(world: World, tokens: int) -> None:
    few = [tokens, max(tokens - 1, 0)] + [tokens // 3] * (world.size - 2)
    options = {"hidden": 1024, "num_experts": 64, "top_k": 8}
    with world.make(**options, max_tokens={"direct": 4096, "low_latency": 4096}, lanes=1) as buffer:
        for mode, payload in (("direct", "fp8_cast"), ("low_latency", "bf16")):
            case = oracle.make_case(tokens, few[: world.size], experts=64, top_k=8, hidden=1024)
            Round(world, buffer, case, mode, payload=payload).run()


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 63, 64, 65, 128, 512, 513, 1024, 4096])
def test_batch_sizes(ranks: Any, kernels: str, tokens: int) -> None:
    ranks(2, kernels).run(many_tokens, tokens)


def every_top_k(world: World) -> None:
    kinds = ("uniform", "duplicates", "holes")
    for top_k in range(1, 33):
        with world.make(top_k=top_k, num_experts=48, hidden=128, gpus_per_node=1) as buffer:
            for n, mode in enumerate(modes(world.fabric)):
                case = oracle.make_case(n, [12, 5], kind=kinds[(n + top_k) % 3], experts=48, top_k=top_k, hidden=128)
                Round(world, buffer, case, mode, layout=("compact", "masked")[(n + top_k) % 2]).run()


def test_every_top_k(ranks: Any, kernels: str) -> None:
    ranks(2, kernels).run(every_top_k)


FORMS = [(mode, layout) for mode in ("direct", "low_latency", "hybrid") for layout in ("compact", "masked")]


def budgets(world: World, form: str) -> None:
    """Small batches and large ones."""
    options: dict[str, Any] = {"hidden": 512, "lanes": 1, "gpus_per_node": 1, "low_latency_form": form}
    every, some = ((1, 2, 7, 24, 64, 132, 1000), (1, 2, 1000))
    with world.make(**options, max_tokens=dict.fromkeys(("direct", "low_latency", "hybrid"), 700)) as buffer:
        for tokens, (mode, layout) in itertools.product((40, 700), FORMS):
            if mode == "low_latency" and layout == "compact" and form == "per_expert":
                continue
            case = oracle.make_case(tokens, [tokens] * world.size, hidden=512)
            x = case.x[world.rank].bfloat16().to(world.device)
            ids, weights = (t[world.rank].to(world.device) for t in (case.ids, case.weights))
            want = None
            for sms in (every if world.device.type == "cuda" else some) + (1 + 4 * world.rank,):
                got = buffer.dispatch(x, ids, weights, mode=mode, layout=layout, sms=sms)
                out = buffer.combine(got.rows, got.handle).cpu()
                assert want is None or torch.equal(want[1], out), (mode, layout, sms)
                if layout == "compact":
                    rows = got.rows.float().cpu()
                    assert want is None or torch.equal(want[0], rows), (mode, sms)
                    want = rows, out
                else:
                    want = None, out


@pytest.mark.parametrize("form", ["auto", "per_expert"])
def test_any_sm_budget_of_any_rank_gives_the_same_bits(ranks: Any, kernels: str, form: str) -> None:
    ranks(2, kernels).run(budgets, form)


def every_budget(world: World) -> None:
    with world.make(max_tokens=dict.fromkeys(("direct", "normal"), 12)) as buffer:
        case = oracle.make_case(3, [12, 7])
        for sms in range(1, buffer._fabric._gpu.multiprocessors + 1):
            for mode in ("direct", "normal"):
                Round(world, buffer, case, mode, sms=sms).run()


def test_every_sm_budget(ranks: Any, kernels: str) -> None:
    ranks(2, kernels).run(every_budget)


def by_puts(world: World, gpus: int) -> int:
    """Ranks of other nodes are not even mapped."""
    done = 0
    with world.make(gpus_per_node=gpus, rail="put", max_tokens={"hybrid": 12}) as buffer:
        for kind in KINDS:
            for payload in PAYLOADS:
                tokens = [(3 * r + done) % 13 for r in range(world.size)]
                layout, hook = ("compact", "masked")[done % 2], done % 3 == 0
                case = oracle.make_case(done, tokens, kind=kind)
                Round(world, buffer, case, "hybrid", layout=layout, payload=payload, lane=done % 2, hook=hook).run()
                done += 1
    return done


@pytest.mark.parametrize("size,gpus", [(2, 1), (4, 2), (8, 4), (8, 2)])
def test_hybrid_by_puts(ranks: Any, kernels: str, size: int, gpus: int) -> None:
    assert set(ranks(size, kernels).run(by_puts, gpus, timeout=200)) == {len(KINDS) * len(PAYLOADS)}


def long_channels(world: World, gpus: int, options: dict[str, Any]) -> int:
    """More records of a channel than a relay's warp looks at together, as small batches and as large ones are launched."""
    from ep_backend.fabric.nvshmem import launches

    usual, done, most = launches.SMALL, 0, 300
    try:
        for launches.SMALL in (usual, -1):
            with world.make(gpus_per_node=gpus, hidden=128, max_tokens={"hybrid": most}, lanes=1, **options) as buffer:
                for kind in KINDS:
                    tokens = [most - (70 * r + 97 * done) % (most + 1) for r in range(world.size)]
                    case = oracle.make_case(done, tokens, kind=kind, hidden=128)
                    layout, payload = ("compact", "masked")[done % 2], ("fp8_cast", "bf16")[done // 2 % 2]
                    Round(world, buffer, case, "hybrid", layout=layout, payload=payload, hook=done % 3 == 0).run()
                    done += 1
    finally:
        launches.SMALL = usual
    return done


@pytest.mark.parametrize("options", [{}, {"rail": "put"}, {"deterministic": True}], ids=["stores", "puts", "deterministic"])
@pytest.mark.parametrize("size,gpus", [(2, 1), (4, 2), (6, 2)])
def test_hybrid_relays_take_turns(ranks: Any, kernels: str, size: int, gpus: int, options: dict[str, Any]) -> None:
    assert set(ranks(size, kernels).run(long_channels, gpus, options, timeout=200)) == {2 * len(KINDS)}


def by_expert(world: World) -> int:
    done = 0
    with world.make(low_latency_form="per_expert") as buffer:
        for kind in KINDS:
            for payload in PAYLOADS:
                tokens = [(3 * r + done) % 13 for r in range(world.size)]
                case = oracle.make_case(done, tokens, kind=kind)
                Round(world, buffer, case, "low_latency", payload=payload, lane=done % 2, hook=done % 3 == 0).run()
                Round(world, buffer, case, "direct", payload=payload, lane=done % 2).run()
                done += 1
    return done


@pytest.mark.parametrize("size", [1, 2, 4])
def test_per_expert_form(ranks: Any, kernels: str, size: int) -> None:
    assert set(ranks(size, kernels).run(by_expert, timeout=120)) == {len(KINDS) * len(PAYLOADS)}


class Captured:
    """One captured round of one mode; its inputs can be changed."""

    def __init__(
        self, world: World, buffer: Any, mode: str, tokens: int, lane: int, meanwhile: Callable[[], object] = int
    ) -> None:
        self.world, self.mode = world, mode
        hidden, top_k, device = 256, 4, world.device
        self.x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device)
        self.ids = torch.full((tokens, top_k), -1, dtype=torch.int64, device=device)
        self.weights = torch.zeros(tokens, top_k, device=device)
        world.settle()
        with graph(world) as self.graph:
            self.got = buffer.dispatch(self.x, self.ids, self.weights, mode=mode, lane=lane, host_counts=False)
            self.y = self.got.rows
            meanwhile()
            if mode == "direct":
                self.y = torch.empty_like(self.got.rows)
                self.graph.call(self.weigh)
            self.out = buffer.combine(self.y, self.got.handle)

    def weigh(self) -> None:
        """What a caller's experts do with compact rows."""
        torch.mul(self.got.rows, self.got.topk_weights.sum(1, keepdim=True).to(self.y.dtype), out=self.y)

    def replay(self, seed: int, tokens: list[int]) -> None:
        """Experts are the identity, so that the result is x times the sum of weights of valid picks."""
        rank, case = self.world.rank, oracle.make_case(seed, tokens, kind="holes")
        n = len(case.x[rank])
        self.ids.fill_(-1)
        self.x[:n] = case.x[rank].bfloat16()
        self.ids[:n] = case.ids[rank]
        weights = torch.where(case.ids[rank] >= 0, case.weights[rank], 0.0)
        self.weights[:n] = weights
        self.out.fill_(float("nan"))
        self.graph.replay()
        want = torch.zeros(self.out.shape)
        want[:n] = case.x[rank] * weights.sum(1, keepdim=True)
        off = (self.out.float().cpu() - want).abs()
        assert (off <= 0.03 * want.abs() + 0.02).all(), (self.mode, seed, float(off.nan_to_num(9e9).max()))


def replays(world: World, count: int) -> int:
    with world.make(lanes=2, gpus_per_node=world.size // 2) as buffer:
        case = oracle.make_case(0, [3] * world.size)
        for mode in ("direct", "low_latency", "hybrid"):
            Round(world, buffer, case, mode).run()
        graphs = [
            Captured(world, buffer, "low_latency", 8, 0),
            Captured(world, buffer, "hybrid", 5, 0),  # its relays run beside the captured stream
            Captured(world, buffer, "low_latency", 3, 0),
            Captured(world, buffer, "direct", 12, 1),
        ]
        for n in range(count):
            one = graphs[n % len(graphs)]
            most = len(one.x)
            one.replay(n, [(n + r) % (most + 1) for r in range(world.size)])
            if n % 10 == 0:
                Round(world, buffer, oracle.make_case(n, [2] * world.size), "direct").run()
        assert buffer.failure() is None
        stats = buffer.stats()
        assert stats["modes"]["low_latency"]["dispatches"] >= count // 2
    return count


@pytest.mark.parametrize("size,count", [(2, 240), (4, 60)])
def test_graphs_replay_with_new_routing_between_eager_rounds(ranks: Any, kernels: str, size: int, count: int) -> None:
    assert ranks(size, kernels).run(replays, count, timeout=200) == [count] * size


def reported_in_a_capture(world: World) -> list[Any]:
    """Another thread reads the counters while this one captures, as an agent that is asked for its status does, and a
    proposal is on its way."""
    with world.make() as buffer, ThreadPoolExecutor(1) as agent:
        seen: list[Any] = []
        buffer.propose(5)

        def meanwhile() -> None:
            seen.append(agent.submit(buffer.stats).result(30)["failed"])
            agent.submit(buffer.agreed).result(30)
            seen.append(buffer.agreed())

        captured = Captured(world, buffer, "low_latency", 8, 0, meanwhile)
        captured.replay(0, [3] * world.size)
        world.settle()
        return [*seen, buffer.agreed()]


def test_a_status_leaves_a_capture_whole(ranks: Any, kernels: str) -> None:
    assert ranks(2, kernels).run(reported_in_a_capture) == [[None, 0, 5]] * 2


def test_a_thread_that_reads_counters_lets_others_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """For its reads only; CUDA's default is that a wait in any thread breaks a capture."""
    modes = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL="local")
    exchanged = ["global"]

    def exchange(mode: str) -> tuple[int, str]:
        exchanged.append(mode)
        return 0, exchanged[-2]

    class Counters:
        def tolist(self) -> list[str]:
            return [exchanged[-1]]

    fake = SimpleNamespace(CUstreamCaptureMode=modes, cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(nvshmem_world, "driver", lambda: fake)
    gpu = device.Gpu.__new__(device.Gpu)
    assert gpu.read(Counters()) == ["local"]  # type: ignore[arg-type]
    assert exchanged == ["global", "local", "global"]


def stalled_replay(world: World) -> tuple[list[int], float, str | None]:
    """Rank 1 comes to the second replay when rank 0 has given up. Nothing that they call says so."""
    buffer = world.make(timeout_s=1.0)
    one = Captured(world, buffer, "low_latency", 8, 1)
    one.replay(0, [3, 5])
    ended: list[int] = []
    dog = Watchdog(buffer.failure, poll_s=0.05, end=ended.append)
    dog.start()
    started = time.monotonic()
    if world.rank == 1:
        time.sleep(4)
    one.graph.replay()
    dog.join(20)
    took, why = time.monotonic() - started, buffer.failure()
    world.settle()
    assert one.out.isnan().all(), "what a failed buffer leaves is no result"
    buffer.destroy()
    return ended, took, why


def test_the_watchdog_notices_a_failure_under_replay(ranks: Any, kernels: str) -> None:
    (ended, took, why), (late, _, told) = ranks(2, kernels).run(stalled_replay)
    assert ended == late == [EXIT_CODE] and took < 4
    assert why is not None and "dispatch: mode=low_latency, lane=1, epoch=2" in why and "peer=1" in why
    assert told is not None and "rank 0 gave up" in told


def capture_with_host_counts(world: World) -> Outcome:
    with world.make() as buffer:
        x = torch.zeros(2, 256, dtype=torch.bfloat16, device=world.device)
        ids = torch.zeros(2, 4, dtype=torch.int64, device=world.device)
        weights = torch.zeros(2, 4, device=world.device)
        world.settle()

        def capture() -> None:
            with graph(world):
                buffer.dispatch(x, ids, weights, mode="direct")

        return attempt(capture)


def test_a_capture_cannot_wait_for_counts(ranks: Any, kernels: str) -> None:
    for outcome in ranks(2, kernels).run(capture_with_host_counts):
        assert outcome.kind == "error" and "host_counts=False" in outcome.message


def made_in_a_capture(world: World) -> Outcome:
    def capture() -> None:
        with graph(world):
            world.make()

    refused = attempt(capture)
    with world.make() as buffer:
        Round(world, buffer, oracle.make_case(0, [2] * world.size), "direct").run()
    return refused


def test_a_buffer_cannot_be_made_in_a_capture(ranks: Any, kernels: str) -> None:
    for refused in ranks(2, kernels).run(made_in_a_capture):
        assert (refused.kind, refused.error) == ("error", "EpError")
        assert "cannot be made while a CUDA graph is captured" in refused.message or "gave up" in refused.message


def stalled(world: World, mode: str, form: str, absent: str) -> tuple[Outcome, float, str | None]:
    buffer = world.make(timeout_s=1.0, gpus_per_node=1, low_latency_form=form)
    Round(world, buffer, oracle.make_case(0, [3] * world.size), mode).run()
    late = Round(world, buffer, oracle.make_case(1, [3] * world.size), mode, lane=1)
    started = time.monotonic()
    if absent == "combine":
        late.dispatch()
        late.receive()
    if world.rank == 1:
        time.sleep(3)

    def go_on() -> None:
        if absent == "dispatch":
            late.dispatch()
            late.receive()
        late.combine()
        world.settle()
        late.collect()

    outcome = attempt(go_on)
    world.settle()
    took, why = time.monotonic() - started, buffer.failure()
    again = attempt(lambda: Round(world, buffer, oracle.make_case(2, [1] * world.size), mode).run())
    assert again.error == "EpFailed", again
    destroying = time.monotonic()
    buffer.destroy()
    assert time.monotonic() - destroying < 5
    return outcome, took, why


@pytest.mark.parametrize("absent", ["dispatch", "combine"])
@pytest.mark.parametrize("mode,form", [("direct", "auto"), ("low_latency", "per_expert"), ("hybrid", "auto")])
def test_a_peer_that_does_not_come_fails_the_buffer(ranks: Any, kernels: str, mode: str, form: str, absent: str) -> None:
    pool = ranks(2, kernels)
    found = pool.run(stalled, mode, form, absent, timeout=30)
    outcome, took, why = found[0]
    assert took < 3 and why is not None and f"{absent}: mode={mode}, lane=1, epoch=1" in why
    assert "peer=1" in why and outcome.kind == "error"
    assert found[1][2] is not None and "rank 0 gave up" in found[1][2], "the late rank learns it too"


def on_another_stream(world: World) -> bool:
    """Whether rounds ended while the default stream was busy."""
    with world.make(gpus_per_node=1) as buffer:
        for mode in modes(world.fabric):
            Round(world, buffer, oracle.make_case(0, [3] * world.size), mode).run()
        world.settle()
        torch.cuda._sleep(3_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
        with torch.cuda.stream(torch.cuda.Stream()):
            for mode in modes(world.fabric):
                Round(world, buffer, oracle.make_case(1, [12, 5]), mode, lane=1).run()
        ended_before = not busy.query()
        world.settle()
        return ended_before


@pytest.mark.gpu
def test_everything_runs_on_the_current_stream(ranks: Any) -> None:
    assert ranks(2, "nvshmem").run(on_another_stream) == [True, True]


def beside(world: World) -> list[bool]:
    """Whether operations with async_finish ended while the current stream was busy; what they were given is let go at once."""
    ahead = []

    def keeps_busy(event: Any) -> None:
        torch.cuda._sleep(1_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
        event.synchronize()
        ahead.append(not busy.query())
        event.wait()

    with world.make(gpus_per_node=1) as buffer:
        for mode in modes(world.fabric):
            Round(world, buffer, oracle.make_case(0, [3] * world.size), mode).run()
            case = oracle.make_case(1, [12, 5])
            x, _ = oracle.given(case.x[world.rank].to(world.device), "bf16")
            ids, weights = (t[world.rank].to(world.device) for t in (case.ids, case.weights))
            given = x.clone()
            got = buffer.dispatch(given, ids, weights, mode=mode, async_finish=True)
            del given
            torch.full_like(x, float("nan"))  # in the same memory, were it free
            keeps_busy(got.event)
            r = Round(world, buffer, case, mode)
            y = oracle.run_experts(case, world.rank, got, layout=r.layout, payload="bf16")
            size = y.shape
            r.out, event = buffer.combine(y, got.handle, async_finish=True)
            del y, got
            torch.full(size, float("nan"), dtype=torch.bfloat16, device=world.device)
            keeps_busy(event)
            r.collect()
    return ahead


@pytest.mark.gpu
def test_async_finish_runs_beside_the_current_stream(ranks: Any) -> None:
    assert ranks(2, "nvshmem").run(beside) == [[True] * 8] * 2


def disagreeing(world: World) -> str | None:
    buffer = world.make(timeout_s=20.0)
    layout = "compact" if world.rank == 0 else "masked"
    attempt(lambda: Round(world, buffer, oracle.make_case(0, [2] * world.size), "direct", layout=layout).run())
    world.settle()
    why = buffer.failure()
    buffer.destroy()
    return why


def test_ranks_that_call_different_things(ranks: Any, kernels: str) -> None:
    whys = ranks(2, kernels).run(disagreeing)
    assert any(w and "compact" in w and "masked" in w for w in whys), whys


def aborting(world: World) -> tuple[str | None, float]:
    buffer = world.make(timeout_s=20.0)
    started = time.monotonic()
    if world.rank == 1:
        time.sleep(0.5)
        buffer.abort("the caller gave up")
    else:
        attempt(lambda: Round(world, buffer, oracle.make_case(0, [2] * world.size), "direct").run())
        world.settle()
    why = buffer.failure()
    took = time.monotonic() - started
    buffer.destroy()
    return why, took


def test_abort_ends_the_waits_of_others(ranks: Any, kernels: str) -> None:
    (why, took), (own, _) = ranks(2, kernels).run(aborting)
    assert why is not None and "rank 1 gave up" in why and took < 10
    assert own is not None and "the caller gave up" in own


def aborting_by_puts(world: World) -> str | None:
    buffer = world.make(gpus_per_node=1, rail="put", max_tokens={"hybrid": 12}, timeout_s=2.0)
    if world.rank == 1:
        buffer.abort("nobody is mapped here")
    why = buffer.failure()
    buffer.destroy()
    return why


def test_abort_passes_over_ranks_that_only_puts_reach(ranks: Any, kernels: str) -> None:
    _, own = ranks(2, kernels).run(aborting_by_puts)
    assert own is not None and "nobody is mapped here" in own


def bad_ids(world: World) -> str | None:
    buffer = world.make(timeout_s=10.0)
    case = oracle.make_case(0, [4] * world.size)
    x = case.x[world.rank].bfloat16().to(world.device)
    ids, weights = (t[world.rank].to(world.device) for t in (case.ids, case.weights))
    if world.rank == 0:
        ids[1, 2] = 24

    def call() -> None:
        got = buffer.dispatch(x, ids, weights, mode="direct")
        buffer.combine(got.rows, got.handle)

    attempt(call)
    world.settle()
    why = buffer.failure()
    assert attempt(lambda: buffer.dispatch(x, ids, weights, mode="direct")).error == "EpFailed"
    buffer.destroy()
    return why


@pytest.mark.gpu  # ids on a CPU are checked before the call
def test_ids_outside_the_model_fail_the_buffer_by_name(ranks: Any) -> None:
    why, other = ranks(2, "nvshmem").run(bad_ids)
    assert why is not None and "topk id 24" in why and "token 1" in why
    assert other is not None and "rank 0 gave up" in other


def far_offsets(world: World) -> int:
    """As many tokens as that x, segments and rows end past 2 GiB (one rank), or the heap past 4 GiB (two)."""
    tokens = 160_000 // world.size
    with world.make(hidden=7168, num_experts=8, top_k=2, max_tokens={"direct": tokens}, lanes=1, payloads=("bf16",)) as buffer:
        x = torch.randn(tokens, 7168, device=world.device, dtype=torch.bfloat16)
        ids = torch.randint(0, 8, (tokens, 2), device=world.device)
        weights = torch.full((tokens, 2), 0.5, device=world.device)
        got = buffer.dispatch(x, ids, weights, mode="direct")
        assert got.topk_weights is not None
        y = got.rows * got.topk_weights.sum(1, keepdim=True).to(torch.bfloat16)
        out = buffer.combine(y, got.handle)
        assert torch.equal(out[-2000:].float(), x[-2000:].float()), "weights of a token sum to 1"
        return int(buffer.allocated_bytes)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_offsets_past_2_gib(ranks: Any, size: int) -> None:
    assert all(n > 4 << 30 for n in ranks(size, "nvshmem").run(far_offsets, timeout=120))
