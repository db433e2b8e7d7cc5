"""The SGLang plug-in with SGLang's DeepGEMM runner on a GPU: several processes against one without expert parallelism.

kernels/scripts/engine.sh runs this on a host that has no SGLang.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang", reason="these tests run SGLang's experts")

import torch

from tests.core.pool import World
from tests.server_plugins.moe import DEEPSEEK_V3, NOTHING, TOKENS

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(540)]

TIMEOUT_S = 500.0  # the first calls import SGLang and compile its kernels
MODES = ["normal", "direct", "low_latency", "hybrid"]
DECODE = ["low_latency", "hybrid"]
WORLDS = [pytest.param(2, 2, id="2"), pytest.param(4, 2, id="2x2")]
fp8_or_not = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
every_world = pytest.mark.parametrize(("size", "gpus_per_node"), WORLDS)


def every_batch(world: World, mode: str, gpus_per_node: int, fp8: bool, batches: list[tuple[int, ...]]) -> dict[str, Any]:
    from tests.server_plugins.moe import Batch, check, exact, weights
    from tests.server_plugins.sglang_gpu import Alone, Layer

    alone, lost = Alone(world, DEEPSEEK_V3, fp8), []
    with torch.inference_mode(), Layer(world, DEEPSEEK_V3, fp8, mode, gpus_per_node) as layer:
        for seed, tokens in enumerate(batches):
            batch = Batch.make(DEEPSEEK_V3, 10 * seed + world.rank, tokens[world.rank], world.device)
            truth = exact(weights(world, DEEPSEEK_V3, fp8), batch.without_holes())
            lost.append(check(layer.run(batch), alone.run(batch), truth, fp8))
        world.settle()
        (buffer,) = layer.runtime.buffers
        return {
            "counted": buffer.stats()["modes"][mode],
            "payloads": [p.name for p in buffer.config.payloads],
            "lost": lost,
        }


@every_world
@fp8_or_not
@pytest.mark.parametrize("mode", MODES)
def test_equals_one_process(ranks, size, gpus_per_node, fp8, mode):
    for seen in ranks(size, "nvshmem").run(every_batch, mode, gpus_per_node, fp8, TOKENS, timeout=TIMEOUT_S):
        print(f"sglang {size} ranks {mode} {seen['payloads'][0]}: {max(seen['lost']):.5f} of the exact result's norm lost")
        assert seen["counted"]["dispatches"] == seen["counted"]["combines"] == len(TOKENS)
        assert seen["payloads"] == ["FP8" if fp8 else "BF16"]


@every_world
@fp8_or_not
@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_receive_nothing(ranks, size, gpus_per_node, fp8, mode):
    for seen in ranks(size, "nvshmem").run(every_batch, mode, gpus_per_node, fp8, [NOTHING] * 2, timeout=TIMEOUT_S):
        assert seen["counted"]["combines"] == 2


def received(world: World, mode: str, gpus_per_node: int, fp8: bool) -> None:
    from sglang.srt.layers import deep_gemm_wrapper

    from tests.server_plugins.moe import BLOCK, Batch, picks_of
    from tests.server_plugins.sglang_gpu import Layer, routing

    shape, tokens = DEEPSEEK_V3, list(range(100, 100 + 7 * world.size, 7))
    local, room = shape.experts // world.size, shape.limit * world.size
    with torch.inference_mode(), Layer(world, shape, fp8, mode, gpus_per_node) as layer:
        batch = Batch.make(shape, world.rank, tokens[world.rank], world.device)
        got = layer.dispatcher.dispatch(hidden_states=batch.x, topk_output=routing(batch))
        rows, scales = got.hidden_states, got.hidden_states_scale
        picks = picks_of(shape, list(range(world.size)), tokens, world.rank)
        assert rows.dtype == (torch.float8_e4m3fn if fp8 else torch.bfloat16) and rows.is_contiguous()
        assert got.topk_ids.dtype == torch.int64 and got.topk_weights.dtype == torch.float32
        if mode in DECODE:
            assert got.format.is_deepep_ll() and rows.shape == (local, room, shape.hidden)
            assert got.masked_m.dtype == torch.int32 and torch.equal(got.masked_m.cpu().long(), picks)
            assert torch.equal(got.topk_ids, batch.ids.long())
        else:
            assert got.format.is_deepep_normal() and rows.shape[1] == shape.hidden
            assert got.topk_ids.shape == got.topk_weights.shape == (len(rows), shape.top_k)
            assert torch.equal(torch.bincount(got.topk_ids[got.topk_ids >= 0].cpu(), minlength=local), picks)
            assert got.num_recv_tokens_per_expert == [-(-count // 128) * 128 for count in picks.tolist()]
        assert (scales is None) == (not fp8)
        if fp8:
            assert scales.dtype == torch.float32 and scales.shape == (*rows.shape[:-1], shape.hidden // BLOCK)
            if mode in DECODE:  # the masked GEMM's own conversion finds nothing to do
                assert scales.stride() == (room * scales.size(2), 1, room)
                assert deep_gemm_wrapper.get_mn_major_tma_aligned_tensor(scales).data_ptr() == scales.data_ptr()
            else:  # scattered row by row before the contiguous GEMM
                assert scales.is_contiguous()
        answer = torch.zeros(rows.shape, dtype=torch.bfloat16, device=world.device)
        out = layer.dispatcher.combine(combine_input=(answer, got.topk_ids, got.topk_weights))
        assert out.shape == batch.x.shape and not out.any()


@every_world
@fp8_or_not
@pytest.mark.parametrize("mode", MODES)
def test_the_runner_gets_its_layout(ranks, size, gpus_per_node, fp8, mode):
    ranks(size, "nvshmem").run(received, mode, gpus_per_node, fp8, timeout=TIMEOUT_S)


def replayed(world: World, mode: str, gpus_per_node: int, fp8: bool) -> int:
    """One graph of the largest batch, replayed with every size, and eager batches in between."""
    from tests.server_plugins.moe import Batch, check, exact, weights
    from tests.server_plugins.sglang_gpu import Alone, Layer, capturing

    shape, every = DEEPSEEK_V3, weights(world, DEEPSEEK_V3, fp8)
    alone = Alone(world, shape, fp8)
    with torch.inference_mode(), Layer(world, shape, fp8, mode, gpus_per_node) as layer:
        static = Batch.make(shape, world.rank, shape.limit, world.device)
        layer.run(static)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        capturing(True)
        with torch.cuda.graph(graph):
            out = layer.run(static)
        capturing(False)
        for seed, tokens in enumerate([*TOKENS, NOTHING] * 2):
            batch = Batch.make(shape, 10 * seed + world.rank, tokens[world.rank], world.device)
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
        (buffer,) = layer.runtime.buffers
        assert buffer.failure() is None
        return buffer.stats()["modes"][mode]["dispatches"]


@every_world
@fp8_or_not
@pytest.mark.parametrize("mode", DECODE)
def test_captured_equals_one_process(ranks, size, gpus_per_node, fp8, mode):
    replays = 2 * len([*TOKENS, NOTHING])
    for dispatches in ranks(size, "nvshmem").run(replayed, mode, gpus_per_node, fp8, timeout=TIMEOUT_S):
        assert dispatches == 1 + replays + replays // 3


def two_sub_batches(world: World, mode: str, gpus_per_node: int, fp8: bool) -> None:
    from tests.server_plugins.moe import Batch, check, exact, weights
    from tests.server_plugins.sglang_gpu import Alone, Layer, capturing

    shape, every = DEEPSEEK_V3, weights(world, DEEPSEEK_V3, fp8)
    alone = Alone(world, shape, fp8)

    def right(batches: list[Batch], outputs: list[torch.Tensor]) -> None:
        for batch, out in zip(batches, outputs, strict=True):
            check(out[: len(batch.x)], alone.run(batch), exact(every, batch.without_holes()), fp8)

    with torch.inference_mode(), Layer(world, shape, fp8, mode, gpus_per_node, lanes=2) as layer:
        pairs = []
        for seed in range(len(TOKENS)):
            sizes = TOKENS[seed][world.rank], TOKENS[seed - 1][world.rank]
            seeds = 20 * seed + world.rank, 20 * seed + 10 + world.rank
            pairs.append([Batch.make(shape, s, n, world.device) for s, n in zip(seeds, sizes, strict=True)])
            right(pairs[-1], layer.run_two(pairs[-1]))
        if mode not in DECODE:
            return
        static = [Batch.make(shape, n, shape.limit, world.device) for n in range(2)]
        layer.run_two(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        capturing(True)
        with torch.cuda.graph(graph):
            outputs = layer.run_two(static)
        capturing(False)
        for batches in pairs:
            for to, batch in zip(static, batches, strict=True):
                to.refill(batch)
            graph.replay()
            right(batches, outputs)


@every_world
@fp8_or_not
@pytest.mark.parametrize("mode", MODES)
def test_two_sub_batches_alternate(ranks, size, gpus_per_node, fp8, mode):
    ranks(size, "nvshmem").run(two_sub_batches, mode, gpus_per_node, fp8, timeout=TIMEOUT_S)
