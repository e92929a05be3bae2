"""Activations of MLPs and experts, and the gates that they make (Shazeer 2020); elementwise."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.config.model import ModelConfig

Gate = Callable[[Tensor, Tensor], Tensor]
"""From what the gate and the up projection give, [..., F] each, what the down projection takes."""

QUICK = 1.702  # with it x sigmoid(1.702 x) is close to GELU (Hendrycks and Gimpel 2016)


def gate_of(model: ModelConfig) -> Gate:
    """activation(gate) * (up + offset), of clamped values where the model has a bound."""
    if model.activation_func in ("silu", "quick_gelu"):
        slope = QUICK if model.activation_func == "quick_gelu" else 1.0
        bound, offset = model.activation_func_clamp_value, model.glu_linear_offset
        if slope == 1.0 and bound is None and not offset:
            return swiglu
        return partial(bounded_gate, slope=slope, bound=bound, offset=offset)
    activation = activation_of(model)
    return lambda gate, up: activation(gate) * up


def activation_of(model: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The activation by itself."""
    match model.activation_func:
        case "silu":
            return F.silu
        case "quick_gelu":
            return quick_gelu
    return partial(F.gelu, approximate="tanh" if model.activation_func == "gelu_tanh" else "none")


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


def bounded_gate(
    gate: Tensor, up: Tensor, *, slope: float, bound: float | None, offset: float
) -> Tensor:
    """g sigmoid(slope g) * (u + offset), which saves its two inputs only.

    As in gpt-oss (OpenAI 2025): g is the gate, at most `bound`, and u is up within +- `bound`.
    """
    y: Tensor = _BoundedGate.apply(gate, up, slope, bound, offset)
    return y


class _BoundedGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, slope: float, bound: float | None, offset: float
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.numbers = slope, bound, offset
        g, u = _bounded(gate, up, bound)
        return (g * slope).sigmoid_().mul_(g).mul_(u + offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        gate, up = ctx.saved_tensors
        slope, bound, offset = ctx.numbers
        g, u = _bounded(gate, up, bound)
        share = (g * slope).sigmoid_()
        grad_up = grad * g * share
        grad_gate = grad * (u + offset) * share * (1.0 + slope * g * (1.0 - share))
        if bound is not None:
            grad_gate.masked_fill_(gate > bound, 0.0)
            grad_up.masked_fill_(up.abs() > bound, 0.0)
        return grad_gate, grad_up, None, None, None


def _bounded(gate: Tensor, up: Tensor, bound: float | None) -> tuple[Tensor, Tensor]:
    return (gate, up) if bound is None else (gate.clamp(max=bound), up.clamp(-bound, bound))


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), which saves its input only."""
    y: Tensor = _QuickGELU.apply(x)
    return y


class _QuickGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * QUICK).sigmoid_().mul_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        share = (x * QUICK).sigmoid_()
        return grad * share * (1.0 + QUICK * x * (1.0 - share))
