"""Copies between device and host memory that overlap with compute."""

import time
import weakref
from functools import cached_property

import torch
from torch import Tensor

CopyEvent = torch.cuda.Event | None
"""Event at the end of a copy; None if the copy has already ended."""


class HostLink:
    """Copies tensors to host memory and back.

    On CUDA, each direction has its own stream and host memory is pinned. On a CPU copies are
    synchronous, and a second tensor stands in for the host.

    Args:
        device: device of the tensors.

    Attributes:
        device: device of the tensors.
        to_host_bytes: bytes copied to the host so far.
        to_device_bytes: bytes copied to the device so far.
        seconds: seconds of copies that the host itself made so far, and so waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_host_bytes = self.to_device_bytes = 0
        self.seconds = 0.0

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] buffer of host memory that is kept for the run; on CUDA pinned in place.

        torch's own pinned allocator rounds up to powers of two, which may double a large buffer.
        """
        buffer = torch.empty(numel, dtype=dtype)
        if self._to_host_stream is not None and numel:
            driver, address = torch.cuda.cudart(), buffer.data_ptr()
            torch.cuda.check_error(driver.cudaHostRegister(address, buffer.nbytes, 0))
            weakref.finalize(buffer.untyped_storage(), driver.cudaHostUnregister, address)
        return buffer

    def to_host(self, tensor: Tensor, onto: Tensor | None = None) -> tuple[Tensor, CopyEvent]:
        """Start copying a device tensor to the host: onto new memory, or a tensor in a `buffer`.

        The caller may drop the tensor at once: its memory is reused only after the copy.
        """
        pinned = self._to_host_stream is not None
        if onto is None:
            onto = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        event = self._copy(self._to_host_stream, tensor, onto)
        self.to_host_bytes += tensor.nbytes
        if self._to_host_stream is not None:
            tensor.record_stream(self._to_host_stream)
        return onto, event

    def to_device(
        self, host: Tensor, onto: Tensor, after: CopyEvent = None, *, short_lived: bool = False
    ) -> CopyEvent:
        """Start copying host tensor `host` to device tensor `onto`, once `after` has passed.

        `short_lived`: whether `onto` is dropped before the stream that allocated it has waited for
        the copy.
        """
        if after is not None:
            assert self._to_device_stream is not None
            self._to_device_stream.wait_event(after)
        self.to_device_bytes += onto.nbytes
        event = self._copy(self._to_device_stream, host, onto)
        if short_lived and self._to_device_stream is not None:
            onto.record_stream(self._to_device_stream)
        return event

    def wait(self, event: CopyEvent) -> None:
        """Make later work on the device wait for the end of a copy."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @staticmethod
    def synchronize(event: CopyEvent) -> None:
        """Wait on the host for the end of a copy."""
        if event is not None:
            event.synchronize()

    @cached_property
    def _to_host_stream(self) -> torch.cuda.Stream | None:
        return self._stream()

    @cached_property
    def _to_device_stream(self) -> torch.cuda.Stream | None:
        return self._stream()

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _copy(self, stream: torch.cuda.Stream | None, source: Tensor, target: Tensor) -> CopyEvent:
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
