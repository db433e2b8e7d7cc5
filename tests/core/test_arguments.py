"""Wrong arguments of dispatch and combine: refused before anything is sent, and the next call works."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ep_backend.fabric.meeting import Meeting
from tests.core import oracle
from tests.core.pool import Outcome, World, attempt
from tests.core.rounds import Round

T, K, H, E = 5, 4, 256, 24


def base(world: World) -> dict[str, Any]:
    d = world.device
    return {
        "x": torch.ones(T, H, dtype=torch.bfloat16, device=d),
        "topk_ids": torch.zeros(T, K, dtype=torch.int64, device=d),
        "topk_weights": torch.ones(T, K, device=d),
        "mode": "direct",
    }


def fp8(tokens: int = T, width: int = H // 128, dtype: torch.dtype = torch.float32) -> Any:
    rows = torch.zeros(tokens, H).to(torch.float8_e4m3fn)
    return rows, torch.ones(tokens, width).to(dtype)


# name: changed arguments, error, words its message must have
BAD: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "too many tokens": (
        {
            "x": torch.ones(13, H).bfloat16(),
            "topk_ids": torch.zeros(13, K, dtype=torch.int64),
            "topk_weights": torch.ones(13, K),
        },
        "ValueError",
        ("13 tokens", "max_tokens=12", "direct", "raise max_tokens"),
    ),
    "more tokens than promised": ({"most_tokens": T - 1}, "ValueError", ("5 tokens", "most_tokens=4", "every rank")),
    "less than no tokens": ({"most_tokens": -1}, "ValueError", ("5 tokens", "most_tokens=-1", "every rank")),
    **{
        f"most_tokens {value!r}": ({"most_tokens": value}, "TypeError", (f"most_tokens={value!r}", "a whole number"))
        for value in (8.0, True, "8")
    },
    "other K": (
        {"topk_ids": torch.zeros(T, 3, dtype=torch.int64)},
        "ValueError",
        ("topk_ids", "[5, 3]", "[5, 4]"),
    ),
    "weights of other K": (
        {"topk_weights": torch.ones(T, 5)},
        "ValueError",
        ("topk_weights", "[5, 5]", "[5, 4]"),
    ),
    "ids for fewer tokens": (
        {"topk_ids": torch.zeros(T - 1, K, dtype=torch.int64)},
        "ValueError",
        ("topk_ids", "[4, 4]", "[5, 4]"),
    ),
    **{
        f"ids {dtype}": (
            {"topk_ids": torch.zeros(T, K).to(dtype)},
            "TypeError",
            ("topk_ids", str(dtype), "int32 or int64"),
        )
        for dtype in (torch.int16, torch.uint8, torch.uint32, torch.float32, torch.bool)
    },
    **{
        f"weights {dtype}": (
            {"topk_weights": torch.ones(T, K, dtype=dtype)},
            "TypeError",
            ("topk_weights", str(dtype), "float32"),
        )
        for dtype in (torch.bfloat16, torch.float64)
    },
    **{
        f"x {dtype}": (
            {"x": torch.ones(T, H, dtype=dtype)},
            "TypeError",
            (str(dtype), "bfloat16"),
        )
        for dtype in (torch.float16, torch.float64, torch.int32)
    },
    "e4m3 without scales": ({"x": fp8()[0]}, "TypeError", ("float8_e4m3fn", "scales")),
    "hidden": ({"x": torch.ones(T, H + 8).bfloat16()}, "ValueError", ("[5, 264]", "[T, 256]")),
    "x of one dimension": ({"x": torch.ones(H).bfloat16()}, "ValueError", ("[256]", "[T, 256]")),
    "x of three dimensions": (
        {"x": torch.ones(T, 1, H).bfloat16()},
        "ValueError",
        ("[5, 1, 256]", "[T, 256]"),
    ),
    "id E": (
        {"topk_ids": torch.full((T, K), E)},
        "ValueError",
        ("24", "0..23", "-1"),
    ),
    "id -2": (
        {"topk_ids": torch.full((T, K), -2)},
        "ValueError",
        ("-2", "0..23", "-1"),
    ),
    "id past 32 bits": (
        {"topk_ids": torch.full((T, K), 1 << 32)},
        "ValueError",
        (str(1 << 32), "0..23"),
    ),
    "mode": ({"mode": "fast"}, "ValueError", ("'fast'", "direct")),
    "mode in a list": ({"mode": ["direct"]}, "ValueError", ("['direct']", "direct")),
    "layout in a list": ({"layout": ["masked"]}, "ValueError", ("['masked']", "compact or masked")),
    "fp8 in a list": ({"fp8": ["fp32"]}, "ValueError", ("['fp32']", "'fp32' or 'ue8m0'")),
    "layout": ({"layout": "dense"}, "ValueError", ("'dense'", "compact or masked")),
    "sms": ({"sms": 0}, "ValueError", ("sms=0", "at least 1")),
    "sms as text": ({"sms": "24"}, "TypeError", ("sms='24'", "whole number")),
    "sms as a bool": ({"sms": True}, "TypeError", ("sms=True", "whole number")),
    "lane as a bool": ({"lane": False}, "TypeError", ("lane=False", "whole number")),
    "three of a tuple": ({"x": (fp8()[0], fp8()[1], fp8()[1])}, "TypeError", ("tuple of 3", "scales")),
    "fp8 format": ({"fp8": "e5m2"}, "ValueError", ("'e5m2'", "'fp32' or 'ue8m0'")),
    "fp8 twice": ({"x": fp8(), "fp8": "fp32"}, "ValueError", ("quantised already",)),
    "scales shape": ({"x": fp8(width=3)}, "ValueError", ("scales", "[5, 3]", "[5, 2]")),
    "scales dtype": (
        {"x": fp8(dtype=torch.float64)},
        "TypeError",
        ("scales", "float64", "float32", "int32"),
    ),
    "no ids": ({"topk_ids": None}, "ValueError", ("topk_ids",)),
    "no weights": ({"topk_weights": None}, "ValueError", ("topk_weights",)),
    "hook and async": (
        {"return_hook": True, "async_finish": True},
        "ValueError",
        ("return_hook", "async_finish", "exclude"),
    ),
    "elsewhere": (
        {"x": torch.ones(T, H, dtype=torch.bfloat16, device="meta")},
        "TypeError",
        ("x is on meta", "move"),
    ),
    "ids elsewhere": (
        {"topk_ids": torch.zeros(T, K, dtype=torch.int64, device="meta")},
        "TypeError",
        ("topk_ids is on meta",),
    ),
    "not a tensor": ({"x": [[0.0] * H] * T}, "TypeError", ("x", "list")),
    "ids not a tensor": ({"topk_ids": [[0] * K] * T}, "TypeError", ("topk_ids", "list")),
    "sparse": ({"x": torch.ones(T, H).bfloat16().to_sparse()}, "TypeError", ("x is torch.sparse_coo", "to_dense")),
    "handle of another kind": (
        {"handle": "x", "topk_ids": None, "topk_weights": None},
        "TypeError",
        ("handle is a str", "earlier dispatch"),
    ),
}
ONLY_HOST = {
    # On a GPU the host does not read the ids; fp32 rows are no payload there.
    *("id E", "id -2", "id past 32 bits"),
}


def refused(world: World, names: list[str]) -> dict[str, tuple[Outcome, bool]]:
    """Every rank gives the wrong arguments; whether the call after it works."""
    buffer = world.buffer()
    found = {}
    for name in names:
        changes = {k: _move(world, v) for k, v in BAD[name][0].items()}
        arguments = {**base(world), **changes}
        outcome = attempt(lambda a=arguments: buffer.dispatch(**a))  # type: ignore[misc]
        after = attempt(lambda: Round(world, buffer, oracle.make_case(0, [4, 2]), "direct").run())
        found[name] = (
            Outcome(0, outcome.kind, None, outcome.error, outcome.message),
            after.kind == "ok",
        )
    return found


def _move(world: World, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_move(world, v) for v in value)
    here = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return value.to(world.device) if here else value


@pytest.fixture(scope="module")
def refusals(ranks: Any) -> Any:
    """All wrong calls in one go, by fabric."""
    seen: dict[str, Any] = {}

    def of(fabric: str) -> Any:
        if fabric not in seen:
            names = [n for n in BAD if fabric == "host" or n not in ONLY_HOST]
            seen[fabric] = ranks(2, fabric).run(refused, names)
        return seen[fabric]

    return of


@pytest.mark.parametrize("name", BAD)
def test_refused_with_value_rule_and_fix(refusals: Any, fabric: str, name: str) -> None:
    if fabric != "host" and name in ONLY_HOST:
        pytest.skip("ids on the device are not read by the host")
    for by_name in refusals(fabric):
        outcome, works = by_name[name]
        assert outcome.error == BAD[name][1], outcome
        for word in BAD[name][2]:
            assert word in outcome.message
        assert works, "the call after the refused one"


def absent(world: World) -> list[Outcome]:
    with world.make(max_tokens={"direct": 4}, payloads=("bf16",)) as buffer:
        found = []
        for changes in ({"mode": "low_latency"}, {"fp8": "fp32"}, {"lane": 2}, {"lane": -1}):
            arguments = {**base(world), **changes, "x": base(world)["x"][:4]}
            arguments |= {k: arguments[k][:4] for k in ("topk_ids", "topk_weights")}
            outcome = attempt(lambda a=arguments: buffer.dispatch(**a))  # type: ignore[misc]
            found.append(Outcome(0, outcome.kind, None, outcome.error, outcome.message))
        Round(world, buffer, oracle.make_case(0, [4, 2]), "direct").run()
        return found


def cast_of_fp32(world: World) -> Outcome:
    x = base(world)["x"].float()
    return attempt(lambda: world.buffer().dispatch(**{**base(world), "x": x, "fp8": "fp32"}))


def test_kernels_cast_bf16_rows_only(ranks: Any, kernels: str) -> None:
    for outcome in ranks(2, kernels).run(cast_of_fp32):
        assert outcome.error == "TypeError" and "float32; the FP8 cast takes bfloat16" in outcome.message


def test_what_the_buffer_was_not_made_for(ranks: Any, fabric: str) -> None:
    for mode, payload, lane, negative in ranks(2, fabric).run(absent):
        assert mode.error == "ValueError" and "low_latency" in mode.message
        assert "direct=4" in mode.message and "max_tokens" in mode.message
        assert payload.error == "TypeError" and "fp8" in payload.message
        assert "payloads (bf16)" in payload.message and "constructor" in payload.message
        assert lane.error == "ValueError" and "lane=2" in lane.message
        assert negative.error == "ValueError" and "lane=-1" in negative.message


def per_expert_compact(world: World) -> Outcome:
    with world.make(low_latency_form="per_expert") as buffer:
        outcome = attempt(lambda: buffer.dispatch(**{**base(world), "mode": "low_latency", "layout": "compact"}))
        Round(world, buffer, oracle.make_case(0, [4, 2]), "low_latency").run()
        return Outcome(0, outcome.kind, None, outcome.error, outcome.message)


def test_the_per_expert_form_has_no_compact_layout(ranks: Any, fabric: str) -> None:
    for outcome in ranks(2, fabric).run(per_expert_compact):
        assert outcome.error == "ValueError"
        assert "per_expert" in outcome.message and "masked" in outcome.message


def one_rank_over(world: World, mode: str, late: int, wrong: int) -> list[Outcome]:
    """Rank ``wrong`` exceeds the capacity, ``late`` comes when the others are in the next call; twice."""
    found = []
    with world.make(gpus_per_node=1 if world.size == 3 else None) as buffer:
        for turn in range(2):
            if world.rank == late:
                time.sleep(0.3)
            tokens = [4] * world.size
            tokens[wrong] = 13
            case = oracle.make_case(turn, tokens)
            outcome = attempt(lambda c=case: Round(world, buffer, c, mode).run())  # type: ignore[misc]
            found.append(Outcome(world.rank, outcome.kind, None, outcome.error, outcome.message))
            Round(world, buffer, oracle.make_case(turn, [3] * world.size), mode).run()
    return found


@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("mode", ["normal", "direct", "low_latency", "hybrid"])
def test_one_rank_over_capacity_is_refused_on_all(ranks: Any, mode: str, wrong: int) -> None:
    late = 1
    for rank, turns in enumerate(ranks(3).run(one_rank_over, mode, late, wrong)):
        for outcome in turns:
            assert outcome.error == ("ValueError" if rank == wrong else "EpRefused"), outcome
            assert "13 tokens exceed max_tokens=12" in outcome.message
            if rank != wrong:
                assert f"rank {wrong} refused" in outcome.message


def another_mode_behind(world: World, refused: str, then: str) -> None:
    """Rank 0 refuses; the last rank comes to that call when the others are in the next, of other slots in the same memory."""
    with world.make(max_tokens={"normal": 12, "direct": 12, "low_latency": 24, "hybrid": 24}, timeout_s=20.0) as buffer:
        for turn in range(2):
            if world.rank == world.size - 1:
                time.sleep(0.3)
            tokens = [25] + [12] * (world.size - 1)
            outcome = attempt(lambda c=oracle.make_case(turn, tokens): Round(world, buffer, c, refused).run())  # type: ignore[misc]
            assert outcome.error == ("EpRefused" if world.rank else "ValueError"), outcome
            Round(world, buffer, oracle.make_case(10 + turn, [12] * world.size), then).run()


@pytest.mark.parametrize("then", ["low_latency", "hybrid"])
def test_records_of_a_refused_call_do_not_reach_the_next(ranks: Any, then: str) -> None:
    ranks(3).run(another_mode_behind, "direct", then)


def one_rank_astray(world: World, lanes: int, wrong: int) -> list[Outcome]:
    """Rank ``wrong`` names a lane that is not there; twice, with rounds in every lane in between."""
    found = []
    with world.make(lanes=lanes, max_tokens={"direct": 12}, timeout_s=20.0) as buffer:
        for turn in range(2):
            case = oracle.make_case(turn, [4] * world.size)
            lane: Any = ("0", 5)[turn] if world.rank == wrong else turn % lanes
            outcome = attempt(lambda c=case, at=lane: Round(world, buffer, c, "direct", lane=at).run())  # type: ignore[misc]
            found.append(Outcome(world.rank, outcome.kind, None, outcome.error, outcome.message))
            for each in (*range(lanes), 0):
                Round(world, buffer, oracle.make_case(turn + each, [3] * world.size), "direct", lane=each).run()
    return found


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_a_lane_that_is_not_there_is_refused_on_all(ranks: Any, size: int, lanes: int) -> None:
    """A rank's next call must not meet its peers' last one."""
    for rank, turns in enumerate(ranks(size).run(one_rank_astray, lanes, 1)):
        for error, said, outcome in zip(("TypeError", "ValueError"), ("lane='0'", "lane=5"), turns, strict=True):
            assert outcome.error == (error if rank == 1 else "EpRefused") and said in outcome.message, outcome


def refused_then_astray(world: World) -> list[Outcome]:
    """Rank 1 exceeds the capacity in lane 1 and then names a lane that is not there, before the others hear of the first."""
    found = []
    with world.make(timeout_s=10.0) as buffer:
        for turn in range(2):
            if world.rank != 1:
                time.sleep(0.3)
            for tokens, lane in ((13, 1), (4, 5 if world.rank == 1 else 0)):
                call = Round(world, buffer, oracle.make_case(turn, [4, tokens, 4]), "direct", lane=lane)
                outcome = attempt(call.run)
                found.append(Outcome(world.rank, outcome.kind, None, outcome.error, outcome.message))
            for lane in (0, 1):
                Round(world, buffer, oracle.make_case(turn + lane, [3, 3, 3]), "direct", lane=lane).run()
    return found


def test_two_mistakes_one_after_the_other_are_told_apart(ranks: Any) -> None:
    for rank, outcomes in enumerate(ranks(3).run(refused_then_astray)):
        for outcome, said in zip(outcomes, ("13 tokens", "lane=5") * 2, strict=True):
            assert outcome.error == ("ValueError" if rank == 1 else "EpRefused") and said in outcome.message, outcome


def _shifted(t: torch.Tensor, elements: int) -> torch.Tensor:
    """A contiguous copy that begins so many elements behind an aligned address."""
    at = torch.empty(t.numel() + elements, dtype=t.dtype, device=t.device)[elements:].view(t.shape)
    return at.copy_(t)


def strided(world: World) -> None:
    """Views that are not contiguous give what their copies give."""
    buffer = world.buffer()
    case = oracle.make_case(3, [6, 4])
    want = Round(world, buffer, case, "direct").run().out
    x = case.x[world.rank].bfloat16().to(world.device)
    ids = case.ids[world.rank].to(world.device)
    weights = case.weights[world.rank].to(world.device)
    wide = torch.zeros(len(x), 2 * H, dtype=x.dtype, device=x.device)
    wide[:, :H] = x
    spaced = x.repeat_interleave(2, 0)
    views = [wide[:, :H], x.t().contiguous().t(), spaced[::2]]
    for view in views:
        assert not view.is_contiguous()
        routing = ids.t().contiguous().t(), weights.repeat_interleave(2, 0)[::2]
        got = buffer.dispatch(view, *routing, mode="direct")
        y = oracle.run_experts(case, world.rank, got, layout="compact", payload="bf16")
        answer = y.t().contiguous().t() if len(y) > 1 else y
        assert torch.equal(buffer.combine(answer, got.handle), want)
    for shift in (1, 3):  # contiguous, but on no vector's boundary
        got = buffer.dispatch(_shifted(x, shift), ids, weights, mode="direct")
        y = oracle.run_experts(case, world.rank, got, layout="compact", payload="bf16")
        out = _shifted(torch.empty_like(x), shift)
        assert buffer.combine(_shifted(y, shift), got.handle, out=out) is out
        assert torch.equal(out, want)
    rows, scales = oracle.quantise(x.cpu(), "fp8")
    given = rows.to(x.device), scales.t().contiguous().t().to(x.device)
    got = buffer.dispatch(given, ids, weights, mode="direct")
    oracle.check_dispatch(case, world.rank, got, layout="compact", payload="fp8", max_tokens=12)
    y = oracle.run_experts(case, world.rank, got, layout="compact", payload="fp8")
    buffer.combine(y, got.handle)


def test_strided_tensors_are_handled(ranks: Any, fabric: str) -> None:
    ranks(2, fabric).run(strided)


def wrong_answers(world: World, mode: str) -> list[tuple[str, str]]:
    """combine with wrong rows, then with right ones: only its arguments were refused."""
    buffer = world.buffer()
    found = []
    r = Round(world, buffer, oracle.make_case(5, [6, 4]), mode)
    r.dispatch()
    r.receive()
    y = oracle.run_experts(r.case, world.rank, r.got, layout=r.layout, payload="bf16")
    longer = torch.cat([y, y])
    out = torch.empty(len(r.case.x[world.rank]), H, dtype=torch.bfloat16, device=world.device)
    for bad, more in (
        (y.float(), {}),
        (longer, {}),
        (y.to("meta"), {}),
        (y, {"out": out.float()}),
        (y, {"out": out[1:]}),
        (y, {"out": out.detach().clone().requires_grad_()}),
        (y, {"return_hook": True, "async_finish": True}),
    ):
        o = attempt(lambda y=bad, m=more: buffer.combine(y, r.got.handle, **m))  # type: ignore[misc]
        found.append((o.error, o.message))
    r.out = buffer.combine(y, r.got.handle, out=out)
    assert r.out is out
    r.collect()
    return found


@pytest.mark.parametrize("mode", ["direct", "low_latency", "normal", "hybrid"])
def test_wrong_rows_for_combine(ranks: Any, fabric: str, mode: str) -> None:
    for dtype, shape, place, out_type, out_shape, gradient, both in ranks(2, fabric).run(wrong_answers, mode):
        assert dtype[0] == "TypeError" and "float32" in dtype[1] and "bfloat16" in dtype[1]
        assert shape[0] == "ValueError" and "y has shape" in shape[1]
        assert place[0] == "TypeError" and "meta" in place[1]
        assert out_type[0] == "ValueError" and "out is" in out_type[1] and "float32" in out_type[1]
        assert out_shape[0] == "ValueError" and "out is" in out_shape[1]
        assert gradient[0] == "ValueError" and "out.detach()" in gradient[1]
        assert both[0] == "ValueError" and "exclude" in both[1]


def of_wrong_kinds(world: World) -> dict[str, Outcome]:
    """Alike on every rank, each in front of a round that works."""
    buffer = world.buffer()
    weights = {**base(world), "topk_weights": base(world)["topk_weights"].requires_grad_()}
    found = {
        "lane": attempt(lambda: buffer.dispatch(**{**base(world), "lane": "0"})),
        "proposal": attempt(lambda: buffer.propose(1.5)),
        "handle": attempt(lambda: buffer.combine(torch.empty(1), None)),
        "weights with a gradient": attempt(lambda: buffer.combine((got := buffer.dispatch(**weights)).rows, got.handle)),
    }
    Round(world, buffer, oracle.make_case(0, [4] * world.size), "direct").run()
    return {name: Outcome(0, o.kind, None, o.error, o.message) for name, o in found.items()}


def test_things_of_another_kind(ranks: Any) -> None:
    for found in ranks(2, "host").run(of_wrong_kinds):
        assert found["lane"].error == "TypeError" and "lane='0'" in found["lane"].message
        assert found["proposal"].error == "TypeError" and "token=1.5" in found["proposal"].message
        assert found["handle"].error == "TypeError" and "NoneType" in found["handle"].message
        assert found["weights with a gradient"].kind == "ok", found


def late(world: World) -> list[Outcome]:
    """What a buffer says of a routing that has changed under its handle, and of a hook that outlives it."""
    with world.make(max_tokens={"direct": 12}) as buffer:
        ids = base(world)["topk_ids"].clone()
        got = buffer.dispatch(**{**base(world), "topk_ids": ids})
        buffer.combine(got.rows, got.handle)
        ids[0, 0] = 99
        again = {"x": base(world)["x"], "mode": "direct", "handle": got.handle}
        changed = attempt(lambda: buffer.dispatch(**again))
        Round(world, buffer, oracle.make_case(0, [4] * world.size), "direct").run()
        pending = buffer.dispatch(**base(world), return_hook=True)
    assert pending.hook is not None
    return [Outcome(0, o.kind, None, o.error, o.message) for o in (changed, attempt(pending.hook))]


def test_a_routing_that_changed_and_a_hook_that_is_late(ranks: Any) -> None:
    for changed, hook in ranks(2).run(late):
        assert changed.error == "ValueError" and "topk_ids hold 99" in changed.message
        assert hook.error == "EpFailed" and "the buffer was destroyed" in hook.message


def test_a_process_outside_the_group_is_told() -> None:
    with pytest.raises(ValueError, match="not in the group"):
        Meeting(torch.distributed.GroupMember.NON_GROUP_MEMBER)
