"""Decides which tokens are kept where the capacity of an expert, or of a rank with experts, is
limited.

Shapes: T tokens of this rank, E experts, g neighbouring experts that share their capacity.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

_SCORE_BITS: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 12, torch.float64: 36})
"""Leading bits by which scores are compared."""


def within(room: int, group: int, chosen_TE: Tensor, scores_TE: Tensor | None) -> Tensor:
    """[T, E]: which of the chosen pairs of token and expert are kept. Never waits for the device.

    Args:
        room: how many pairs of every group do.
        group: g.
        chosen_TE: bool, the pairs that look for it.
        scores_TE: the highest find room, and of equal ones the first token's; None: the first
            tokens do. Of one token, the lowest numbers of experts are first.
    """
    experts = chosen_TE.shape[1]
    chosen = _columns(chosen_TE, group)
    if scores_TE is None:
        place = chosen.cumsum(0) - 1
    else:
        scores = _columns(scores_TE, group).masked_fill(~chosen, float("-inf"))
        order = scores.argsort(dim=0, descending=True, stable=True)
        numbers = torch.arange(len(order), device=order.device)[:, None]
        place = torch.empty_like(order).scatter_(0, order, numbers.expand_as(order))
    found = chosen & (place < room)
    return found.view(-1, group, experts // group).transpose(1, 2).flatten(1)


def with_ties(scores_TE: Tensor) -> Tensor:
    """Scores for `within`, rounded so that scores which differ only by rounding errors are equal.

    Rounding errors depend on the layout; equal tokens at the start of documents have such scores.
    The rounding is relative, since scores are smaller the more experts there are.
    """
    mantissa, exponent = torch.frexp(scores_TE)
    return torch.ldexp((mantissa * 2.0 ** _SCORE_BITS[scores_TE.dtype]).round(), exponent)


def _columns(x_TE: Tensor, group: int) -> Tensor:
    """[T * g, E / g]: a column for each group, token by token."""
    return x_TE.unflatten(1, (-1, group)).transpose(1, 2).flatten(0, 1)
