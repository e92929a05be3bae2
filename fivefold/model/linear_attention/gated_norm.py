"""RMSNorms of heads with a state, with gates of the same tokens.

Unlike other norms, their weights are never offsets from 1 (`apply_layernorm_1p`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.model.leaves import local
from fivefold.model.norms import inverse_root_mean_square
from fivefold.model.traced import result

GateActivation = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Activation of a gate: gate -> (its value, its derivative), of the gate's shape."""


class _GatedNorm(nn.Module):
    def __init__(self, features: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features))
        self.epsilon = epsilon


class NormThenGate(_GatedNorm):
    """Each head divided by its root mean square, times a weight, times silu(gate), or
    sigmoid(gate) if the gate is `bare`."""

    def __init__(self, features: int, epsilon: float, *, bare: bool = False) -> None:
        super().__init__(features, epsilon)
        self.opening = _share if bare else _opened

    def forward(self, x_BSGF: Tensor, gate_BSGF: Tensor) -> Tensor:
        """[B, S, G, heads, features], computed in at least fp32."""
        x, gate = (each.unflatten(3, (-1, len(self.weight))) for each in (x_BSGF, gate_BSGF))
        y: Tensor = _NormThenGate.apply(x, gate, local(self.weight), self.epsilon, self.opening)
        return y


class GateThenNorm(_GatedNorm):
    """Heads times silu(gate), those of a group divided by their root mean square together, times a
    weight of each feature of all groups."""

    def forward(self, x_BSGF: Tensor, gate_BSGF: Tensor) -> Tensor:
        """A tensor of the same shape, computed in at least fp32."""
        weight_GF = local(self.weight).view(x_BSGF.shape[2:])
        y: Tensor = _GateThenNorm.apply(x_BSGF, gate_BSGF, weight_GF, self.epsilon)
        return y


class _NormThenGate(torch.autograd.Function):
    """Saves its inputs and no statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, opening: GateActivation
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.epsilon, ctx.opening = epsilon, opening
        wide = torch.promote_types(x.dtype, torch.float32)
        normed, _ = _normed(x.to(wide), epsilon)
        opened, _ = opening(gate.to(wide))
        return result(normed.mul_(weight.to(wide)).mul_(opened).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        normed, scale = _normed(x.to(wide), ctx.epsilon)
        of_y, factor = grad.to(wide), weight.to(wide)
        opened, slope = ctx.opening(gate.to(wide))
        gated = of_y * normed
        of_weight = (gated * opened).flatten(0, -2).sum(0)
        of_gate = gated * factor * slope
        of_x = _unnormed(of_y * factor * opened, normed, scale)
        return of_x.to(x.dtype), of_gate.to(gate.dtype), of_weight.to(weight.dtype), None, None


class _GateThenNorm(torch.autograd.Function):
    """Saves its inputs and no statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.epsilon = epsilon
        wide = torch.promote_types(x.dtype, torch.float32)
        opened, _ = _opened(gate.to(wide))
        normed, _ = _normed(x.to(wide) * opened, epsilon)
        return result(normed.mul_(weight.to(wide)).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, gate, weight = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        (opened, slope), of_y, x_wide = _opened(gate.to(wide)), grad.to(wide), x.to(wide)
        normed, scale = _normed(x_wide * opened, ctx.epsilon)
        of_weight = (of_y * normed).flatten(0, -3).sum(0)
        of_gated = _unnormed(of_y * weight.to(wide), normed, scale)
        of_gate = of_gated * x_wide * slope
        of_x = of_gated.mul_(opened)
        return of_x.to(x.dtype), of_gate.to(gate.dtype), of_weight.to(weight.dtype), None


def _opened(gate: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate), and its slope."""
    share = gate.sigmoid()
    return gate * share, share * (1 + gate * (1 - share))


def _share(gate: Tensor) -> tuple[Tensor, Tensor]:
    """sigmoid(gate), and its slope."""
    share = gate.sigmoid()
    return share, share * (1 - share)


def _normed(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x divided by its root mean square over the last dim, and one over that."""
    scale = inverse_root_mean_square(x, epsilon)
    return x * scale, scale


def _unnormed(of_normed: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """The gradient of the norm's input, written into the memory of the result's gradient."""
    mean = torch.linalg.vecdot(of_normed, normed).div_(normed.shape[-1]).unsqueeze(-1)
    return of_normed.addcmul_(normed, mean, value=-1.0).mul_(scale)
