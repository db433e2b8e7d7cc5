"""Rules of the constructor's arguments: each refusal names the value, the rule and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_backend import layout
from ep_backend.config import BufferConfig
from ep_backend.modes import Mode

GOOD: dict[str, Any] = {
    "hidden": 256,
    "num_experts": 24,
    "top_k": 4,
    "max_tokens": {"direct": 8, "low_latency": 8},
}

# ranks, changed arguments, words the message must have
REFUSED = [
    (0, {}, ["0 ranks", "at least 1"]),
    (4, {"gpus_per_node": 3}, ["gpus_per_node=3", "4 ranks", "divisor"]),
    (4, {"gpus_per_node": 8}, ["gpus_per_node=8", "divide"]),
    (4, {"gpus_per_node": 0}, ["gpus_per_node=0"]),
    (4, {"num_experts": 258}, ["num_experts=258", "multiple of the 4 ranks", "redundant"]),
    (4, {"num_experts": 0}, ["num_experts=0"]),
    (1, {"top_k": 0}, ["top_k=0", "1..32"]),
    (1, {"top_k": 33}, ["top_k=33", "1..32"]),
    (1, {"hidden": 7170}, ["hidden=7170", "multiple of 8", "pad"]),
    (1, {"hidden": 0}, ["hidden=0"]),
    (1, {"hidden": -8}, ["hidden=-8"]),
    (1, {"hidden": 2888, "payloads": ("fp8",)}, ["hidden=2888", "scale group 128", "bf16"]),
    (1, {"hidden": 2888, "payloads": ("fp8_ue8m0",)}, ["hidden=2888", "scale group 128", "bf16"]),
    (1, {"payloads": ("fp4",)}, ["'fp4'", "bf16, fp8, fp8_ue8m0, fp32"]),
    (1, {"payloads": ()}, ["payloads is empty"]),
    (1, {"payloads": ("fp32",), "fabric": "nvshmem"}, ["fp32", "host fabric"]),
    (1, {"max_tokens": {}}, ["max_tokens={}", "at least one mode"]),
    (1, {"max_tokens": {"direct": 0}}, ["max_tokens={'direct': 0}"]),
    (1, {"max_tokens": {"direct": -1}}, ["max_tokens={'direct': -1}"]),
    (1, {"max_tokens": {"direct": 1 << 24}}, [str(1 << 24), str((1 << 24) - 1)]),
    (1, {"max_tokens": {"fast": 8}}, ["'fast'", "normal, direct, low_latency, hybrid"]),
    (256, {"max_tokens": {"direct": 1 << 23}, "num_experts": 256}, ["256 ranks", "2**31"]),
    (1, {"lanes": 0}, ["lanes=0"]),
    (1, {"lanes": 3}, ["lanes=3", "micro-batches"]),
    (1, {"timeout_s": 0}, ["timeout_s=0", "seconds"]),
    (1, {"timeout_s": -1}, ["timeout_s=-1", "positive"]),
    (1, {"timeout_s": float("nan")}, ["timeout_s=nan", "positive"]),
    (1, {"timeout_s": float("inf")}, ["timeout_s=inf", "at most 1e+09"]),
    (1, {"payloads": ([],)}, ["payload []", "bf16, fp8"]),
    (1, {"low_latency_form": "x"}, ["low_latency_form='x'", "per_rank, per_expert"]),
    (1, {"rail": "x"}, ["rail='x'", "peer, put"]),
    (1, {"fabric": "HOST", "payloads": ("fp32",)}, ["fabric='HOST'", "none of host, nvshmem"]),
    (1, {"fabric": ""}, ["fabric=''", "none of host, nvshmem"]),
    (1, {"ring_slots": 0}, ["ring_slots=0"]),
]


@pytest.mark.parametrize("ranks,changes,words", REFUSED, ids=lambda v: str(v)[:40])
def test_refusals(ranks: int, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        BufferConfig.make(ranks, **{**GOOD, **changes})
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    "name,value,words",
    [
        *((name, "16", ["str", "whole number"]) for name in ("hidden", "num_experts", "top_k", "lanes", "ring_slots")),
        *((name, 1.5, ["float", "whole number"]) for name in ("hidden", "gpus_per_node", "ring_slots")),
        ("hidden", None, ["NoneType", "whole number"]),
        ("lanes", True, ["bool", "whole number"]),
        ("max_tokens", 128, ["int", "by mode", "{'direct': 128}"]),
        ("max_tokens", None, ["NoneType", "by mode"]),
        ("max_tokens", {"direct": 16.7}, ["max_tokens['direct']=16.7", "float", "whole number"]),
        ("max_tokens", {"direct": "16"}, ["max_tokens['direct']='16'", "str", "whole number"]),
        ("timeout_s", "5", ["str", "seconds"]),
        ("timeout_s", None, ["NoneType", "seconds"]),
        ("payloads", None, ["NoneType", "tuple of names"]),
        ("payloads", "bf16", ["str", "tuple of names"]),
        ("deterministic", "no", ["str", "True or False"]),
    ],
    ids=str,
)
def test_wrong_types(name: str, value: object, words: list[str]) -> None:
    with pytest.raises(TypeError) as refused:
        BufferConfig.make(2, **{**GOOD, name: value})
    said = f"{name}={value!r}"
    for word in words if isinstance(value, dict) else [said, *words]:
        assert word in str(refused.value)


@pytest.mark.parametrize("integer", [np.int64, np.int32])
def test_integers_of_any_library(integer: Any) -> None:
    arguments = {name: integer(n) for name, n in GOOD.items() if name != "max_tokens"}
    made = BufferConfig.make(2, **arguments, max_tokens={"direct": integer(8), "low_latency": integer(8)})
    assert made == BufferConfig.make(2, **GOOD)


@pytest.mark.parametrize("experts,ranks", [(288, 4), (33 * 4, 4), (256, 256), (2048, 1024)])
def test_accepted_expert_counts(experts: int, ranks: int) -> None:
    made = BufferConfig.make(ranks, **{**GOOD, "num_experts": experts})
    assert made.shape.local_experts == experts // ranks


def test_default_payloads_leave_fp8_out_where_it_has_no_form() -> None:
    made = BufferConfig.make(1, **{**GOOD, "hidden": 2888})
    assert made.as_dict()["payloads"] == ["bf16"]


@given(
    ranks=st.sampled_from([1, 2, 4, 8, 64, 256, 1024]),
    tokens=st.dictionaries(st.sampled_from([m.value for m in Mode]), st.integers(0, 4096)),
    lanes=st.integers(1, 2),
    slots=st.integers(1, 1024),
    form=st.sampled_from(["auto", "per_rank", "per_expert"]),
)
def test_size_hint_adds_up(ranks: int, tokens: dict[str, int], lanes: int, slots: int, form: str) -> None:
    if not any(tokens.values()):
        tokens = {"direct": 1}
    made = BufferConfig.make(
        ranks,
        hidden=7168,
        num_experts=1024,
        top_k=8,
        max_tokens=tokens,
        lanes=lanes,
        ring_slots=slots,
        low_latency_form=form,
    )
    hint = made.size_hint()
    assert len(hint["lanes"]) == lanes
    assert hint["total"] == hint["control"] + sum(sum(x.values()) for x in hint["lanes"])
    assert hint["total"] == layout.heap_bytes(made.shape, lanes)
    assert set(hint["modes"]) == {m for m, n in tokens.items() if n}, "an absent mode takes no memory"
    for need in hint["modes"].values():
        assert all(need[op] <= hint["lanes"][0][op] for op in ("dispatch", "combine"))


def test_known_sizes() -> None:
    """The widely used decode shape: a segment for every expert of every rank, against one for every rank."""
    shape: dict[str, Any] = {"hidden": 7168, "num_experts": 256, "top_k": 8, "payloads": ("bf16",)}
    record = layout.record(layout.Payload.BF16, 7168, 8).bytes
    wide = BufferConfig.make(8, max_tokens={"low_latency": 128}, low_latency_form="per_expert", **shape).size_hint()
    narrow = BufferConfig.make(8, max_tokens={"direct": 128}, **shape).size_hint()
    assert wide["modes"]["low_latency"]["dispatch"] == 256 * 128 * record
    assert narrow["modes"]["direct"]["dispatch"] == 8 * 128 * record


@given(st.integers(1, 1 << 23))
def test_normal_mode_does_not_grow_with_tokens(tokens: int) -> None:
    def total(n: int) -> int:
        made = BufferConfig.make(8, **{**GOOD, "max_tokens": {"normal": n}})
        return int(made.size_hint()["total"])

    assert total(tokens) == total(1)
