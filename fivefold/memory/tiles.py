"""MLPs in tiles of tokens, each recomputed by itself in the backward.

Only one tile's inner features exist at a time, forward and backward, so that the length of a
sequence is not bound by them (TiledMLP of Arctic Long Sequence Training: Bekman et al. 2025). A
tile's weight gradients are added up in at least fp32: added in bf16, each of many sums would be
rounded.

Shapes: T tokens, H features.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fivefold.config.memory import MemoryConfig
from fivefold.model.context import Context
from fivefold.model.dropout import LayerDropout
from fivefold.model.leaves import local
from fivefold.model.mlp import MLP
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.linear import ColumnParallel, RowParallel
from fivefold.tensor.one_rank import LocalColumn


@dataclass(frozen=True)
class Tiles:
    """Runs a dense MLP on one tile of tokens after the other.

    Attributes:
        memory: the settings that say how large a tile is.
    """

    memory: MemoryConfig

    def __call__(self, mlp: MLP, x_TH: Tensor, context: Context) -> Tensor:
        """[T, H] -> [T, H]."""
        tiles = x_TH.split(self.memory.tile_of(len(x_TH)))
        sums = {name: _Sum(local(p), len(tiles)) for name, p in mlp.named_parameters()}
        made = []
        # A tile's context is kept until it is recomputed, so keep only the dropout of an MLP.
        context = replace(context, layer=LayerDropout(adapters=context.layer.adapters))
        for tile_tH, end in zip(tiles, accumulate(map(len, tiles)), strict=True):
            parameters = {name: each.share() for name, each in sums.items()}
            # Only what is itself an argument is saved as a tensor, so that others may discard it.
            run = partial(_run, mlp, parameters, context, end)
            made.append(checkpoint(run, tile_tH, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(made)


def _run(
    mlp: MLP, parameters: dict[str, Tensor], context: Context, end: int, tile_tH: Tensor
) -> Tensor:
    of_tile = replace(context, layer=context.layer.of_tile(end - len(tile_tH), end))
    made_tH: Tensor = functional_call(mlp, parameters, (tile_tH, of_tile))
    return made_tH


def never_defer(mlp: MLP) -> None:
    """Keep an MLP's weight gradients in its backward: deferring would keep what a tile discards."""
    for seam in ("column", "row", "whole"):
        held = getattr(mlp, seam)
        if isinstance(held, LocalColumn | ColumnParallel | RowParallel):
            setattr(mlp, seam, replace(held, deferred=DeferredWeights()))


class _Sum:
    """Hands out a parameter several times, and sums the gradients of all uses.

    Args:
        parameter: this rank's part of the parameter.
        uses: how often it is used.
    """

    def __init__(self, parameter: Tensor, uses: int) -> None:
        self._parameter, self._missing = parameter, uses
        self._wide: Tensor | None = None

    def share(self) -> Tensor:
        """The parameter, for one use."""
        parameter: Tensor = _Use.apply(self._parameter, self)
        return parameter

    def add(self, grad: Tensor) -> Tensor | None:
        """Add the gradient of one use; returns the sum when it is complete.

        Then it is kept no longer: this lives until the backward of all layers ends.
        """
        self._missing -= 1
        if self._wide is None:
            self._wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        else:
            self._wide += grad
        if self._missing:
            return None
        wide, self._wide = self._wide, None
        return wide.to(grad.dtype)


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return ctx.total.add(grad), None
