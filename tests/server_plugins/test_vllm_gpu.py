"""The vLLM plug-in with vLLM's real experts on a GPU: several processes against one without expert parallelism.

Triton experts in bf16, DeepGEMM in FP8, their batched forms for masked rows. kernels/scripts/engine.sh runs this on a
host that has no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="these tests run vLLM's experts")

import torch

from tests.core.pool import World
from tests.server_plugins.moe import DEEPSEEK_V3, NOTHING, TOKENS

if TYPE_CHECKING:
    from tests.server_plugins.vllm_gpu import Form

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(540)]

TIMEOUT_S = 500.0  # the first calls import vLLM and compile its kernels
DECODE = ["low_latency", "hybrid"]
MASKED, COMPACT = [(mode, None) for mode in DECODE], [(mode, "compact") for mode in DECODE]
FORMS = [("normal", None), ("direct", None), *MASKED, *COMPACT]
WORLDS = [pytest.param(2, 2, id="2"), pytest.param(4, 2, id="2x2")]
EXPERTS = {  # by FP8 and masked rows
    (False, False): "TritonExperts",
    (False, True): "BatchedTritonExperts",
    (True, False): "TritonOrDeepGemmExperts",
    (True, True): "BatchedDeepGemmExperts",
}
fp8_or_not = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
every_form = pytest.mark.parametrize(("mode", "layout"), FORMS, ids=["-".join(filter(None, form)) for form in FORMS])
decode_form = pytest.mark.parametrize(("mode", "layout"), [*MASKED, *COMPACT])
every_world = pytest.mark.parametrize(("size", "gpus_per_node"), WORLDS)


def every_batch(world: World, form: Form, fp8: bool, batches: list[tuple[int, ...]]) -> dict[str, Any]:
    from tests.server_plugins.moe import Batch, check, exact, weights
    from tests.server_plugins.vllm_gpu import Layer

    alone = Layer(world, DEEPSEEK_V3, fp8)
    with Layer(world, DEEPSEEK_V3, fp8, ep=form) as layer:
        lost = []
        for seed, tokens in enumerate(batches):
            batch = Batch.make(DEEPSEEK_V3, 10 * seed + world.rank, tokens[world.rank], world.device)
            truth = exact(weights(world, DEEPSEEK_V3, fp8), batch.without_holes())
            lost.append(check(layer.run(batch), alone.run(batch), truth, fp8))
        world.settle()
        (buffer,) = layer.manager.buffers
        return {
            "counted": buffer.stats()["modes"][form[0]],
            "payloads": [p.name for p in buffer.config.payloads],
            "experts": layer.experts,
            "lost": lost,
        }


@every_world
@fp8_or_not
@every_form
def test_equals_one_process(ranks, size, gpus_per_node, fp8, mode, layout):
    for seen in ranks(size, "nvshmem").run(every_batch, (mode, layout, gpus_per_node), fp8, TOKENS, timeout=TIMEOUT_S):
        what = " ".join(filter(None, (mode, layout, "fp8" if fp8 else "bf16", seen["experts"])))
        print(f"vllm {size} ranks {what}: lost {max(seen['lost']):.5f} of the norm")
        assert seen["counted"]["dispatches"] == seen["counted"]["combines"] == len(TOKENS)
        assert seen["payloads"] == ["FP8" if fp8 else "BF16"]
        assert seen["experts"] == EXPERTS[fp8, (mode, layout) in MASKED]


@every_world
@fp8_or_not
@every_form
def test_ranks_that_receive_nothing(ranks, size, gpus_per_node, fp8, mode, layout):
    for seen in ranks(size, "nvshmem").run(every_batch, (mode, layout, gpus_per_node), fp8, [NOTHING] * 2, timeout=TIMEOUT_S):
        assert seen["counted"]["combines"] == 2


def received(world: World, form: Form, fp8: bool) -> None:
    from vllm.utils.deep_gemm import get_col_major_tma_aligned_tensor

    from tests.server_plugins.moe import BLOCK, Batch, picks_of
    from tests.server_plugins.vllm_gpu import Layer

    shape, tokens = DEEPSEEK_V3, list(range(100, 100 + 7 * world.size, 7))
    local, room, masked = shape.experts // world.size, shape.limit * world.size, form[:2] in MASKED
    with Layer(world, shape, fp8, ep=form) as layer:
        batch = Batch.make(shape, world.rank, tokens[world.rank], world.device)
        rows, scales, meta, ids, weights = layer.prepare(batch)
        counts = meta.expert_num_tokens
        assert rows.dtype == (torch.float8_e4m3fn if fp8 else torch.bfloat16) and rows.is_contiguous()
        assert (counts.dtype, counts.device) == (torch.int32, rows.device)
        assert torch.equal(counts.cpu().long(), picks_of(shape, list(range(world.size)), tokens, world.rank))
        if masked:
            assert rows.shape == (local, room, shape.hidden) and ids is weights is None
        else:
            assert rows.shape[1] == shape.hidden and ids.shape == weights.shape == (len(rows), shape.top_k)
            assert ids.dtype.is_signed and weights.dtype == torch.float32 and int(ids.min()) >= 0
            mine = layer.expert_map[ids.long()]
            assert torch.equal(torch.bincount(mine[mine >= 0], minlength=local).int(), counts)
            assert not weights[mine < 0].any()
            assert form[1] is None or len(rows) == room
        assert (scales is None) == (not fp8)
        if fp8:
            assert scales.dtype == torch.float32 and scales.shape == (*rows.shape[:-1], shape.hidden // BLOCK)
            if masked:  # the masked GEMM's own conversion finds nothing to do
                assert scales.stride() == (room * scales.size(2), 1, room)
                assert get_col_major_tma_aligned_tensor(scales).data_ptr() == scales.data_ptr()
            else:  # permuted row by row before the contiguous GEMM
                assert scales.is_contiguous()
        out = layer.finalize(batch, torch.zeros(rows.shape, dtype=torch.bfloat16, device=world.device))
        assert out.shape == batch.x.shape and not out.any()


@every_world
@fp8_or_not
@every_form
def test_the_experts_get_their_layout(ranks, size, gpus_per_node, fp8, mode, layout):
    ranks(size, "nvshmem").run(received, (mode, layout, gpus_per_node), fp8, timeout=TIMEOUT_S)


def replayed(world: World, form: Form, fp8: bool) -> int:
    """One graph of the largest batch, replayed with every size, and eager batches in between. Compact rows depend on what ranks
    agreed on: there the graph is of a smaller step, and no larger batch is replayed."""
    from vllm.forward_context import override_forward_context

    from tests.server_plugins.moe import Batch, check, exact, weights
    from tests.server_plugins.vllm_gpu import Layer, forward_context

    shape, every = DEEPSEEK_V3, weights(world, DEEPSEEK_V3, fp8)
    most = shape.limit if form[:2] in MASKED else 128
    alone = Layer(world, shape, fp8)
    with torch.inference_mode(), Layer(world, shape, fp8, ep=form) as layer:
        layer.run(Batch.make(shape, world.rank, shape.limit, world.device))  # compiles, and grows vLLM's workspace
        static = Batch.make(shape, world.rank, most, world.device)
        graph = torch.cuda.CUDAGraph()
        with override_forward_context(forward_context((most,) * world.size)):
            layer.run(static)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = layer.run(static)
        for seed, tokens in enumerate([*TOKENS, NOTHING] * 2):
            batch = Batch.make(shape, 10 * seed + world.rank, min(tokens[world.rank], most), world.device)
            static.refill(batch)
            out.fill_(float("nan"))
            graph.replay()
            got = out[: len(batch.x)].clone()
            assert not out[len(batch.x) :].any(), "rows of padding"
            truth, one_process = exact(every, batch.without_holes()), alone.run(batch)
            check(got, one_process, truth, fp8)
            if seed % 3 == 0:
                check(layer.run(batch), one_process, truth, fp8)
        world.settle()
        (buffer,) = layer.manager.buffers
        assert buffer.failure() is None
        return buffer.stats()["modes"][form[0]]["dispatches"]


@every_world
@fp8_or_not
@decode_form
def test_captured_equals_one_process(ranks, size, gpus_per_node, fp8, mode, layout):
    replays = 2 * len([*TOKENS, NOTHING])
    for dispatches in ranks(size, "nvshmem").run(replayed, (mode, layout, gpus_per_node), fp8, timeout=TIMEOUT_S):
        assert dispatches == 2 + replays + replays // 3


def two_micro_batches(world: World, form: Form, fp8: bool, captured: bool) -> None:
    from tests.server_plugins.moe import Batch, check, exact, weights
    from tests.server_plugins.vllm_gpu import Layer, MicroBatches

    shape, every = DEEPSEEK_V3, weights(world, DEEPSEEK_V3, fp8)
    alone = Layer(world, shape, fp8)

    def right(batches: list[Batch], outputs: list[torch.Tensor]) -> None:
        for batch, out in zip(batches, outputs, strict=True):
            check(out[: len(batch.x)], alone.run(batch), exact(every, batch.without_holes()), fp8)

    with torch.inference_mode(), Layer(world, shape, fp8, ep=form, lanes=2) as layer:
        pairs = []
        for seed in range(len(TOKENS)):
            tokens = [TOKENS[seed][: world.size], TOKENS[seed - 1][: world.size]]
            seeds = (20 * seed + world.rank, 20 * seed + 10 + world.rank)
            pairs.append([Batch.make(shape, s, t[world.rank], world.device) for s, t in zip(seeds, tokens, strict=True)])
            right(pairs[-1], MicroBatches(layer, pairs[-1], tokens).run())
        if not captured:
            return
        static = [Batch.make(shape, n, shape.limit, world.device) for n in range(2)]
        full = [(shape.limit,) * world.size] * 2
        MicroBatches(layer, static, full).run()
        graph = torch.cuda.CUDAGraph()
        outputs = MicroBatches(layer, static, full).run(graph)
        for batches in pairs:
            for to, batch in zip(static, batches, strict=True):
                to.refill(batch)
            graph.replay()
            torch.cuda.synchronize()
            right(batches, outputs)


@every_world
@fp8_or_not
@every_form
def test_two_micro_batches_alternate(ranks, size, gpus_per_node, fp8, mode, layout):
    ranks(size, "nvshmem").run(two_micro_batches, (mode, layout, gpus_per_node), fp8, mode in DECODE, timeout=TIMEOUT_S)
