"""Dispatch and combine in SGLang's formats between two and four processes, against the same MoE in one."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the adapter's tests need SGLang: run ./ep test sglang")

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.core.pool import World

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TIMEOUT_S = 280.0  # the first call imports SGLang
MODES = ["normal", "direct", "low_latency", "hybrid"]
TOKENS = [(12, 12, 3, 12), (0, 7, 1, 0), (5, 0, 0, 2), (0, 0, 0, 0), (1, 12, 6, 4)]
WORLDS = [pytest.param(2, 2, id="2"), pytest.param(4, 2, id="2x2")]


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> None:
    """Workers are forked from a process that has SGLang, for importing it takes longer than all tests here."""
    multiprocessing.set_forkserver_preload(["tests.server_plugins.sglang_layers"])
    forkserver.ensure_running()


def every_batch(world: World, mode: str, gpus_per_node: int, dtype: str) -> Any:
    from tests.server_plugins.sglang_layers import Batch, layer

    kind = getattr(torch, dtype)
    with layer(world, mode, gpus_per_node=gpus_per_node, dtype=kind) as moe:
        for seed, tokens in enumerate(TOKENS):
            batch = Batch.make(10 * seed + world.rank, tokens[world.rank], kind)
            moe.run(batch)
            moe.check(batch, 1e-5 if kind is torch.float32 else 2e-2)
        (buffer,) = moe.runtime.buffers
        return {**moe.counted, "payloads": [p.name for p in buffer.config.payloads]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "gpus_per_node"), WORLDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_one_process(ranks, mode, size, gpus_per_node, dtype):
    for counted in ranks(size).run(every_batch, mode, gpus_per_node, dtype, timeout=TIMEOUT_S):
        assert counted.keys() == {mode, "payloads"}
        assert counted[mode]["dispatches"] == counted[mode]["combines"] == len(TOKENS)
        assert counted["payloads"] == ["FP32" if dtype == "float32" else "BF16"]


def two_sub_batches(world: World, mode: str, gpus_per_node: int) -> None:
    """In the order of SGLang's operations: the second sub-batch starts between the steps of the first."""
    from tests.server_plugins.sglang_cpu import experts
    from tests.server_plugins.sglang_layers import Batch, layer

    with layer(world, mode, lanes=2, gpus_per_node=gpus_per_node) as moe:
        d = moe.dispatcher
        for seed in range(3):
            a, b = (Batch.make(100 * seed + 10 * lane + world.rank, lane + (seed + world.rank) % 5) for lane in (0, 1))
            d.dispatch_a(hidden_states=a.x, topk_output=a.routing, tbo_subbatch_index=0)
            d.dispatch_a(hidden_states=b.x, topk_output=b.routing, tbo_subbatch_index=1)
            y_a = experts(moe.weights, d.dispatch_b(tbo_subbatch_index=0))
            d.combine_a(combine_input=y_a, tbo_subbatch_index=0)
            y_b = experts(moe.weights, d.dispatch_b(tbo_subbatch_index=1))
            d.combine_a(combine_input=y_b, tbo_subbatch_index=1)
            a.out = d.combine_b(tbo_subbatch_index=0)
            b.out = d.combine_b(tbo_subbatch_index=1)
            moe.check(a)
            moe.check(b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "gpus_per_node"), WORLDS)
def test_two_sub_batches_interleave(ranks, mode, size, gpus_per_node):
    ranks(size).run(two_sub_batches, mode, gpus_per_node, timeout=TIMEOUT_S)


