"""Every mode, layout, payload and topology against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_backend.routing import KINDS
from tests.core import oracle
from tests.core.pool import World, modes
from tests.core.rounds import Round

# ranks, gpus_per_node: one node, and virtual nodes so that both hops exist
TOPOLOGIES = [(1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (8, 8), (2, 1), (3, 1)]
TOPOLOGIES += [(4, 2), (8, 4), (8, 2), (6, 2), (6, 3)]
MODES = ("normal", "direct", "low_latency", "hybrid")


def uneven(ranks: int, turn: int, limit: int = 12) -> list[int]:
    """Tokens by rank: all full, then from none to full over the ranks, turned by ``turn``."""
    if turn % 4 == 0:
        return [limit] * ranks
    return [(r + turn) * 5 % (limit + 1) for r in range(ranks)]


def payloads(world: World) -> tuple[str, ...]:
    given = oracle.PAYLOADS if world.fabric == "host" else ("bf16", "fp8", "fp8_ue8m0")
    return given + tuple(oracle.CASTS)


def every_routing(world: World, mode: str, gpus_per_node: int) -> int:
    buffer = world.buffer(gpus_per_node=gpus_per_node)
    done = 0
    for turn, kind in enumerate(KINDS):
        for layout in ("compact", "masked"):
            # Many processes on few cores, or on one GPU, are slow: there some of the payloads, in turn.
            step = 1 if world.size <= 4 else 4 if world.device.type == "cuda" else 2
            for payload in payloads(world)[turn % step :: step]:
                case = oracle.make_case(done, uneven(world.size, turn), kind=kind)
                Round(world, buffer, case, mode, layout=layout, payload=payload, lane=done % 2).run()
                done += 1
    return done


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size,gpus", TOPOLOGIES, ids=[f"{r}ranks-{g}" for r, g in TOPOLOGIES])
def test_every_layout_payload_and_routing(ranks: Any, fabric: str, mode: str, size: int, gpus: int) -> None:
    if fabric == "nvshmem" and (size, gpus) in ((6, 6), (6, 2)):
        pytest.skip("six ranks run as 2 x 3, and in random steps; the time of a GPU is dear")
    done = ranks(size, fabric).run(every_routing, mode, gpus, timeout=200)
    each = len(KINDS) * 2 * (6 if fabric == "host" else 5)
    least = each if size <= 4 else 2 * len(KINDS) if fabric == "nvshmem" else each // 2
    assert len(set(done)) == 1 and done[0] >= least


def some_top_k(world: World, mode: str, top_k: int) -> None:
    per_expert = "per_expert" if mode == "low_latency" and top_k % 2 else "auto"
    with world.make(top_k=top_k, num_experts=48, hidden=128, low_latency_form=per_expert, gpus_per_node=2) as buffer:
        for seed, kind in enumerate(("uniform", "duplicates", "holes")):
            case = oracle.make_case(seed, [12, 5, 0, 1], kind=kind, experts=48, top_k=top_k, hidden=128)
            Round(world, buffer, case, mode).run()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 9, 11, 12, 16, 32])
def test_top_k(ranks: Any, mode: str, top_k: int) -> None:
    ranks(4).run(some_top_k, mode, top_k)


def some_hidden(world: World, hidden: int) -> None:
    """In bf16, and where the size has an FP8 form in all of them, turn by turn."""
    forms = ["bf16"] if hidden % 128 else ["fp8_cast", "fp8_ue8m0", "fp8", "fp8_ue8m0_cast"]
    with world.make(hidden=hidden, gpus_per_node=1) as buffer:
        for n, mode in enumerate(modes(world.fabric)):
            case = oracle.make_case(hidden, [3, 12], hidden=hidden)
            Round(world, buffer, case, mode).run()
            Round(world, buffer, case, mode, payload=forms[(n + hidden // 128) % len(forms)]).run()


HIDDEN = [8, 64, 512, 640, 1000, 1024, 1152, 1536, 2048, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192]


@pytest.mark.parametrize("hidden", HIDDEN)
def test_hidden_has_no_blessed_sizes(ranks: Any, fabric: str, hidden: int) -> None:
    ranks(2, fabric).run(some_hidden, hidden)


def some_local_experts(world: World, local: int) -> None:
    experts = local * world.size
    with world.make(num_experts=experts, top_k=1, hidden=128) as buffer:
        for mode in modes(world.fabric):
            case = oracle.make_case(local, [12, 2], experts=experts, top_k=1, hidden=128)
            Round(world, buffer, case, mode).run()


@pytest.mark.parametrize("local", [1, 2, 33, 64, 72, 128])
def test_local_experts(ranks: Any, fabric: str, local: int) -> None:
    ranks(2, fabric).run(some_local_experts, local)


def few_tokens(world: World) -> None:
    buffer = world.buffer()
    for mode in modes(world.fabric):
        for tokens in ([0, 0], [1, 0], [0, 12], [2, 3], [0, 0], [12, 12]):
            for payload in ("bf16", "fp8", "fp8_cast"):
                case = oracle.make_case(sum(tokens), tokens)
                done = Round(world, buffer, case, mode, payload=payload).run()
                assert done.out is not None and done.out.shape == (tokens[world.rank], 256)


def test_empty_and_tiny_batches(ranks: Any, fabric: str) -> None:
    ranks(2, fabric).run(few_tokens)


def some_tokens(world: World, tokens: int) -> None:
    counts = [tokens, 0, tokens // 2 + tokens % 2, 1][: world.size]
    with world.make(max_tokens=dict.fromkeys(modes(world.fabric), max(tokens, 1)), lanes=1) as buffer:
        for mode in modes(world.fabric):
            for payload in ("bf16", "fp8"):
                Round(world, buffer, oracle.make_case(tokens, counts), mode, payload=payload).run()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 1024, 4096])
def test_as_many_tokens_as_the_buffer_takes(ranks: Any, fabric: str, tokens: int) -> None:
    if fabric == "host" and tokens > 1024:
        pytest.skip("takes long on a CPU and has no other code path than 1024")
    ranks(4 if fabric == "host" else 2, fabric).run(some_tokens, tokens)


def both_id_types(world: World) -> None:
    buffer = world.buffer()
    for mode in modes(world.fabric):
        case = oracle.make_case(7, [9, 4], kind="holes")
        wide = Round(world, buffer, case, mode).run()
        narrow = Round(world, buffer, case, mode, ids_dtype=torch.int32).run()
        assert wide.out is not None and narrow.out is not None
        assert torch.equal(wide.out, narrow.out), mode


def test_ids_of_either_width_give_the_same_bits(ranks: Any, fabric: str) -> None:
    ranks(2, fabric).run(both_id_types)


def no_host_counts(world: World) -> None:
    buffer = world.buffer()
    for mode in modes(world.fabric):
        for tokens in ([5, 12], [0, 0], [12, 0]):
            case = oracle.make_case(1, tokens, kind="holes")
            done = Round(world, buffer, case, mode, layout="compact", host_counts=False).run()
            if mode != "normal":
                assert done.got.num_rows is None
                assert len(done.got.rows) == 2 * 12
            most = max(tokens)
            for hook in (False, True) if mode != "normal" else (False,):
                known = Round(world, buffer, case, mode, layout="compact", hook=hook, host_counts=False, most_tokens=most).run()
                if mode != "normal":
                    assert len(known.got.rows) == len(known.got.topk_ids) == len(known.got.topk_weights) == 2 * most


def test_rows_uncut_without_the_host_count(ranks: Any, fabric: str) -> None:
    ranks(2, fabric).run(no_host_counts)


def other_defaults(world: World) -> None:
    buffer = world.buffer()
    for mode in modes(world.fabric):
        for layout in ("compact", "masked"):
            case = oracle.make_case(11, [9, 4])
            before = Round(world, buffer, case, mode, layout=layout, payload="fp32").run()
            try:
                torch.set_default_dtype(torch.bfloat16)
                torch.set_default_device("meta")
                got = buffer.dispatch(before.x, case.ids[world.rank], case.weights[world.rank], mode=mode, layout=layout)
                assert before.y is not None and before.out is not None
                out = buffer.combine(before.y, got.handle)
            finally:
                torch.set_default_dtype(torch.float32)
                torch.set_default_device(None)
            assert torch.equal(got.counts, before.got.counts) and torch.equal(out, before.out), (mode, layout)


def test_torchs_defaults_of_type_and_device_change_nothing(ranks: Any) -> None:
    """A script that serves a bf16 model may have set them; sums are made in fp32 all the same."""
    ranks(2).run(other_defaults)
