"""The activation of an MLP's inner features, with its gate, and with weights of rows.

Shapes: T tokens or rows, F inner features.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.config.model import ModelConfig


def activated(
    model: ModelConfig, inner: Sequence[Tensor], weights_T: Tensor | None = None
) -> Tensor:
    """activation(gate) * up, or activation(up) without a gate, times the weight of the row.

    Args:
        model: gives the activation.
        inner: [T, F] each: gate and up, or up alone.
        weights_T: weights of the rows in a type at least as wide; None: 1.
    """
    if len(inner) == 2 and model.activation_func == "silu":
        gate_TF, up_TF = inner
        if weights_T is None:
            return swiglu(gate_TF, up_TF)
        y: Tensor = _WeightedSwiGLU.apply(gate_TF, up_TF, weights_T)
        return y
    y_TF = _function(model, inner[0])
    if len(inner) == 2:
        y_TF = y_TF * inner[1]
    if weights_T is None:
        return y_TF
    return (y_TF * weights_T[:, None]).to(y_TF.dtype)


def _function(model: ModelConfig, x_TF: Tensor) -> Tensor:
    if model.activation_func == "silu":
        return F.silu(x_TF)
    return F.gelu(x_TF, approximate="tanh" if model.activation_func == "gelu_tanh" else "none")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, which saves its two inputs only."""
    y: Tensor = _SwiGLU.apply(gate, up)
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, F.silu(gate).mul_(grad)


class _WeightedSwiGLU(torch.autograd.Function):
    """silu(gate) * up * weight, which saves its inputs only."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights_T: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weights_T)
        act = F.silu(gate).mul_(up)
        if weights_T.dtype == act.dtype:
            return act.mul_(weights_T[:, None])
        return (act * weights_T[:, None]).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weights_T = ctx.saved_tensors
        act = F.silu(gate)
        product = act * up
        if grad.dtype == weights_T.dtype:  # in place, and again in place
            grad_weights = product.mul_(grad).sum(1)
            weighted = torch.mul(grad, weights_T[:, None], out=product)
        else:
            wide = grad.to(weights_T.dtype)
            grad_weights = torch.linalg.vecdot(wide, product.to(weights_T.dtype))
            weighted = (wide * weights_T[:, None]).to(gate.dtype)
        grad_up = act.mul_(weighted)
        weighted.mul_(up)
        torch.ops.aten.silu_backward.grad_input(weighted, gate, grad_input=weighted)
        return weighted, grad_up, grad_weights