def formats(world: World, mode: str, wire: str) -> dict[str, Any]:
    """What DeepGEMM's runners would get on a GPU: `wire` is bf16, fp8 (Hopper) or ue8m0 (Blackwell)."""
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.utils.common import dispose_tensor

    from tests.server_plugins.sglang_layers import Batch, layer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", wire != "bf16")
        patch.setattr(deep_gemm_wrapper, "DEEPGEMM_SCALE_UE8M0", wire == "ue8m0")
        with layer(world, mode, dtype=torch.bfloat16) as moe:
            batch = Batch.make(world.rank, 9, torch.bfloat16)
            got = moe.dispatcher.dispatch(hidden_states=batch.x, topk_output=batch.routing)
            rows, scales = got.hidden_states, got.hidden_states_scale
            seen = {
                "format": got.format.value,
                "rows": (rows.dtype, tuple(rows.shape)),
                "scales": None if scales is None else (scales.dtype, tuple(scales.shape), scales.stride()),
                "ids": (got.topk_ids.dtype, tuple(got.topk_ids.shape)),
                "weights": (got.topk_weights.dtype, tuple(got.topk_weights.shape)),
                "values": _dequantised(rows, scales),
                "x": batch.x.float(),
                "got_ids": got.topk_ids,
                "sent_ids": batch.ids,
            }
            if "normal" in got.format.value:
                seen["counts"] = got.num_recv_tokens_per_expert
            else:
                seen["counts"] = got.masked_m
                seen["expected_m"] = got.expected_m
            answer = torch.zeros(rows.shape, dtype=torch.bfloat16)
            memory = StorageWeakRef(rows.untyped_storage())
            dispose_tensor(rows)
            assert memory.expired()
            if scales is not None:
                dispose_tensor(scales)
            out = moe.dispatcher.combine(combine_input=(answer, got.topk_ids, got.topk_weights))
            assert out.shape == batch.x.shape and not out.any()
            return seen


