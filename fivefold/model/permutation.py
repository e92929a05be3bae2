"""Copies of tokens in another order, one for each place where a token is to be computed.

A token has S slots, each for one copy at most: the experts, or the ranks, that it is sent to. Rows
are the slots that are taken, in an order of their own. Shapes: T tokens, S slots, R rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Which slots are rows, and in which order.

    Attributes:
        slots_R: t * S + s of every row, int64; no two are equal.
        tokens: T.
        per_token: S.
    """

    slots_R: Tensor
    tokens: int
    per_token: int

    @property
    def tokens_R(self) -> Tensor:
        """The token of every row."""
        return self.slots_R if self.per_token == 1 else self.slots_R // self.per_token

    def spread(self, x: Tensor) -> Tensor:
        """[T, ...] -> [R, ...]: every row is its token."""
        y: Tensor = _SpreadRows.apply(x, self)
        return y

    def collect(self, x: Tensor) -> Tensor:
        """[R, ...] -> [T, ...]: every token is the sum of its rows, in the order of its slots."""
        y: Tensor = _CollectRows.apply(x, self)
        return y

    def take(self, values_TS: Tensor) -> Tensor:
        """[T, S] -> [R]: every row has the value of its slot."""
        return values_TS.flatten()[self.slots_R]


def _collected(x: Tensor, rows: Rows) -> Tensor:
    """No atomic sums: every token adds up its rows, in the order of its slots."""
    taken, slots = len(rows.slots_R), rows.tokens * rows.per_token
    shape = rows.tokens, *x.shape[1:]
    if taken == 0:
        return x.new_zeros(shape)
    # Where each slot's row is, if every slot has one.
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
    """Whether bags are summed without a copy in at least fp32: bf16 not on the CPU."""
    return x.is_cuda or x.dtype in (torch.float32, torch.float64)


class _SpreadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.tokens_R)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _collected(grad, ctx.rows), None


class _CollectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return _collected(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.rows.tokens_R), None


@dataclass(frozen=True)
class PlacedRows:
    """Rows in fixed places of a list that is longer, where nobody need know how many there are.

    Attributes:
        places_TS: place of the row of every slot, int64; `size` for a slot without one.
        size: number of places; those that no slot takes are zero.
    """

    places_TS: Tensor
    size: int

    def spread(self, x: Tensor) -> Tensor:
        """[T, ...] -> [size, ...]: every row is its token."""
        y: Tensor = _SpreadPlaced.apply(x, self)
        return y

    def collect(self, x: Tensor) -> Tensor:
        """[size, ...] -> [T, ...]: every token is the sum of its rows, in their slots' order."""
        y: Tensor = _CollectPlaced.apply(x, self)
        return y

    def take(self, values_TS: Tensor) -> Tensor:
        """[T, S] -> [size]: every row has the value of its slot, other places 0."""
        longer = values_TS.new_zeros(self.size + 1)
        return longer.index_put((self.places_TS.flatten(),), values_TS.flatten())[:-1]


def _spread_placed(x: Tensor, rows: PlacedRows) -> Tensor:
    longer = x.new_zeros(rows.size + 1, *x.shape[1:])  # the last place is nowhere
    for places_T in rows.places_TS.unbind(1):
        longer[places_T] = x
    return longer[:-1]


def _collect_placed(x: Tensor, rows: PlacedRows) -> Tensor:
    longer = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return longer[rows.places_TS].sum(1)


class _SpreadPlaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: PlacedRows) -> Tensor:
        ctx.rows = rows
        return _spread_placed(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _collect_placed(grad, ctx.rows), None


class _CollectPlaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: PlacedRows) -> Tensor:
        ctx.rows = rows
        return _collect_placed(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _spread_placed(grad, ctx.rows), None
