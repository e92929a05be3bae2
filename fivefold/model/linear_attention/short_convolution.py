"""Gated short convolutions in place of attention (LFM2, Liquid AI 2025).

Of each token a projection makes three vectors, B, C and x, as wide as the hidden state. B x passes
a short causal convolution of each feature; what it makes is multiplied by C, and projected back.
"""

from collections.abc import Sequence
from operator import mul
from typing import Any

import torch
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.model.layers import Linear
from fivefold.model.linear_attention.chunks import DocumentChunks
from fivefold.model.linear_attention.recurrence import StateGroup, convolved
from fivefold.model.linear_attention.state_layer import Convolution, StateLayer


def gated_convolution(
    x_BLGF: Tensor, b_BLGF: Tensor, taps: Sequence[Tensor], group: StateGroup, of: DocumentChunks
) -> Tensor:
    """The convolution of B x within documents, [B, L, G, F], of taps [G F, K]; see `States`."""
    y: Tensor = _GatedConvolution.apply(x_BLGF, b_BLGF, taps[0], of.position)
    return y


class _GatedConvolution(torch.autograd.Function):
    """Keeps x and B alone, in at least fp32 of which the backward makes B x again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, b: Tensor, taps_FK: Tensor, position_T: Tensor) -> Tensor:
        ctx.save_for_backward(x, b, taps_FK)
        ctx.position_T = position_T
        z_TF = _product(x, b)
        return convolved(z_TF, taps_FK.to(z_TF.dtype), position_T).to(x.dtype).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, b, taps_FK = ctx.saved_tensors
        z_TF, position_T = _product(x, b), ctx.position_T
        wide_FK, grad_TF = taps_FK.to(z_TF.dtype), grad.reshape(z_TF.shape).to(z_TF.dtype)
        dz_TF, dtaps_FK = grad_TF * wide_FK[:, -1], torch.zeros_like(wide_FK)
        dtaps_FK[:, -1] = torch.linalg.vecdot(grad_TF, z_TF, dim=0)
        for back in range(1, min(wide_FK.shape[1], len(z_TF))):
            later_TF = grad_TF[back:] * (position_T[back:] >= back)[:, None]
            dz_TF[:-back].addcmul_(later_TF, wide_FK[:, -1 - back])
            dtaps_FK[:, -1 - back] = torch.linalg.vecdot(later_TF, z_TF[:-back], dim=0)
            del later_TF
        del z_TF, grad_TF
        dz = dz_TF.view_as(x)
        return (dz * b).to(x.dtype), (dz * x).to(b.dtype), dtaps_FK.to(taps_FK.dtype), None


def _product(x: Tensor, b: Tensor) -> Tensor:
    """B x of all tokens, [T, F], in at least fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * b).flatten(2).flatten(0, 1)


class ShortConvolution(StateLayer):
    """Projections, the convolution between both gates, and the output projection.

    Its state is the last tokens that the convolution still reaches. What it mixes is x, with C as
    the gate after it; what it is told beside, as others are of rates, is B.
    """

    states = staticmethod(gated_convolution)

    def __init__(self, model: ModelConfig, layer: int) -> None:
        hidden, sizes = model.hidden_size, model.states
        super().__init__(sizes, sizes.value, layer)
        self.in_proj_xc = Linear(hidden, 2 * hidden)
        self.in_proj_b = Linear(hidden, hidden)
        self.conv1d = Convolution(hidden, sizes.taps)
        self.norm = mul
        self.out_proj = Linear(hidden, hidden)

    @property
    def projections(self) -> tuple[Linear, Linear]:
        """See `StateLayer`."""
        return self.in_proj_xc, self.in_proj_b

    @property
    def by_head(self) -> Sequence[Tensor]:
        """Nothing: heads have no parameters of their own."""
        return ()