def _dequantised(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return rows.float()
    if scales.dtype == torch.int32:  # four exponents in a word
        exponents = scales[..., None] >> torch.arange(0, 32, 8) & 0xFF
        scales = torch.exp2(exponents.flatten(-2).float() - 127)
    groups = rows.float().unflatten(-1, (-1, 128))
    return (groups * scales[..., : groups.shape[-2], None]).flatten(-2)


@pytest.mark.parametrize("mode", ["normal", "direct"])
@pytest.mark.parametrize("wire", ["bf16", "fp8", "ue8m0"])
def test_prefill_format(ranks, mode, wire):
    from tests.server_plugins.sglang_layers import EXPERTS, HIDDEN, TOP_K

    both = ranks(2).run(formats, mode, wire, timeout=TIMEOUT_S)
    local = EXPERTS // 2
    for rank, seen in enumerate(both):
        picks = [(s["sent_ids"] // local == rank) & (s["sent_ids"] >= 0) for s in both]
        arriving = torch.cat([s["x"][p.any(1)] for s, p in zip(both, picks, strict=True)])
        n = len(arriving)
        assert seen["format"] == "deepep_normal"
        assert seen["rows"] == (torch.bfloat16 if wire == "bf16" else torch.float8_e4m3fn, (n, HIDDEN))
        width = {"bf16": None, "fp8": (torch.float32, HIDDEN // 128), "ue8m0": (torch.int32, -(-HIDDEN // 512))}[wire]
        assert seen["scales"] == (None if width is None else (width[0], (n, width[1]), (width[1], 1)))
        assert seen["ids"] == (torch.int64, (n, TOP_K)) and seen["weights"] == (torch.float32, (n, TOP_K))
        torch.testing.assert_close(seen["values"], arriving, rtol=0.07, atol=0.05 if wire != "bf16" else 0)
        ids = torch.cat([torch.where(p, s["sent_ids"] - rank * local, -1)[p.any(1)] for s, p in zip(both, picks, strict=True)])
        assert torch.equal(seen["got_ids"].sort(1).values, ids.long().sort(1).values)
        exact = [int((ids == expert).sum()) for expert in range(local)]
        step = 1 if wire == "bf16" else 128
        assert seen["counts"] == [-(-count // step) * step for count in exact]


@pytest.mark.parametrize("mode", ["low_latency", "hybrid"])
@pytest.mark.parametrize("wire", ["bf16", "fp8", "ue8m0"])
def test_decode_format(ranks, mode, wire):
    from tests.server_plugins.sglang_layers import EXPERTS, HIDDEN, LIMIT, TOP_K

    both = ranks(2).run(formats, mode, wire, timeout=TIMEOUT_S)
    local, room = EXPERTS // 2, 2 * LIMIT
    for rank, seen in enumerate(both):
        assert seen["format"] == "deepep_ll"
        kind = torch.bfloat16 if wire == "bf16" else torch.float8_e4m3fn
        assert seen["rows"] == (kind, (local, room, HIDDEN))
        if wire == "bf16":
            assert seen["scales"] is None
        else:
            dtype, width = (torch.float32, HIDDEN // 128) if wire == "fp8" else (torch.int32, -(-HIDDEN // 512))
            found, shape, stride = seen["scales"]
            assert (found, shape) == (dtype, (local, room, width))
            assert stride[1] == 1 and stride[2] >= room and stride[2] % 4 == 0  # column-major, 16 bytes for TMA
        assert seen["ids"] == (torch.int64, (9, TOP_K)) and torch.equal(seen["got_ids"], seen["sent_ids"].long())
        assert seen["counts"].dtype == torch.int32
        assert seen["expected_m"] == (9 * 2 * TOP_K + EXPERTS) // EXPERTS
        for expert in range(local):
            arriving = torch.cat([s["x"][(s["sent_ids"] == rank * local + expert).any(1)] for s in both])
            count = int(seen["counts"][expert])
            assert count == len(arriving)
            tolerance = 0.05 if wire != "bf16" else 0
            torch.testing.assert_close(seen["values"][expert, :count], arriving, rtol=0.07, atol=tolerance)


def by_forward_mode(world: World) -> Any:
    from tests.server_plugins.sglang_layers import LIMIT, Batch, Layer

    limits = {"direct": LIMIT, "low_latency": LIMIT}
    with Layer(world, ("prefill", "decode"), limits) as moe:
        for step, family in enumerate(["prefill", "decode", "decode", "prefill", "decode"]):
            moe.forward(family)
            batch = Batch.make(10 * step + world.rank, step + world.rank)
            moe.run(batch)
            moe.check(batch)
        return moe.counted


def test_auto_follows_the_agreed_forward_mode(ranks):
    for counted in ranks(2).run(by_forward_mode, timeout=TIMEOUT_S):
        assert {mode: c["dispatches"] for mode, c in counted.items()} == {"direct": 2, "low_latency": 3}


def by_tokens(world: World) -> Any:
    import sglang.srt.layers.dp_attention as dp_attention

    from tests.server_plugins.sglang_layers import LIMIT, Batch, Layer

    with pytest.MonkeyPatch.context() as patch, Layer(world, ("prefill",), {"direct": 4, "normal": LIMIT}) as moe:
        for seed, tokens in enumerate([(4, 3), (1, 5), (0, 4)]):
            patch.setattr(dp_attention, "get_dp_global_num_tokens", lambda exchanged=tokens: list(exchanged))
            batch = Batch.make(seed + world.rank, tokens[world.rank])
            moe.run(batch)
            moe.check(batch)
        return moe.counted


def test_auto_decides_by_the_largest_batch_of_any_rank(ranks):
    for counted in ranks(2).run(by_tokens, timeout=TIMEOUT_S):
        assert {mode: c["dispatches"] for mode, c in counted.items()} == {"direct": 2, "normal": 1}


def flips(world: World) -> Any:
    from ep_backend.control.flip import FlipRefused
    from server_plugins.sglang.state import MODE, MODES, TOKEN, apply
    from tests.server_plugins.sglang_layers import LIMIT, Batch, Layer

    limits = dict.fromkeys(MODES[:3], LIMIT)
    with Layer(world, ("prefill", "decode"), limits) as moe:
        with pytest.raises(FlipRefused, match="mode hybrid has no capacity"):
            apply(moe.runtime, {TOKEN: 1, MODE: MODES.index("hybrid")})
        executed = []
        # Rank 1 hears of the proposal three steps later; until then nobody changes.
        for step in range(6):
            if step == 3 * world.rank:
                apply(moe.runtime, {TOKEN: 2, MODE: MODES.index("normal")})
            moe.forward("prefill" if step != 4 else "decode")
            batch = Batch.make(10 * step + world.rank, step)
            moe.run(batch)
            moe.check(batch)
            executed.append(moe.runtime.status()["mode_executed"])
        return executed


def test_a_flip_happens_on_all_ranks_at_one_dispatch_and_leaves_the_other_family_alone(ranks):
    for executed in ranks(2).run(flips, timeout=TIMEOUT_S):
        assert executed == ["direct"] * 4 + ["low_latency", "normal"]


def outside_the_family(world: World) -> str:
    from ep_backend.control.flip import FlipRefused
    from server_plugins.sglang.state import MODE, MODES, TOKEN, apply
    from tests.server_plugins.sglang_layers import layer

    with layer(world, "direct") as moe, pytest.raises(FlipRefused) as refused:
        apply(moe.runtime, {TOKEN: 1, MODE: MODES.index("low_latency")})
    return str(refused.value)


def test_a_flip_across_families_needs_a_restart(ranks):
    for text in ranks(2).run(outside_the_family, timeout=TIMEOUT_S):
        assert "mode low_latency does not serve the prefill family it was started with; restart the role" in text


def replayed_graphs(world: World) -> None:
    from tests.server_plugins.sglang_layers import layer

    with layer(world, "low_latency") as moe:
        moe.runtime.plan = moe.runtime.plan.model_copy(update={"decode_graphs": True})
        with pytest.raises(ValueError, match=r"graphs replay the mode they captured; .*--cuda-graph-backend-decode disabled"):
            moe.runtime._check_flip("auto")


def test_a_flip_of_captured_graphs_needs_a_restart(ranks):
    ranks(2).run(replayed_graphs, timeout=TIMEOUT_S)


def recorded(world: World, mode: str) -> dict[str, Any]:
    import server_plugins.sglang.dispatcher as adapter
    from tests.server_plugins.sglang_layers import Batch, layer

    seen: dict[str, Any] = {}
    recorder = SimpleNamespace(
        recording=True,
        on_deepep_dispatch_normal=lambda counts, **sent: seen.update(counts=counts, **sent),
        on_deepep_dispatch_low_latency=lambda counts: seen.update(counts=counts.tolist()),
    )
    with pytest.MonkeyPatch.context() as patch, layer(world, mode, gpus_per_node=2) as moe:
        patch.setattr(adapter, "get_global_expert_distribution_recorder", lambda: recorder)
        batch = Batch.make(world.rank, 3 * world.rank)
        moe.run(batch)
        moe.check(batch)
    return {**seen, "sent": batch.ids}


@pytest.mark.parametrize("mode", ["direct", "low_latency"])
def test_load_balancing_gets_its_statistics(ranks, mode):
    from tests.server_plugins.sglang_layers import EXPERTS

    every = ranks(4).run(recorded, mode, timeout=TIMEOUT_S)
    local = EXPERTS // 4
    for rank, seen in enumerate(every):
        mine = range(rank * local, (rank + 1) * local)
        assert seen["counts"] == [sum(int((s["sent"] == expert).sum()) for s in every) for expert in mine]
        if mode == "direct":
            sent = [{int(i) for i in token if i >= 0} for token in seen["sent"]]
            assert seen["num_tokens_per_expert"].tolist() == [sum(e in t for t in sent) for e in range(EXPERTS)]
            to_ranks = [{e // local for e in t} for t in sent]
            assert seen["num_tokens_per_rank"].tolist() == [sum(r in t for t in to_ranks) for r in range(4)]
            to_nodes = [{r // 2 for r in t} for t in to_ranks]
            assert seen["num_tokens_per_rdma_rank"].tolist() == [sum(n in t for t in to_nodes) for n in range(2)]


def misused(world: World) -> None:
    from tests.server_plugins.sglang_cpu import experts
    from tests.server_plugins.sglang_layers import LIMIT, Batch, layer

    unloaded = layer(world, "direct")
    with pytest.raises(RuntimeError, match="this layer has no buffer: its model was not loaded by SGLang's ModelRunner"):
        unloaded.run(Batch.make(world.rank, 1))
    unloaded.inner.set_quant_config({"input_global_scale": torch.ones(1)})
    with pytest.raises(ValueError, match="rows of nvfp4 cannot be dispatched; use --deepep-dispatcher-output-dtype bf16"):
        unloaded.runtime.allocate()

    with layer(world, "low_latency") as moe:
        batch, d = Batch.make(world.rank, 4), moe.inner
        with pytest.raises(RuntimeError, match="sub-batch 0 is idle, and only one that is dispatching can go on to dispatched"):
            d.dispatch_b()
        with pytest.raises(NotImplementedError, match="remove --enable-single-batch-overlap"):
            moe.dispatcher.set_overlap_args(object(), {})
        got = d.dispatch(batch.x, batch.routing)
        with pytest.raises(RuntimeError, match="sub-batch 0 is dispatched, and only one that is idle"):
            d.dispatch_a(batch.x, batch.routing)
        batch.out = d.combine(experts(moe.weights, got))
        moe.check(batch)

    with layer(world, "direct") as moe, pytest.raises(ValueError, match="13 tokens exceed max_tokens=12 of mode direct"):
        moe.run(Batch.make(world.rank, LIMIT + 1))


def test_misuse_is_told(ranks):
    ranks(2).run(misused, timeout=TIMEOUT_S)


def changed_weights(world: World) -> None:
    from tests.server_plugins.sglang_cpu import experts
    from tests.server_plugins.sglang_layers import Batch, layer

    with layer(world, "low_latency") as moe:
        batch = Batch.make(world.rank, 4)
        y = experts(moe.weights, moe.dispatcher.dispatch(hidden_states=batch.x, topk_output=batch.routing))
        with pytest.raises(RuntimeError, match="the expert runner changed the router weights"):
            moe.dispatcher.combine(combine_input=y._replace(topk_weights=2 * y.topk_weights))


def test_weights_that_change_after_dispatch_are_told(ranks):
    ranks(2).run(changed_weights, timeout=TIMEOUT_S)


def phases(world: World, mode: str) -> dict[str, list[bool]]:
    """Whether dispatch and combine were asked to return a hook: where nothing runs in between, and in SGLang's steps."""
    from tests.server_plugins.sglang_cpu import experts
    from tests.server_plugins.sglang_layers import Batch, layer

    asked: list[bool] = []
    with layer(world, mode, lanes=2) as moe:
        buffer, d = moe.inner.buffer, moe.inner
        for name in ("dispatch", "combine"):
            ask = getattr(buffer, name)
            spy = lambda *args, ask=ask, **more: asked.append(more.get("return_hook", False)) or ask(*args, **more)  # noqa: E731
            setattr(buffer, name, spy)
        batch = Batch.make(world.rank, 4)
        moe.run(batch)
        moe.check(batch)
        found = {"at once": asked.copy()}
        asked.clear()
        d.dispatch_a(batch.x, batch.routing)
        d.combine_a(experts(moe.weights, d.dispatch_b()))
        batch.out = d.combine_b()
        moe.check(batch)
        found["in steps"] = asked.copy()
        asked.clear()
        d.register_deepep_dispatch_hook(lambda dispatcher: None)
        moe.run(batch)
        moe.check(batch)
        found["with work of SGLang's own after dispatch"] = asked.copy()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_phases_are_apart_only_where_something_runs_between_them(ranks, mode):
    hook = mode != "normal"
    for found in ranks(2).run(phases, mode, timeout=TIMEOUT_S):
        assert found == {
            "at once": [False, False],
            "in steps": [hook, hook],
            "with work of SGLang's own after dispatch": [hook, False],
        }


def hooked(world: World) -> list[str]:
    from tests.server_plugins.sglang_layers import Batch, layer

    seen: list[str] = []
    with layer(world, "direct", lanes=2) as moe:
        d = moe.dispatcher
        d.register_pre_dispatch_hook(lambda dispatcher, x, routing: seen.append("before dispatch"))
        d.register_deepep_dispatch_hook(lambda dispatcher: seen.append("between a and b"))
        d.register_post_combine_hook(lambda dispatcher, out: seen.append("after combine"))
        batch = Batch.make(world.rank, 3)
        moe.run(batch)
        moe.check(batch)
    return seen


def test_sglangs_dispatcher_hooks_run(ranks):
    for seen in ranks(2).run(hooked, timeout=TIMEOUT_S):
        assert seen == ["before dispatch", "between a and b", "after combine"]
