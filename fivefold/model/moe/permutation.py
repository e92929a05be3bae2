"""Copying tokens into rows for experts or ranks, and summing the rows back per token.

A token has S slots, each for at most one copy: its experts, or the ranks it is sent to. Rows are
the occupied slots, in any order. Shapes: T tokens, S slots, R rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.mesh.device import uses_gpu_kernels


class _Copies:
    """Copies of tokens in rows, R of them."""

    def spread(self, x: Tensor) -> Tensor:
        """[T, ...] -> [R, ...]: copy each token to its rows."""
        y: Tensor = _SpreadFn.apply(x, self)
        return y

    def collect(self, x: Tensor) -> Tensor:
        """[R, ...] -> [T, ...]: sum each token's rows, in slot order."""
        y: Tensor = _CollectFn.apply(x, self)
        return y


@dataclass(frozen=True)
class Rows(_Copies):
    """Which slots are rows, and in which order.

    Attributes:
        slots_R: slot of each row, t * S + s, int64, all different.
        tokens: T.
        per_token: S.
    """

    slots_R: Tensor
    tokens: int
    per_token: int

    @property
    def tokens_R(self) -> Tensor:
        """The token index of each row."""
        return self.slots_R if self.per_token == 1 else self.slots_R // self.per_token

    def spread_values(self, x: Tensor) -> Tensor:
        """`spread`, not differentiable."""
        return x.index_select(0, self.tokens_R)

    def collected(self, x: Tensor) -> Tensor:
        """`collect`, not differentiable."""
        return _collected(x, self)

    def take(self, values_TS: Tensor) -> Tensor:
        """[T, S] -> [R]: the value of each row's slot."""
        return values_TS.flatten()[self.slots_R]


def number_of_each(values: Tensor, count: int) -> Tensor:
    """[count] how often each integer below `count` occurs in `values`, which may contain `count`.

    Unlike bincount, it does not synchronise with the device.
    """
    flat = values.flatten()
    ones = flat.new_ones(1).expand_as(flat)
    return flat.new_zeros(count + 1).scatter_add_(0, flat, ones)[:count]


def _collected(x: Tensor, rows: Rows) -> Tensor:
    """Sums each token's rows in slot order; without atomics, so it is deterministic."""
    taken, slots = len(rows.slots_R), rows.tokens * rows.per_token
    shape = rows.tokens, *x.shape[1:]
    if taken == 0:
        return x.new_zeros(shape)
    # The row of each slot, if every slot is occupied.
    order = None
    if taken == slots:
        order = torch.empty_like(rows.slots_R)
        order[rows.slots_R] = torch.arange(taken, device=x.device)
        if rows.per_token == 1:
            return x.index_select(0, order)
    if rows.per_token > 1 and _sums_exactly(x):
        bags, firsts_T = order, torch.arange(0, slots, rows.per_token, device=x.device)
        if bags is None:
            sorted_R, bags = rows.slots_R.sort()
            firsts_T = torch.searchsorted(sorted_R, firsts_T)
        return F.embedding_bag(bags, x.reshape(taken, -1), firsts_T, mode="sum").view(shape)
    if order is None:
        places = x.new_zeros(slots, *x.shape[1:])
        places[rows.slots_R] = x
    else:
        places = x.index_select(0, order)
    return places.view(rows.tokens, rows.per_token, *x.shape[1:]).sum(1).view(shape)


def _sums_exactly(x: Tensor) -> bool:
    """Whether embedding_bag sums in at least fp32 without a copy: not for bf16 on the CPU."""
    return uses_gpu_kernels(x) or x.dtype in (torch.float32, torch.float64)


class _SpreadFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: "Rows | PlacedRows") -> Tensor:
        ctx.rows = rows
        return rows.spread_values(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.collected(grad), None


class _CollectFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: "Rows | PlacedRows") -> Tensor:
        ctx.rows = rows
        return rows.collected(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.spread_values(grad), None


@dataclass(frozen=True)
class PlacedRows(_Copies):
    """Rows at fixed places of a padded list, so that the host need not know their number.

    Attributes:
        places_TS: place of each slot's row, int64; `size` for an empty slot.
        size: length of the padded list; unused places are zero.
    """

    places_TS: Tensor
    size: int

    def take(self, values_TS: Tensor) -> Tensor:
        """[T, S] -> [size]: the value of each row's slot; 0 at unused places."""
        longer = values_TS.new_zeros(self.size + 1)
        return longer.index_put((self.places_TS.flatten(),), values_TS.flatten())[:-1]

    def spread_values(self, x: Tensor) -> Tensor:
        """`spread`, not differentiable."""
        longer = x.new_zeros(self.size + 1, *x.shape[1:])  # the last row collects empty slots
        for places_T in self.places_TS.unbind(1):
            longer[places_T] = x
        return longer[:-1]

    def collected(self, x: Tensor) -> Tensor:
        """`collect`, not differentiable."""
        longer = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        if not _sums_exactly(x):
            return longer[self.places_TS].sum(1)
        y = F.embedding_bag(self.places_TS, longer.reshape(self.size + 1, -1), mode="sum")
        return y.view(len(y), *x.shape[1:])
