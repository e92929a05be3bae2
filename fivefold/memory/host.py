"""The way to host memory and back, beside compute."""

from functools import cached_property

import torch
from torch import Tensor

Mark = torch.cuda.Event | None
"""The end of a copy; None where it has ended."""


class HostLink:
    """Copies tensors to host memory and back: on CUDA in a stream for each direction, from and to
    pinned memory; on a CPU at once, where a second tensor plays the host.

    Args:
        device: where the tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def out(self, tensor: Tensor) -> tuple[Tensor, Mark]:
        """Start copying a tensor of the device to the host; the caller may drop it at once: its
        memory is given away only once the copy has ended."""
        pinned = self._outward is not None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        mark = self._copy(self._outward, tensor, host)
        if self._outward is not None:
            tensor.record_stream(self._outward)
        return host, mark

    def back(self, host: Tensor, onto: Tensor, after: Mark = None) -> Mark:
        """Start copying a tensor of the host onto one of the device, once `after` has passed."""
        if after is not None:
            assert self._homeward is not None
            self._homeward.wait_event(after)
        return self._copy(self._homeward, host, onto)

    def wait(self, mark: Mark) -> None:
        """Let what the device does next see the copy ended."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    @cached_property
    def _outward(self) -> torch.cuda.Stream | None:
        return self._stream()

    @cached_property
    def _homeward(self) -> torch.cuda.Stream | None:
        return self._stream()

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def _copy(self, stream: torch.cuda.Stream | None, source: Tensor, target: Tensor) -> Mark:
        """Copy after all that is issued already."""
        if stream is None:
            target.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()
