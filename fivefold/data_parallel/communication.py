"""Custom all-gather and reduce-scatter for FSDP2."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.collectives import Pending, start_all_gather, start_reduce_scatter


class _Waitable(dist.Work):
    """The work object that FSDP2 expects: it does not wait for an object of another type."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._pending.wait()
        return True


class _Buffers:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Buffers):
    """Pairwise all-gather for gloo."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> _Waitable | None:
        """[n] -> [P*n] into `output_tensor`, which may contain `input_tensor`."""
        pending = start_all_gather(input_tensor, group, output_tensor)
        return _finish(pending, async_op)


class ReduceScatter(_Buffers):
    """Reduce-scatter with its own dtype on the wire; pairwise, and in rank order, for gloo.

    Args:
        wire_dtype: type in which gradients are sent.
        sum_dtype: type in which they are added. A wider one than the wire's, as in Megatron-LM's
            `reduce_scatter_with_fp32_accumulation`, rounds each gradient once and no sum, and needs
            an all-to-all: a ring sends sums, which its links round.
    """

    def __init__(self, wire_dtype: torch.dtype, sum_dtype: torch.dtype) -> None:
        self._wire_dtype, self._sum_dtype = wire_dtype, sum_dtype

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> _Waitable | None:
        """[P*n] -> [n] into `output_tensor`; `op` is a sum, as set in `fsdp.py`."""
        if self._sum_dtype == input_tensor.dtype:
            pending = start_reduce_scatter(input_tensor, group, output_tensor, self._wire_dtype)
        else:
            narrow = start_reduce_scatter(input_tensor.to(self._sum_dtype), group)
            pending = Pending(narrow.works, lambda: output_tensor.copy_(narrow.finish()))
        return _finish(pending, async_op)


def _finish(pending: Pending, async_op: bool) -> _Waitable | None:
    if async_op:
        return _Waitable(pending)
    pending.wait()
    return None
