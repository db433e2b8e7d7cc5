"""What a dispatch allocates: everything has its place, apart from all else, and memory follows the rows that came."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from ep_backend import layout
from ep_backend.config import BufferConfig
from ep_backend.fabric.base import Call, Routing
from ep_backend.fabric.nvshmem.outputs import PLACES, Outputs
from ep_backend.layout import Payload
from ep_backend.modes import Layout, Mode

CPU = torch.device("cpu")
H, K, E, R, MOST = 512, 3, 12, 4, 5
FORMS = list(itertools.product(Mode, Layout, (Payload.BF16, Payload.FP8, Payload.FP8_UE8M0)))


def outputs(mode: Mode, form: Layout, payload: Payload, *, per_expert: bool = False, most: int = MOST) -> Outputs:
    config = BufferConfig.make(
        R, hidden=H, num_experts=E, top_k=K, max_tokens={mode.value: most}, fabric="nvshmem", gpus_per_node=2
    )
    none = torch.empty(0)
    call = Call(mode, form, payload, 0, 1, most, 0, none, None, Routing(none, none), None, True)
    return Outputs(config.shape, call, CPU, per_expert=per_expert, ordered=form is Layout.MASKED)


def words(mode: Mode, form: Layout, payload: Payload, capacity: int, per_expert: bool) -> dict[str, int]:
    """Of each place, as kernels/include/ep/args.h has them."""
    masked, counted, e = form is Layout.MASKED, mode is Mode.NORMAL, E // R
    scales = {Payload.BF16: 0, Payload.FP8: H // 128, Payload.FP8_UE8M0: H // 512}[payload]
    record = layout.record(payload, H, K).bytes // 4
    return {
        "scales": scales * (e * (capacity + 3) // 4 * 4 if masked else capacity),
        "ids": 0 if masked else capacity * K,
        "weights": 0 if masked else capacity * K,
        "counts": 0 if counted else e,
        "plan": 0 if counted else R * (layout.CHANNELS + 1) + R + (e * (R + 1) if per_expert else 0),
        "target": capacity * (e if per_expert else 1),
        "position": capacity * K if masked and not per_expert else 0,
        "pick_weight": capacity * K if masked and not per_expert else 0,
        "relay": {Mode.HYBRID: 2, Mode.NORMAL: 1}.get(mode, 0) * 2 * MOST,
        "kept": capacity * record if counted and masked else 0,
    }


@pytest.mark.parametrize("mode,form,payload", FORMS)
@pytest.mark.parametrize("capacity", [0, 1, 7, R * MOST])
def test_no_two_share_a_word(mode: Mode, form: Layout, payload: Payload, capacity: int) -> None:
    for per_expert in (False, True) if mode is Mode.LOW_LATENCY and form is Layout.MASKED else (False,):
        made = outputs(mode, form, payload, per_expert=per_expert)
        rows, beside = made.make(capacity)
        beside.fill_(-1)
        at = dict(zip(PLACES, made.addresses(beside, capacity), strict=True))
        first, end = beside.data_ptr(), beside.data_ptr() + 4 * beside.numel()
        need = words(mode, form, payload, capacity, per_expert)
        for name, count in need.items():
            absent = words(mode, form, payload, 1, per_expert)[name] == 0
            assert (at[name] == 0) == absent, name
            if absent:
                continue
            assert first <= at[name] and at[name] + 4 * count <= end and (at[name] - first) % 128 == 0, name
            place = (ctypes.c_int32 * count).from_address(at[name])
            assert all(word == -1 for word in place), f"{name} lies on another"
            place[:] = [PLACES.index(name)] * count
        counts = torch.zeros(E // R, dtype=torch.int32) if mode is Mode.NORMAL else None
        got = made.received(rows, beside, counts, capacity, capacity, made.most)
        assert counts is None or got.counts is counts
        handed = {"scales": got.scales, "ids": got.topk_ids, "weights": got.topk_weights}
        for name, tensor in (handed if counts is not None else {**handed, "counts": got.counts}).items():
            assert (tensor is None) == (at[name] == 0)
            if tensor is not None and tensor.numel():
                assert tensor.data_ptr() == at[name]
                assert bool((tensor.contiguous().view(torch.int32) == PLACES.index(name)).all()), name


@pytest.mark.parametrize("payload", [Payload.BF16, Payload.FP8, Payload.FP8_UE8M0])
def test_shapes_and_types(payload: Payload) -> None:
    made = outputs(Mode.DIRECT, Layout.COMPACT, payload)
    rows, beside = made.make(made.most)
    got = made.received(rows, beside, None, made.most, 7, made.most)
    assert got.rows.shape == (7, H) and got.rows.dtype == (torch.bfloat16 if payload is Payload.BF16 else torch.float8_e4m3fn)
    assert got.topk_ids is not None and got.topk_ids.shape == (7, K) and got.topk_ids.dtype == torch.int32
    assert got.topk_weights is not None and got.topk_weights.shape == (7, K) and got.topk_weights.dtype == torch.float32
    assert got.num_rows == 7
    if payload is not Payload.BF16:
        width, dtype = (H // 128, torch.float32) if payload is Payload.FP8 else (H // 512, torch.int32)
        assert got.scales is not None and got.scales.shape == (7, width) and got.scales.dtype == dtype
    masked = outputs(Mode.LOW_LATENCY, Layout.MASKED, payload, most=3)
    rows, beside = masked.make(masked.most)
    got = masked.received(rows, beside, None, masked.most, None, masked.most)
    assert got.rows.shape == (E // R, R * 3, H)
    if payload is not Payload.BF16:
        assert got.scales is not None and got.scales.shape == (E // R, R * 3, width)
        assert got.scales.stride() == (width * R * 3, 1, R * 3)


def test_memory_of_normal_follows_its_rows() -> None:
    few, many = (outputs(Mode.NORMAL, Layout.COMPACT, Payload.FP8, most=most) for most in (64, 4096))
    relay = 4 * R // 2  # bytes a token that a relay may forward: one word a node
    sizes = [[t.untyped_storage().nbytes() for t in made.make(33)] for made in (few, many)]
    assert sizes[0][0] == sizes[1][0] == 33 * H
    assert sizes[1][1] - sizes[0][1] == (4096 - 64) * relay
    assert sizes[0][1] - 64 * relay <= 64 * 4 * (H // 128 + 2 * K + 1)
