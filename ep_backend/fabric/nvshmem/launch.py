"""Launching a compiled kernel: its one argument is the struct Args of kernels/include/ep/args.h."""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ep_backend.config import MAX_RANKS
from ep_backend.errors import EpError
from ep_backend.fabric.base import Call
from ep_backend.fabric.meeting import Meeting
from ep_backend.fabric.nvshmem import images, world
from ep_backend.fabric.nvshmem.images import IMAGE_KERNELS, IMAGES, PUT_IMAGES
from ep_backend.fabric.nvshmem.world import check, driver
from ep_backend.layout import Payload

MOST_WARPS = 32  # of a block
SHARED_BYTES = 227 << 10  # that a block may have, on sm_90 and sm_100
ALL, FIRST, REST = range(3)  # Part of args.h
STAGE_BYTES = 224 << 10  # of which a block's warps share for bulk copies, where the kernel leaves so much

# Fields of Args behind heap[MAX_RANKS], in order, 64 bits each. LANE ones are the same for every call of a lane and mode.
LANE = (
    *("rank", "ranks", "local_experts", "top_k", "hidden", "control", "report", "stats", "timeout_ns"),
    *("lane", "mode", "max_tokens", "state"),
    *("intent", "stream_count", "stream_tail", "stream_returned", "expert_arrival", "returned"),
    *("rail_tail", "rail_total", "relay_returned", "rail_arrived", "rail_rows", "staging", "staged_rows", "puts"),
    *("slots", "slot_segment", "lines", "line_row", "area", "area_segment"),
    *("gpus", "rail_slots", "rail_segment", "relay_area", "relay_segment", "relay_node"),
    *("rail_count", "ring_tail", "ring_head", "rail_ring_tail", "rail_ring_head"),
    *("back_tail", "back_head", "rail_back_tail", "rail_back_head", "ring_share"),
    *("payload", "signature", "agreed"),
)
CALL = (
    *("masked", "cast", "ids64", "ordered", "tokens", "most_tokens", "x", "scales_in", "ids", "weights"),
    *("rows", "scales", "out_ids", "out_weights", "counts", "scale_stride", "fill", "host_rows"),
    *("plan", "target", "position", "pick_weight", "relay", "kept", "capacity", "channels", "chunk", "stays", "y", "out"),
    *("senders", "receive_from", "receivers", "send_stage", "receive_stage", "receive_at"),
    *("send_parts", "receive_parts", "receive_groups", "staged", "part", "advance"),
)
_CALL_AT, _ANSWER_AT, _LAUNCH_AT = (8 * (MAX_RANKS + len(LANE) + CALL.index(name)) for name in ("masked", "stays", "senders"))
ARGS_BYTES = 8 * (MAX_RANKS + len(LANE) + len(CALL))
_call, _answer = struct.Struct(f"{(_LAUNCH_AT - _CALL_AT) // 8}q"), struct.Struct("3q")
_launch = struct.Struct(f"{(ARGS_BYTES - _LAUNCH_AT) // 8}q")


def casts(call: Call) -> bool:
    """Dispatch makes FP8 of bf16 rows."""
    return call.scales is None and call.payload is not Payload.BF16


class Args:
    """The struct for one lane, mode and payload: packed once but for what a call changes. Launches copy it, and from a
    dispatch to its combine no other call of the lane packs."""

    def __init__(self, heap: list[int], **lane: int) -> None:
        self.buffer = ctypes.create_string_buffer(ARGS_BYTES)
        heap = heap + [0] * (MAX_RANKS - len(heap))
        struct.pack_into(f"{MAX_RANKS + len(LANE)}q", self.buffer, 0, *heap, *(lane[name] for name in LANE))
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))

    def dispatch(self, call: tuple[int, ...]) -> None:
        """Values of CALL up to combine's own, which are none yet."""
        _call.pack_into(self.buffer, _CALL_AT, *call, 0, 0, 0)

    def combine(self, stays: bool, y: int, out: int) -> None:
        _answer.pack_into(self.buffer, _ANSWER_AT, stays, y, out)

    def launch(self, one: Launch) -> None:
        _launch.pack_into(self.buffer, _LAUNCH_AT, *one.values)


class Roles(NamedTuple):
    """Who of a block's warps does what, and what shared memory each has; see Args."""

    senders: int = 0
    receive_from: int = 0
    receivers: int = 0
    send_stage: int = 0
    receive_stage: int = 0
    receive_at: int = 0
    send_parts: int = 1
    receive_parts: int = 1
    receive_groups: int = 1
    staged: int = 1
    part: int = ALL

    @property
    def shared_bytes(self) -> int:
        return max(self.senders * self.send_stage, self.receive_at + self.receivers * self.receive_stage)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: the value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_EARLY = _Attribute(6, 0, (ctypes.c_int * 16)(1))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@dataclass(slots=True, eq=False)
