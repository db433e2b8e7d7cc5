"""layout.h and layout.py give the same integers, and regions of a heap never overlap."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import astuple, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_backend import layout
from ep_backend.layout import Payload, Shape, Words

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "kernels" / "include" / "ep" / "layout.h"


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Any:
    library = tmp_path_factory.mktemp("layout") / "layout.so"
    source = Path(__file__).with_name("layout_dump.cc")
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    # Overflow of a 64-bit offset must be an error here, not a wrap.
    flags += ["-fsanitize=signed-integer-overflow", "-fsanitize-undefined-trap-on-error"]
    subprocess.run(["g++", *flags, f"-I{HEADER.parents[1]}", str(source), "-o", str(library)], check=True)
    found = ctypes.CDLL(str(library))
    found.dump_shape.restype = found.dump_structs.restype = ctypes.c_int64
    return found


def test_constants() -> None:
    found = re.findall(r"^constexpr i64 k(\w+) = (\d+);", HEADER.read_text(), re.M)
    assert len(found) >= 6
    for name, value in found:
        assert getattr(layout, re.sub(r"(?<!^)([A-Z])", r"_\1", name).upper()) == int(value), name
    assert layout.COUNT_MASK == (1 << layout.COUNT_BITS) - 1


@given(st.integers(0, 2**40 - 1), st.integers(0, 2**24 - 1))
def test_signal_words(header: Any, epoch: int, count: int) -> None:
    out = (ctypes.c_uint64 * 3)()
    header.dump_signal(ctypes.c_uint64(epoch), ctypes.c_uint64(count), out)
    word = layout.signal_word(epoch, count)
    assert list(out) == [word, epoch, count]
    assert (layout.signal_epoch(word), layout.signal_count(word)) == (epoch, count)


@given(st.sampled_from(Payload), st.integers(1, 2048), st.integers(1, 32))
def test_records(header: Any, payload: Payload, eighths: int, top_k: int) -> None:
    hidden = 8 * eighths
    out = (ctypes.c_int64 * 9)()
    header.dump_record(int(payload), ctypes.c_int64(hidden), ctypes.c_int64(top_k), out)
    record = layout.record(payload, hidden, top_k)
    ours = (
        layout.payload_bytes(payload, hidden),
        layout.scale_bytes(payload, hidden),
        layout.combine_record_bytes(payload, hidden),
    )
    assert tuple(out) == ours + astuple(record)
    ends = (
        layout.payload_bytes(payload, hidden),
        record.scales + layout.scale_bytes(payload, hidden),
        record.ids + 4 * top_k,
        record.weights + 4 * top_k,
        record.rows + 4 * top_k,
        record.source + 4,
    )
    starts = (record.scales, record.ids, record.weights, record.rows, record.source, record.bytes)
    assert all(e <= s for e, s in zip(ends, starts, strict=True)), "fields of a record overlap"


@st.composite
def shapes(draw: Any) -> Shape:
    ranks = draw(st.integers(1, 1024))
    divisors = [g for g in range(1, ranks + 1) if ranks % g == 0]
    experts = ranks * draw(st.integers(1, max(1, 2048 // ranks)))
    hidden = 8 * draw(st.integers(1, 2048))
    top_k = draw(st.integers(1, 32))
    tokens = st.integers(0, 1 << draw(st.integers(0, 16)))
    payloads = draw(st.sets(st.sampled_from(Payload), min_size=1))
    per_mode = [draw(tokens) for _ in range(4)]
    return Shape(
        ranks,
        draw(st.sampled_from(divisors)),
        experts,
        top_k,
        hidden,
        *per_mode,
        per_expert=draw(st.integers(0, 1)) if per_mode[2] else 0,
        staging=draw(st.integers(0, 1)),
        ring_slots=draw(st.integers(1, 1 << 12)),
        record_bytes=max(layout.record(p, hidden, top_k).bytes for p in payloads),
        combine_bytes=max(layout.combine_record_bytes(p, hidden) for p in payloads),
    )


def python_values(s: Shape, at: list[int]) -> list[int]:
    rank, expert, node, channel, ring, copy, relay, lane = at
    mode_bytes = [
        layout.normal_bytes(s),
        layout.slot_mode_bytes(s, s.direct, False),
        layout.hybrid_bytes(s),
        layout.slot_mode_bytes(s, s.low_latency, False),
        layout.slot_mode_bytes(s, s.low_latency, True),
    ]
    return [
        *(s.nodes, s.local_experts, s.rank_copies, s.node_copies, s.gpu_copies, s.rail_limit),
        *(v for b in mode_bytes for v in astuple(b)),
        layout.abort_bytes(s),
        layout.lane_offset(s, lane),
        layout.heap_bytes(s, 2),
        layout.source_segment(s, rank, s.direct),
        layout.expert_segment(s, expert, rank, s.low_latency),
        layout.rail_segment(s, node, channel),
        layout.ring_segment(s, ring),
        layout.combine_segment(s, copy, s.hybrid),
        layout.relay_segment(s, node, relay),
        layout.back_segment(s, ring),
    ]


def header_values(header: Any, s: Shape, at: list[int]) -> list[int]:
    out = (ctypes.c_int64 * 128)()
    packed = (ctypes.c_int64 * len(fields(Shape)))(*astuple(s))
    count = header.dump_shape(packed, (ctypes.c_int64 * len(at))(*at), out)
    return list(out[:count])


def header_structs(header: Any, s: Shape) -> list[int]:
    out = (ctypes.c_int64 * 128)()
    packed = (ctypes.c_int64 * len(fields(Shape)))(*astuple(s))
    return list(out[: header.dump_structs(packed, out)])


@settings(max_examples=500, deadline=None)
@given(shapes(), st.data())
def test_shapes(header: Any, s: Shape, data: Any) -> None:
    def index(n: int) -> int:
        return data.draw(st.integers(0, n - 1))  # type: ignore[no-any-return]

    at = [
        *(index(s.ranks), index(s.local_experts), index(s.nodes), index(layout.RAIL_CHANNELS)),
        *(index(s.ranks + s.nodes), index(s.node_copies), index(s.gpu_copies), index(2)),
    ]
    assert header_values(header, s, at) == python_values(s, at)
    assert header_structs(header, s) == [*astuple(layout.words(s)), *astuple(layout.lane(s))]


def test_offsets_past_4_gib(header: Any) -> None:
    record = layout.record(Payload.BF16, 16384, 32).bytes
    s = Shape(1024, 8, 2048, 32, 16384, *[4096] * 4, 1, 1, 4096, record, 32768)
    at = [1023, 1, 127, 3, 1151, 31, 7, 1]
    values = header_values(header, s, at)
    assert values == python_values(s, at)
    # all but a ring's offsets are past what 32 bits hold
    assert layout.expert_segment(s, 1, 1023, 4096) > 1 << 38
    assert layout.rail_segment(s, 127, 3) > 1 << 32 and layout.relay_segment(s, 127, 7) > 1 << 32


@given(shapes())
def test_regions_do_not_overlap(s: Shape) -> None:
    w = layout.words(s)
    lengths = {"expert_arrival": s.experts if s.per_expert else 0}
    lengths |= {"rail_tail": s.nodes * layout.CHANNELS, "rail_total": s.nodes * (layout.CHANNELS + 1)}
    lengths |= {"rail_arrived": s.staging * s.nodes * layout.CHANNELS, "rail_rows": s.staging * s.nodes}
    lengths |= dict.fromkeys(("stream_tail", "stream_returned"), s.ranks * layout.CHANNELS)
    lengths["stream_count"] = s.ranks * (layout.CHANNELS + 1)
    by_node = ("rail_count", "rail_ring_tail", "rail_ring_head", "rail_back_tail", "rail_back_head")
    lengths |= dict.fromkeys(by_node, s.nodes * layout.RING_CHANNELS)
    by_rank = ("ring_tail", "ring_head", "back_tail", "back_head")
    lengths |= dict.fromkeys(by_rank, s.ranks * layout.RING_CHANNELS)
    names = [f.name for f in fields(Words) if f.name != "bytes"]
    assert lengths.keys() <= set(names)
    spans = sorted((getattr(w, n), getattr(w, n) + 8 * lengths.get(n, s.ranks)) for n in names)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert spans[-1][1] <= w.bytes
    a = layout.lane(s)
    for need in layout.mode_bytes(s).values():
        assert a.dispatch + need.dispatch <= a.combine and a.combine + need.combine <= a.staging
    assert a.words + w.bytes <= a.lines and a.lines + s.line_bytes <= a.dispatch
    assert layout.heap_bytes(s, 2) - layout.heap_bytes(s, 1) == a.bytes


def test_header_and_module_have_the_same_fields() -> None:
    text = HEADER.read_text()
    for name, ours in (("Words", Words), ("Lane", layout.Lane), ("Record", layout.Record)):
        struct = re.search(rf"struct {name} \{{(.*?)\}};", text, re.S)
        assert struct is not None
        members = re.findall(r"^ *i64 ([\w, ]+);", struct.group(1), re.M)
        assert [m.strip() for line in members for m in line.split(",")] == [f.name for f in fields(ours)]
