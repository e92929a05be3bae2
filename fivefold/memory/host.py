"""Copies between device and host memory that overlap with compute."""

import time
import weakref
from functools import cached_property

import torch
from torch import Tensor

Mark = torch.cuda.Event | None
"""Event at the end of a copy; None if the copy has already ended."""


class HostLink:
    """Copies tensors to host memory and back.

    On CUDA, each direction has its own stream and host memory is pinned. On a CPU copies are
    synchronous, and a second tensor stands in for the host.

    Args:
        device: device of the tensors.

    Attributes:
        device: device of the tensors.
        out_bytes: bytes copied to the host so far.
        back_bytes: bytes copied to the device so far.
        seconds: seconds of copies that the host itself made so far, and so waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out_bytes = self.back_bytes = 0
        self.seconds = 0.0

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] buffer of host memory that is kept for the run; on CUDA pinned in place.

        torch's own pinned allocator rounds up to powers of two, which may double a large room.
        """
        room = torch.empty(numel, dtype=dtype)
        if self._outward is not None and numel:
            driver, address = torch.cuda.cudart(), room.data_ptr()
            torch.cuda.check_error(driver.cudaHostRegister(address, room.nbytes, 0))
            weakref.finalize(room.untyped_storage(), driver.cudaHostUnregister, address)
        return room

    def out(self, tensor: Tensor, onto: Tensor | None = None) -> tuple[Tensor, Mark]:
        """Start copying a device tensor to the host: onto new memory, or a tensor in a `room`.

        The caller may drop the tensor at once: its memory is reused only after the copy.
        """
        pinned = self._outward is not None
        if onto is None:
            onto = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        mark = self._copy(self._outward, tensor, onto)
        self.out_bytes += tensor.nbytes
        if self._outward is not None:
            tensor.record_stream(self._outward)
        return onto, mark

    def back(self, host: Tensor, onto: Tensor, after: Mark = None, *, visits: bool = False) -> Mark:
        """Start copying host tensor `host` to device tensor `onto`, once `after` has passed.

        `visits`: whether `onto` is dropped before the stream that made it has waited for the copy.
        """
        if after is not None:
            assert self._homeward is not None
            self._homeward.wait_event(after)
        self.back_bytes += onto.nbytes
        mark = self._copy(self._homeward, host, onto)
        if visits and self._homeward is not None:
            onto.record_stream(self._homeward)
        return mark

    def wait(self, mark: Mark) -> None:
        """Make later work on the device wait for the end of a copy."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    @staticmethod
    def arrive(mark: Mark) -> None:
        """Wait on the host for the end of a copy."""
        if mark is not None:
            mark.synchronize()

    @cached_property
    def _outward(self) -> torch.cuda.Stream | None:
        return self._stream()

    @cached_property
    def _homeward(self) -> torch.cuda.Stream | None:
        return self._stream()

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _copy(self, stream: torch.cuda.Stream | None, source: Tensor, target: Tensor) -> Mark:
        """Copy after all work issued so far."""
        if stream is None:
            began = time.perf_counter()
            target.copy_(source)
            self.seconds += time.perf_counter() - began
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()
