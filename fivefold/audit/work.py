"""The matrix products that this rank computes, counted where every operation passes."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.addmm_.default: (1, 2),
}


class Multiplications(TorchDispatchMode):
    """Sums the FLOPs of the products of two matrices: those of linear layers.

    Attention's batched products, and fused kernels, are others and do not count.

    Attributes:
        flops: two for each multiplication and addition.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func in _PRODUCTS:
            left, right = (args[place] for place in _PRODUCTS[func])
            self.flops += 2 * prod(left.shape) * right.shape[1]
        return func(*args, **(kwargs or {}))
