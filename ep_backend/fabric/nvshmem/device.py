"""What the fabric asks of its GPU, in one place: tests put an emulated device here and run the same kernels without one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from ep_backend.fabric.meeting import Meeting
from ep_backend.fabric.nvshmem import launch, world


class Side:
    """A stream beside the current one, for kernels that wait for peers while the caller computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stream = int(self._stream.cuda_stream)

    def fork(self) -> None:
        """Go on behind what the current stream was given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """The current stream goes on behind this one."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def current(self) -> AbstractContextManager[None]:
        """This stream is the current one."""
        return torch.cuda.stream(self._stream)


class Gpu:
    """The process's current CUDA device."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError(f"fabric='nvshmem': torch {torch.__version__} sees no CUDA device; use fabric='host'")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.multiprocessors = int(torch.cuda.get_device_properties(self.device).multi_processor_count)
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._one = torch.ones(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._context = world.check(world.driver().cuCtxGetCurrent())

    def join(self, size: int, meeting: Meeting) -> None:
        """The NVSHMEM world, before images that need it are loaded. Collective."""
        world.join(meeting, self.device, size)

    def heap(self, size: int, control: int, meeting: Meeting, near: list[int]) -> world.Heap:
        """This buffer's symmetric memory; the first ``control`` bytes are zero, and ranks ``near`` are mapped. Collective."""
        return world.Heap(size, control, meeting, near)

    def kernels(self, meeting: Meeting, *, rail_put: bool) -> dict[str, launch.Kernel]:
        """Every kernel by name; hybrid's reach other nodes by puts, or by stores to mapped peers. Collective."""
        launch.same_images(meeting, self.device, rail_put)
        return launch.kernels(self.device, rail_put)

    def mapped(self, words: int) -> torch.Tensor:
        """Zeroed 64-bit words of host memory that kernels write and the host polls."""
        return torch.zeros(words, dtype=torch.int64, device="cpu", pin_memory=True)

    def stream(self) -> int:
        # Asked at every launch: torch.cuda.current_stream() makes an object for it.
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    def side(self) -> Side:
        return Side(self.device)

    def uses(self, tensor: torch.Tensor) -> None:
        """The current stream does."""
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def finish_stream(self) -> None:
        """Wait for what the current stream was given."""
        with _beside_captures():
            torch.cuda.current_stream(self.device).synchronize()

    def ends(self, seconds: float) -> bool:
        """Whether all that the device was given ends in that time: a buffer's kernels do, for their waits are bounded, but
        others' may not, as a collective whose rank is dead. False also where the device has failed."""
        ended: list[bool] = []

        def wait() -> None:
            with suppress(RuntimeError):
                torch.cuda.synchronize(self.device)
                ended.append(True)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(seconds)
        return bool(ended)

    def read(self, tensor: torch.Tensor) -> Any:
        """A tensor's values as lists."""
        with _beside_captures():
            return tensor.tolist()

    def set_word(self, address: int) -> None:
        """Store 1 to a 64-bit word of device memory, whatever the current stream does."""
        with world.current(self._context):
            world.driver().cuMemcpyAsync(address, self._one.data_ptr(), 8, self._side.cuda_stream)


@contextmanager
def _beside_captures() -> Iterator[None]:
    """This thread may wait for the device while another one captures a graph, which by CUDA's default breaks the capture."""
    driver = world.driver()
    local = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    before = world.check(driver.cuThreadExchangeStreamCaptureMode(local))
    try:
        yield
    finally:
        world.check(driver.cuThreadExchangeStreamCaptureMode(before))
