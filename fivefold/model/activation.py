"""Activation functions of MLPs and experts, with optional gating and per-row weights.

Shapes: T tokens or rows, F inner features.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.mesh.device import runs_triton
from fivefold.model.traced import result

_SLOPES: Mapping[str, float] = MappingProxyType({"silu": 1.0, "quick_gelu": 1.702})
"""Slope by activation name, for activations of the form x * sigmoid(slope * x)."""


def activated(
    model: ModelConfig,
    inner: Sequence[Tensor],
    weights_T: Tensor | None = None,
    *,
    fused: bool = False,
) -> Tensor:
    """activation(gate) * (up + offset), or activation(up) if ungated, times each row's weight.

    Args:
        model: names the activation and its settings.
        inner: [T, F] each: gate and up, or up alone.
        weights_T: weight of each row, in a dtype at least as wide as `inner`; None: all 1.
        fused: whether one kernel of a GPU computes a gated activation (`bias_swiglu_fusion`).
    """
    if len(inner) == 2 and model.activation_func in _SLOPES:
        return _gated(model, inner[0], inner[1], weights_T, fused=fused)
    y_TF = _function(model, inner[0])
    if len(inner) == 2:
        y_TF = y_TF * inner[1]
    if weights_T is None:
        return y_TF
    return (y_TF * weights_T[:, None]).to(y_TF.dtype)


def _gated(
    model: ModelConfig, gate: Tensor, up: Tensor, weights_T: Tensor | None, *, fused: bool
) -> Tensor:
    """The gated activation as one autograd function, which saves only its inputs."""
    bound, offset = model.activation_func_clamp_value, model.glu_linear_offset
    slope = _SLOPES[model.activation_func]
    y: Tensor
    if fused and runs_triton(gate):
        from fivefold.model import gate_kernels

        return gate_kernels.gated(gate, up, weights_T, slope, bound, offset)
    if model.activation_func == "quick_gelu" or bound is not None or offset:
        y = _BoundedGate.apply(gate, up, weights_T, slope, bound, offset)
        return y
    if weights_T is None:
        return swiglu(gate, up)
    y = _WeightedSwiGLU.apply(gate, up, weights_T)
    return y


def _function(model: ModelConfig, x_TF: Tensor) -> Tensor:
    if model.activation_func == "silu":
        return F.silu(x_TF)
    if model.activation_func == "quick_gelu":
        y: Tensor = _QuickGELU.apply(x_TF)
        return y
    return F.gelu(x_TF, approximate="tanh" if model.activation_func == "gelu_tanh" else "none")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, which saves only its two inputs."""
    y: Tensor = _SwiGLU.apply(gate, up)
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return result(F.silu(gate).mul_(up))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, F.silu(gate).mul_(grad)


class _WeightedSwiGLU(torch.autograd.Function):
    """silu(gate) * up * weight, which saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights_T: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weights_T)
        act = F.silu(gate).mul_(up)
        if weights_T.dtype == act.dtype:
            return result(act.mul_(weights_T[:, None]))
        return (act * weights_T[:, None]).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weights_T = ctx.saved_tensors
        act = F.silu(gate)
        product = act * up
        if grad.dtype == weights_T.dtype:  # then every buffer can be reused in place
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


class _BoundedGate(torch.autograd.Function):
    """g * sigmoid(slope * g) * (u + offset) * weight, which saves only its inputs.

    As in gpt-oss (OpenAI 2025): g is the gate clamped to at most `bound`, u is up clamped to
    +-`bound`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        weights_T: Tensor | None,
        slope: float,
        bound: float | None,
        offset: float,
    ) -> Tensor:
        ctx.save_for_backward(gate, up, *(() if weights_T is None else (weights_T,)))
        ctx.numbers = slope, bound, offset
        g, u = _bounded(gate, up, bound)
        y = (g * slope).sigmoid_().mul_(g).mul_(u + offset)
        return result(y) if weights_T is None else (y * weights_T[:, None]).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, *weights = ctx.saved_tensors
        slope, bound, offset = ctx.numbers
        g, u = _bounded(gate, up, bound)
        share, grad_weights = (g * slope).sigmoid_(), None
        for weights_T in weights:
            wide = grad.to(weights_T.dtype)
            unweighted = (share * g * (u + offset)).to(weights_T.dtype)
            grad_weights = torch.linalg.vecdot(wide, unweighted)
            grad = (wide * weights_T[:, None]).to(gate.dtype)
        grad_up = grad * g * share
        grad_gate = grad * (u + offset) * share * (1.0 + slope * g * (1.0 - share))
        if bound is not None:
            grad_gate.masked_fill_(gate > bound, 0.0)
            grad_up.masked_fill_(up.abs() > bound, 0.0)
        return grad_gate, grad_up, grad_weights, None, None, None


def _bounded(gate: Tensor, up: Tensor, bound: float | None) -> tuple[Tensor, Tensor]:
    return (gate, up) if bound is None else (gate.clamp(max=bound), up.clamp(-bound, bound))


class _QuickGELU(torch.autograd.Function):
    """x * sigmoid(1.702 x) (Hendrycks and Gimpel 2016), which saves only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return result((x * _SLOPES["quick_gelu"]).sigmoid_().mul_(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,), slope = ctx.saved_tensors, _SLOPES["quick_gelu"]
        share = (x * slope).sigmoid_()
        return grad * share * (1.0 + slope * x * (1.0 - share))
