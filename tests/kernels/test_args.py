"""The kernels' argument struct and its Python mirror name the same fields in the same order."""

from __future__ import annotations

import re
from pathlib import Path

from ep_backend import layout
from ep_backend.config import MAX_RANKS
from ep_backend.fabric.nvshmem import fabric, launch, rings
from ep_backend.fabric.nvshmem.outputs import PLACES

HEADER = Path(__file__).resolve().parents[2] / "kernels" / "include" / "ep" / "args.h"


def struct_fields(text: str) -> list[str]:
    body = re.search(r"struct Args \{(.*?)\n\};", text, re.S)
    assert body is not None
    code = re.sub(r"//[^\n]*", "", body.group(1))
    names = []
    for kind, declared in re.findall(r"\b(i64|u64) ([^;]+);", code):
        assert kind in ("i64", "u64")
        names += [n.strip() for n in declared.split(",")]
    return names


def test_args_are_mirrored() -> None:
    names = struct_fields(HEADER.read_text())
    assert names[0] == "heap[kMaxRanks]"
    assert names[1:] == [*launch.LANE, *launch.CALL]


def test_limits_are_mirrored() -> None:
    text = HEADER.read_text()
    assert f"kMaxRanks = {MAX_RANKS};" in text
    assert f"kThreads = {32 * launch.MOST_WARPS};" in text
    assert f"kRingThreads = {32 * rings.MOST_WARPS};" in HEADER.with_name("ring.cuh").read_text()


def test_faults_parts_and_signatures_are_mirrored() -> None:
    text = HEADER.read_text()
    assert "enum class Fault : u64 { kNone, kTimeout, kDisagree, kAbort, kBadId, kSkipped, kTooMany, kOtherRound };" in text
    faults = fabric.TIMEOUT, fabric.DISAGREE, fabric.ABORT, fabric.BAD_ID, fabric.SKIPPED, fabric.TOO_MANY, fabric.OTHER_ROUND
    assert faults == (1, 2, 3, 4, 5, 6, 7)
    assert "enum class Part : int { kAll, kFirst, kRest };" in text
    assert (launch.ALL, launch.FIRST, launch.REST) == (0, 1, 2)
    assert f"kSignatureBits = {fabric.SIGNATURE_BITS}, kRepeats = 1 << {fabric.REPEATS.bit_length() - 1};" in text
    assert "kRefused = kCountMask;" in text and layout.REFUSED == layout.COUNT_MASK


def test_the_trace_is_read_in_its_shape() -> None:
    text = HEADER.with_name("trace.cuh").read_text()
    sizes = re.search(r"kTraceBlocks = (\d+), kTraceWarps = (\d+), kTracePoints = (\d+);", text)
    assert sizes is not None
    assert f"SHAPE = ({', '.join(sizes.groups())})" in (HEADER.parents[2] / "scripts" / "trace.py").read_text()


def test_roles_are_the_end_of_the_struct() -> None:
    assert launch.CALL[-len(launch.Roles._fields) - 1 : -1] == launch.Roles._fields


def test_places_of_outputs_are_in_the_struct_s_order() -> None:
    names = [{"ids": "out_ids", "weights": "out_weights"}.get(name, name) for name in PLACES]
    first, last = launch.CALL.index("rows"), launch.CALL.index("capacity")
    assert [n for n in launch.CALL[first + 1 : last] if n not in ("scale_stride", "fill", "host_rows")] == names


def test_an_answer_is_packed_before_the_launch() -> None:
    at = launch.CALL.index("senders")
    assert launch.CALL[at - 3 : at] == ("stays", "y", "out")
