"""Counts the FLOPs of the matrix products that this rank computes."""

from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from typing import Any

import torch
from torch import Tensor

from fivefold.audit.calls import call_of
from fivefold.audit.watch import Watch, after
from fivefold.model.eight_bit import fp8
from fivefold.model.eight_bit.fp8 import Scaled

_PRODUCTS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.mm.out: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.addmm.out: (1, 2),
    torch.ops.aten.addmm_.default: (1, 2),
    torch.ops.aten.addmm.dtype_out: (1, 2),
    # Each row of the left by one matrix of the right.
    torch.ops.aten._grouped_mm.default: (0, 1),
    torch.ops.aten._scaled_grouped_mm.default: (0, 1),
}


class Multiplications(Watch):
    """Sums the FLOPs of products of two matrices, which are those of linear layers.

    Batched products of attention, and fused kernels, are not counted; nor are the zeros with which
    operands in 8 bits are padded for their kernel.

    Attributes:
        flops: number of FLOPs; a multiplication and an addition count as two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def begin(self, block: ExitStack) -> None:
        """See `Watch`."""
        block.enter_context(after(fp8, "by_kernel", self._has_multiplied))

    def _has_multiplied(self, a: Scaled, result: Tensor, b: Scaled, **_: Any) -> None:
        self.flops += 2 * a.bits.numel() * len(b.bits)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in _PRODUCTS:
            left, right = (args[place] for place in _PRODUCTS[func])
            self.flops += 2 * prod(left.shape) * right.shape[-1]
        elif func.namespace == "symm_mem":
            self.flops += _fused_flops(func, args)
        return super()._run(func, args, kwargs)


def _fused_flops(func: Any, args: tuple[Any, ...]) -> int:
    """FLOPs of a product whose rows are gathered for several matrices, or are summed over ranks."""
    call, rows = call_of(func, args), args[0]
    assert call is not None, "one of torch.distributed"
    gathers = call.op == "all_gather"
    columns = sum(matrix.shape[1] for matrix in args[1]) if gathers else args[1].shape[1]
    return 2 * prod(rows.shape) * columns * (call.group.size() if gathers else 1)
