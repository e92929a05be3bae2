"""RMSNorm of each head of linear attention, times a gate of the same token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.leaves import local
from fivefold.model.traced import result


class GatedNorm(nn.Module):
    """x divided by its root mean square over the last dim, times a weight, times silu(gate).

    Unlike other norms, its weight is never an offset from 1 (`apply_layernorm_1p`).
    """

    def __init__(self, features: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features))
        self.epsilon = epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Of the same shape as x and gate, computed in at least fp32."""
        y: Tensor = _GatedNorm.apply(x, gate, local(self.weight), self.epsilon)
        return y


class _GatedNorm(torch.autograd.Function):
    """Keeps what it reads, and no statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.epsilon = epsilon
        wide = torch.promote_types(x.dtype, torch.float32)
        normed, _ = _normed(x.to(wide), epsilon)
        return result(normed.mul_(weight.to(wide)).mul_(F.silu(gate.to(wide))).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, gate, weight = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        normed, scale = _normed(x.to(wide), ctx.epsilon)
        of_y, z, factor = grad.to(wide), gate.to(wide), weight.to(wide)
        opened, gated = z.sigmoid(), of_y * normed
        of_weight = (gated * z * opened).flatten(0, -2).sum(0)
        of_gate = gated * factor * opened * (1 + z * (1 - opened))
        of_normed = of_y * factor * z * opened
        mean = torch.linalg.vecdot(of_normed, normed).div_(x.shape[-1]).unsqueeze(-1)
        of_x = of_normed.addcmul_(normed, mean, value=-1.0).mul_(scale)
        return of_x.to(x.dtype), of_gate.to(gate.dtype), of_weight.to(weight.dtype), None


def _normed(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x divided by its root mean square, and one over that."""
    scale = torch.linalg.vecdot(x, x).div_(x.shape[-1]).unsqueeze(-1).add_(epsilon).rsqrt_()
    return x * scale, scale