class Launch:
    """One kernel of an operation. ``early``: it may start before the one in front of it has ended."""

    kernel: str
    blocks: int
    warps: int
    roles: Roles
    early: bool = False
    ends: bool = False  # the lane's round
    forks: bool = False  # what runs beside the current stream need not wait for this one
    side: bool = False  # beside the current stream
    joins: bool = False  # behind what runs beside it
    closes: bool = False  # whoever follows it is behind what runs beside it
    values: tuple[int, ...] = field(init=False)  # of CALL: who does what, and whether the round ends
    config: _Config = field(init=False)

    def __post_init__(self) -> None:
        self.values = *self.roles, self.ends
        one = ctypes.c_uint * 3
        early = ctypes.pointer(_EARLY) if self.early else None
        block, shared = one(32 * self.warps, 1, 1), self.roles.shared_bytes
        self.config = _Config(one(self.blocks, 1, 1), block, shared, None, early, self.early)


_NOT_HERE = 201, 400  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE: the thread has another context, or none


class Kernel:
    """One entry point of one image, ready to be launched (also in a capture). Launched by ctypes: the bindings' conversion of
    the configuration takes several times as long as the launch."""

    def __init__(self, library: Any, name: str) -> None:
        api = driver()
        function = check(api.cuKernelGetFunction(check(api.cuLibraryGetKernel(library, name.encode()))))
        check(api.cuFuncLoad(function))  # at its first launch, loading could wait for a kernel that waits for peers
        same_arguments(name, api.cuFuncGetParamInfo(function, 0))
        of = api.CUfunction_attribute
        static = check(api.cuFuncGetAttribute(of.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        room = min(STAGE_BYTES, SHARED_BYTES - static)
        check(api.cuFuncSetAttribute(function, of.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, room))
        self._function = ctypes.c_void_p(int(function))
        self._context = check(api.cuCtxGetCurrent())
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx

    def launch(self, how: Launch, args: Args, stream: int) -> None:
        how.config.stream = stream
        given = ctypes.byref(how.config), self._function, args.parameters, None
        status = self._launch(*given)
        if status in _NOT_HERE:
            with world.current(self._context):
                status = self._launch(*given)
        if status != 0:
            raise EpError(f"launch of {how.kernel} failed with CUDA error {status}")


def same_images(meeting: Meeting, device: torch.device, rail_put: bool) -> None:
    """Raise on every rank unless each has the images for its device, of the same sources. Collective."""
    images.agree(meeting, lambda: _build(device, rail_put))


@functools.cache  # for the life of the process, like the kernels: what is built later is not what it runs
def _build(device: torch.device, rail_put: bool) -> images.Build:
    try:
        build = images.read(IMAGES)
        images.check(build, IMAGES, _architecture(device), puts=rail_put)
        if rail_put:
            images.same_nvshmem(build.nvshmem, world.joined().library)
    except EpError as error:
        raise EpError(f"{error}; {images.remedy(IMAGES)}, or use fabric='host'") from None
    return build


@functools.cache  # for the life of the process: buffers come and go
def kernels(device: torch.device, rail_put: bool) -> dict[str, Kernel]:
    """Every kernel by name, loaded for this device. Images of puts need the process's NVSHMEM world."""
    found = {}
    for image, names in IMAGE_KERNELS.items():
        puts = rail_put and image in PUT_IMAGES
        path = IMAGES / f"{image}{'_put' * puts}.{_architecture(device)}.cubin"
        library = check(driver().cuLibraryLoadData(path.read_bytes(), [], [], 0, [], [], 0))
        if puts:
            import nvshmem.bindings as nvshmem

            if status := nvshmem.culibrary_init(int(library)):
                raise EpError(f"NVSHMEM did not take the image {path.name} (status {status})")
        found.update({name: Kernel(library, f"ep_{name}") for name in names})
    return found


def same_arguments(kernel: str, parameter: tuple[Any, ...]) -> None:
    """An image of other sources would read its argument at other offsets. ``parameter``: what cuFuncGetParamInfo returned."""
    check(parameter)
    if parameter[2] != ARGS_BYTES:
        raise EpError(
            f"the image of {kernel} takes {parameter[2]} bytes of arguments, this package packs {ARGS_BYTES}: they are not of "
            "one build; run kernels/build.py"
        )


def _architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"
