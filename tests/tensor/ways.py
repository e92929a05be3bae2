"""Every way in which tensor-parallel ranks exchange tokens, on CPUs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from fivefold.model.leaves import held_gradient
from fivefold.tensor.deferred_weight import Sum, SumOf
from fivefold.tensor.exchange import Exchange, TokensInSharedMemory, exchange_of

WAYS = ("tp", "sp", "parts", "shared memory")


@contextmanager
def exchanging(way: str) -> Iterator[Exchange]:
    """An exchange of all ranks.

    Symmetric memory is for GPUs: here its operations do what torch says that they stand for.
    """
    group = dist.group.WORLD
    assert group is not None
    if way != "shared memory":
        yield exchange_of(group, sequence_parallel=way != "tp", overlaps=way == "parts")
        return
    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
            library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
        yield TokensInSharedMemory(group)


def held_sum(parameter: Tensor, _: bool) -> Sum | None:
    """A `SumOf` for gradients that lie where autograd leaves them."""
    held = held_gradient(parameter)
    return None if held is None else Sum(held)


def in_rooms() -> SumOf:
    """A `SumOf` that gives a parameter's first gradient memory, in which there are NaNs."""
    rooms: dict[Tensor, Tensor] = {}

    def sum_of(parameter: Tensor, whole: bool) -> Sum | None:
        if parameter.grad is not None or not whole:
            return held_sum(parameter, whole)
        rooms[parameter] = torch.full_like(parameter, torch.nan, requires_grad=False)
        return Sum(rooms[parameter], empty=True, returned=True)

    return sum_of
