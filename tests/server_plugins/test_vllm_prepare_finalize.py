"""Prepare and finalize between two processes, against the same MoE in one."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM")

import torch

from tests.core.pool import World

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TIMEOUT_S = 240.0  # the first call imports vLLM
ROLES = {"normal": "prefill", "direct": "prefill", "low_latency": "decode", "hybrid": "decode"}
TOKENS = [(12, 12), (0, 7), (5, 0), (0, 0), (1, 12)]
FORMS = [*((mode, None) for mode in ROLES), ("low_latency", "compact"), ("hybrid", "compact")]
every_form = pytest.mark.parametrize(("mode", "layout"), FORMS, ids=["-".join(filter(None, form)) for form in FORMS])


def settings(mode: str, layout: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": ROLES[mode], "mode": mode, "layout": layout, "timeout_s": 30.0, **more}


def every_batch(world: World, mode: str, layout: str | None, gpus_per_node: int, dtype: str) -> dict[str, Any]:
    from tests.server_plugins.layers import Batch, Layer, check

    kind = getattr(torch, dtype)
    with Layer(world, settings(mode, layout, gpus_per_node=gpus_per_node), dtype=kind) as layer:
        for seed, tokens in enumerate(TOKENS):
            batch = Batch.make(10 * seed + world.rank, tokens[world.rank], kind)
            layer.run(batch)
            check(batch, 1e-5 if kind is torch.float32 else 2e-2)
        (buffer,) = layer.manager.buffers
        return {**buffer.stats()["modes"], "payloads": [p.name for p in buffer.config.payloads]}


@every_form
@pytest.mark.parametrize("gpus_per_node", [2, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_one_process(ranks, mode, layout, gpus_per_node, dtype):
    for counted in ranks(2).run(every_batch, mode, layout, gpus_per_node, dtype, timeout=TIMEOUT_S):
        assert counted[mode]["dispatches"] == counted[mode]["combines"] == len(TOKENS)
        assert counted["payloads"] == ["FP32" if dtype == "float32" else "BF16"]


def two_micro_batches(world: World, mode: str, layout: str | None) -> None:
    import server_plugins.vllm.prepare_finalize as adapter
    from tests.server_plugins.layers import Batch, Layer, check, finish

    with pytest.MonkeyPatch.context() as patch, Layer(world, settings(mode, layout), lanes=2) as layer:
        patch.setattr(adapter, "dbo_enabled", lambda: True)
        for seed in range(3):
            a, b = (Batch.make(100 * seed + 10 * lane + world.rank, 4 + lane + world.rank) for lane in (0, 1))
            to_a = layer.prepare(a, 0)
            to_b = layer.prepare(b, 1)
            y_a = layer.compute(finish(to_a))
            y_b = layer.compute(finish(to_b))
            from_b = layer.finalize(b, y_b, 1)
            from_a = layer.finalize(a, y_a, 0)
            finish(from_b)
            finish(from_a)
            check(a)
            check(b)


@every_form
def test_two_micro_batches_interleave(ranks, mode, layout):
    ranks(2).run(two_micro_batches, mode, layout, timeout=TIMEOUT_S)


def router_weights_on_input(world: World, mode: str) -> None:
    from tests.server_plugins.layers import Batch, Layer, check

    with Layer(world, settings(mode), top_k=1) as layer:
        batch = Batch.make(world.rank, 6, top_k=1)
        layer.run(batch, on_input=True)
        check(batch, weights_on_input=True)


@pytest.mark.parametrize("mode", ["direct", "low_latency"])
def test_router_weights_on_input(ranks, mode):
    ranks(2).run(router_weights_on_input, mode, timeout=TIMEOUT_S)


def round_robin(world: World, mode: str, layout: str | None) -> None:
    from tests.server_plugins.layers import EXPERTS, Batch, Layer, check

    experts = torch.arange(EXPERTS)
    to_physical = experts % world.size * (EXPERTS // world.size) + experts // world.size
    tables = to_physical, to_physical.argsort(), experts
    with Layer(world, settings(mode, layout), tables=tables) as layer:
        batch = Batch.make(world.rank, 9)
        layer.run(batch)
        check(batch)


@pytest.mark.parametrize(("mode", "layout"), [("direct", None), ("low_latency", None), ("low_latency", "compact")])
def test_round_robin_placement(ranks, mode, layout):
    ranks(2).run(round_robin, mode, layout, timeout=TIMEOUT_S)


def change_between_calls(world: World, modes: tuple[str, str], layout: str | None) -> Any:
    from ep_backend.modes import Mode
    from tests.server_plugins.layers import LIMIT, Batch, Layer, check

    with Layer(world, settings(modes[0], layout, max_tokens=dict.fromkeys(modes, LIMIT))) as layer:
        for step in range(6):
            layer.manager.flip.mode = Mode(modes[step % 2])
            batch = Batch.make(10 * step + world.rank, step)
            layer.run(batch)
            check(batch)
        (buffer,) = layer.manager.buffers
        return buffer.stats()["modes"]


DECODE = ("low_latency", "hybrid")


@pytest.mark.parametrize(("modes", "layout"), [(("direct", "normal"), None), (DECODE, None), (DECODE, "compact")])
def test_the_mode_is_read_at_every_call(ranks, modes, layout):
    for counted in ranks(2).run(change_between_calls, modes, layout, timeout=TIMEOUT_S):
        assert {m: counted[m]["combines"] for m in modes} == dict.fromkeys(modes, 3)


def auto_by_tokens(world: World) -> Any:
    from vllm.forward_context import override_forward_context

    from tests.server_plugins.layers import LIMIT, Batch, Layer, check

    wish = {"role": "prefill", "max_tokens": {"direct": 4, "normal": LIMIT}, "timeout_s": 30.0}
    with Layer(world, wish) as layer:
        for seed, tokens in enumerate([(4, 3), (1, 5), (0, 4)]):
            agreed = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens))
            with override_forward_context(SimpleNamespace(dp_metadata=agreed)):
                batch = Batch.make(seed + world.rank, tokens[world.rank])
                layer.run(batch)
            check(batch)
        (buffer,) = layer.manager.buffers
        return buffer.stats()["modes"]


def test_auto_decides_by_the_largest_batch_of_any_rank(ranks):
    for counted in ranks(2).run(auto_by_tokens, timeout=TIMEOUT_S):
        assert {m: c["dispatches"] for m, c in counted.items()} == {"direct": 2, "normal": 1}


def uncounted_rows(world: World, mode: str, share: int) -> list[int]:
    from vllm.forward_context import override_forward_context

    from tests.server_plugins.layers import LIMIT, Batch, Layer, check, finish

    seen, most = [], LIMIT // share
    with Layer(world, settings(mode, "compact"), share=share) as layer:
        assert layer.pf.max_num_tokens_per_rank() is None
        for seed, tokens in enumerate([(2, 3), (4, 3), (1, 5), (0, 1), None]):
            agreed = tokens and SimpleNamespace(num_tokens_across_dp_cpu=share * torch.tensor(tokens))
            with override_forward_context(SimpleNamespace(dp_metadata=agreed)):
                batch = Batch.make(seed + world.rank, tokens[world.rank] if tokens else most)
                received = finish(layer.prepare(batch))
                y = layer.compute(received)
                finish(layer.finalize(batch, y))
            check(batch)
            rows, _, _, ids, weights = received
            assert len(rows) == len(ids) == len(weights) == len(y)
            seen.append(len(rows))
        more = SimpleNamespace(dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([2 * share] * world.size)))
        with override_forward_context(more), pytest.raises(ValueError, match="3 tokens exceed most_tokens=2 of this call"):
            layer.prepare(Batch.make(world.rank, 3))
    return seen


@pytest.mark.parametrize("mode", DECODE)
@pytest.mark.parametrize("share", [1, 2])
def test_decoding_rows_are_as_many_as_the_largest_batch_allows(ranks, mode, share):
    for seen in ranks(2).run(uncounted_rows, mode, share, timeout=TIMEOUT_S):
        assert seen[0] == 2 * 12 // share, "what vLLM sizes its workspaces by"
        assert seen[1:] == [2 * 4, 2 * 5, 2 * 1, 2 * 12 // share]


def quantised_rows(world: World, mode: str, layout: str | None, fp8: bool, tokens: tuple[int, int]) -> Any:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    import server_plugins.vllm.prepare_finalize as adapter
    from tests.server_plugins.layers import HIDDEN, Batch, Layer, finish

    def quantise(a: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(a), "a grid of no blocks"
        groups = a.float().view(-1, HIDDEN // 128, 128)
        scales = groups.abs().amax(-1).clamp(min=1e-4) / 448
        return (groups / scales[..., None]).view(-1, HIDDEN).to(torch.float8_e4m3fn), scales

    config = FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[128, 128])
    with (
        pytest.MonkeyPatch.context() as patch,
        Layer(world, settings(mode, layout, fp8=fp8), dtype=torch.bfloat16, quant_config=config) as layer,
    ):
        # vLLM's own runs on accelerators only.
        patch.setattr(adapter, "moe_kernel_quantize_input", quantise)
        batch = Batch.make(world.rank, tokens[world.rank], torch.bfloat16)
        rows, scales, _, _, _ = finish(layer.prepare(batch))
        (buffer,) = layer.manager.buffers
        finish(layer.finalize(batch, torch.zeros(rows.shape, dtype=torch.bfloat16)))
        seen = {"rows": rows.dtype, "scales": tuple(scales.shape) == (*rows.shape[:-1], HIDDEN // 128)}
        return {**seen, "payloads": [p.name for p in buffer.config.payloads]}


@every_form
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("tokens", [(8, 8), (8, 0)])
def test_block_quantised_experts_get_fp8_rows(ranks, mode, layout, fp8, tokens):
    for seen in ranks(2).run(quantised_rows, mode, layout, fp8, tokens, timeout=TIMEOUT_S):
        assert seen == {"rows": torch.float8_e4m3fn, "scales": True, "payloads": ["FP8" if fp8 else "BF16"]}


def scale_of_all_rows(world: World, mode: str, layout: str | None) -> tuple[float, float]:
    """What per-tensor quantisation made of what was received, and what the largest value received asks for."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    import server_plugins.vllm.prepare_finalize as adapter
    from tests.server_plugins.layers import Batch, Layer, finish

    def quantise(a: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scale = a.float().abs().amax() / 448
        return (a.float() / scale).to(torch.float8_e4m3fn), scale.reshape(1)

    config = FusedMoEQuantConfig.make(torch.float8_e4m3fn)
    with (
        pytest.MonkeyPatch.context() as patch,
        Layer(world, settings(mode, layout), dtype=torch.bfloat16, quant_config=config) as layer,
    ):
        patch.setattr(adapter, "moe_kernel_quantize_input", quantise)
        batches = [Batch.make(rank, 3 + rank, torch.bfloat16) for rank in range(world.size)]
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        try:
            rows, scales, _, _, _ = finish(layer.prepare(batches[world.rank]))
        finally:
            torch.use_deterministic_algorithms(False)
        finish(layer.finalize(batches[world.rank], torch.zeros(rows.shape, dtype=torch.bfloat16)))
        mine = [(b.ids >= 0) & (b.ids // len(layer.experts) == world.rank) for b in batches]
        largest = max(float(b.x[here.any(1)].abs().max()) for b, here in zip(batches, mine, strict=True))
        return float(scales.flatten()[0]), largest / 448


@every_form
def test_one_scale_for_all_rows_is_that_of_received_ones(ranks, mode, layout):
    for scale, wanted in ranks(2).run(scale_of_all_rows, mode, layout, timeout=TIMEOUT_S):
        assert scale == pytest.approx(wanted)


def accelerator_ids(world: World) -> None:
    import server_plugins.vllm.prepare_finalize as adapter
    from tests.server_plugins.layers import EXPERTS, Layer

    local = EXPERTS // world.size
    expert_map = torch.full((EXPERTS,), -1)
    expert_map[world.rank * local : (world.rank + 1) * local] = torch.arange(local)
    ids = torch.tensor([[0, -1], [local - 1, 2]])
    with pytest.MonkeyPatch.context() as patch, Layer(world, settings("direct")) as layer:
        assert layer.pf._ids(ids).tolist() == [[0, 0], [local - 1, 2]]
        patch.setattr(adapter, "current_platform", SimpleNamespace(is_cpu=lambda: False))
        assert torch.equal(expert_map[layer.pf._ids(ids)], ids)


def test_ids_for_experts_that_read_an_expert_map(ranks):
    ranks(2).run(accelerator_ids, timeout=TIMEOUT_S)


def too_many_tokens(world: World) -> str:
    from tests.server_plugins.layers import LIMIT, Batch, Layer, check

    with Layer(world, settings("direct")) as layer:
        with pytest.raises(ValueError) as refused:
            layer.run(Batch.make(world.rank, LIMIT + 1))
        batch = Batch.make(world.rank, 3)
        layer.run(batch)
        check(batch)
        return str(refused.value)


def test_an_exception_reaches_the_engine_and_a_refused_call_leaves_the_layer_usable(ranks):
    for text in ranks(2).run(too_many_tokens, timeout=TIMEOUT_S):
        assert "13 tokens exceed max_tokens=12 of mode direct" in text
