"""Weight gradients that wait: the tokens of one are gathered while an earlier one is computed."""

from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.model.layers import Linear
from fivefold.model.products import Kept, Products
from fivefold.tensor.deferred_weight import DeferredWeights, run_works
from fivefold.tensor.exchange import exchange_of
from fivefold.tensor.linear import ColumnParallel, RowParallel
from tests.pool import run

PATIENCE = timedelta(seconds=20)


class _Told(Products):
    """Products that call a function before they compute a weight gradient."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before

    def weight_gradient(self, grad: Kept, kept: Kept, onto_FH: Tensor | None = None) -> Tensor:
        self._before()
        return super().weight_gradient(grad, kept, onto_FH)


def _ahead(rank: int, world: int, key: str) -> None:
    """Rank 0 computes no dW before rank 1 has the tokens of the next column."""
    store = dist.distributed_c10d._get_default_store()
    deferred = DeferredWeights()
    exchange = exchange_of(dist.group.WORLD, sequence_parallel=True)
    column, row = ColumnParallel(exchange, deferred), RowParallel(exchange, deferred)
    first, second, third = Linear(3, 4), Linear(3, 4), Linear(4, 3)  # W in the reverse order
    for linear in (first, second, third):
        torch.nn.init.ones_(linear.weight)
    has_second, has_first = f"{key} second", f"{key} first"
    if rank == 0:
        third.multiply = _Told(lambda: store.wait([has_second], PATIENCE))
        second.multiply = _Told(lambda: store.wait([has_first], PATIENCE))
    else:
        second.multiply = _Told(lambda: store.set(has_second, ""))
        first.multiply = _Told(lambda: store.set(has_first, ""))
    x_tH = torch.ones(2, 3)
    (one_TF,), (other_TF,) = column(x_tH, first), column(x_tH, second)
    y_tH = row(one_TF + other_TF, third)
    with deferred.collect() as works:
        y_tH.sum().backward()
    updated = list(run_works(works))
    assert list(map(id, updated)) == [id(linear.weight) for linear in (third, second, first)]
    assert all(linear.weight.grad is not None for linear in (first, second, third))


def test_the_next_gather_travels_while_a_weight_gradient_is_computed() -> None:
    run(2, _ahead, str(uuid4()))
