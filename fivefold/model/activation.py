"""Activation functions of MLPs and experts, with optional gating and per-row weights.

Shapes: T tokens or rows, F inner features.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.mesh.device import runs_triton
from fivefold.model.traced import result

_QUICK = 1.702
"""Slope of quick_gelu, x * sigmoid(1.702 x) (Hendrycks and Gimpel 2016)."""

_PLAIN = "silu", "gelu", "gelu_tanh"
"""Activations that are a single operation of PyTorch, which saves only its input."""


def activated(
    model: ModelConfig,
    inner: Sequence[Tensor],
    weights_T: Tensor | None = None,
    *,
    fused: bool = False,
) -> Tensor:
    """activation(gate) * (up + offset), or activation(up) if ungated, times each row's weight.

    Only the inputs are saved for the backward.

    Args:
        model: names the activation and its settings.
        inner: [T, F] each: gate and up, or up alone.
        weights_T: weight of each row, in a dtype at least as wide as `inner`; None: all 1.
        fused: whether one kernel of a GPU computes it (`bias_swiglu_fusion`, `bias_gelu_fusion`).
    """
    name, gate = model.activation_func, inner[0]
    up = inner[1] if len(inner) == 2 else None
    bound, offset = model.activation_func_clamp_value, model.glu_linear_offset
    if up is None and weights_T is None and name in _PLAIN:
        return _value(name, gate)  # one kernel of PyTorch's
    if fused and runs_triton(gate):
        from fivefold.model.kernels import gates as gate_kernels

        return gate_kernels.gated(gate, up, weights_T, name, bound, offset)
    if up is None or name != "silu" or bound is not None or offset:
        y: Tensor = _Activated.apply(gate, up, weights_T, name, bound, offset)
        return y
    if weights_T is None:
        return swiglu(gate, up)
    y = _WeightedSwiGLU.apply(gate, up, weights_T)
    return y


def _value(name: str, x: Tensor) -> Tensor:
    """The activation of that name."""
    if name == "silu":
        return F.silu(x)
    if name == "quick_gelu":
        return (x * _QUICK).sigmoid_().mul_(x)
    if name == "relu":
        return x.relu()
    if name == "squared_relu":
        return x.relu().square_()
    return F.gelu(x, approximate=_approximation(name))


def _gradient(name: str, grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of the activation's argument, given that of its value."""
    found: Tensor
    if name == "silu":
        found = torch.ops.aten.silu_backward.default(grad, x)
    elif name == "quick_gelu":
        share = (x * _QUICK).sigmoid_()
        found = grad * share * (1.0 + _QUICK * x * (1.0 - share))
    elif name == "relu":
        found = torch.ops.aten.threshold_backward.default(grad, x, 0.0)
    elif name == "squared_relu":
        found = x.relu().mul_(grad).mul_(2.0)
    else:
        found = torch.ops.aten.gelu_backward.default(grad, x, approximate=_approximation(name))
    return found


def _approximation(name: str) -> str:
    return "tanh" if name == "gelu_tanh" else "none"


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
        grad_gate = torch.ops.aten.silu_backward.default(grad * up, gate)
        return grad_gate, F.silu(gate).mul_(grad)


class _WeightedSwiGLU(torch.autograd.Function):
    """silu(gate) * up * weight, which saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights_T: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weights_T)
        act = F.silu(gate).mul_(up)
        if weights_T.dtype == act.dtype:
            return result(act.mul_(weights_T[:, None]))
        return result((act * weights_T[:, None]).to(gate.dtype))

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


class _Activated(torch.autograd.Function):
    """activation(g) * (u + offset) * weight, without u or weight where None; saves its inputs.

    As in gpt-oss (OpenAI 2025): g is the gate clamped to at most `bound`, u is up clamped to
    +-`bound`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor | None,
        weights_T: Tensor | None,
        name: str,
        bound: float | None,
        offset: float,
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weights_T)
        ctx.how = name, bound, offset
        g, u = _bounded(gate, up, bound, offset)
        y = _value(name, g)
        if u is not None:
            y = y.mul_(u)
        return result(y if weights_T is None else (y * weights_T[:, None]).to(gate.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weights_T = ctx.saved_tensors
        name, bound, offset = ctx.how
        g, u = _bounded(gate, up, bound, offset)
        grad_weights = grad_up = None
        value = gate if up is weights_T is None else _value(name, g)
        if weights_T is not None:
            wide = grad.to(weights_T.dtype)
            unweighted = (value if u is None else value * u).to(weights_T.dtype)
            grad_weights = torch.linalg.vecdot(wide, unweighted)
            grad = (wide * weights_T[:, None]).to(gate.dtype)
        if u is not None:
            grad_up = value.mul_(grad)
            grad = grad * u
        grad_gate = _gradient(name, grad, g)
        if bound is not None:
            grad_gate.masked_fill_(gate > bound, 0.0)
            if grad_up is not None:
                grad_up.masked_fill_(up.abs() > bound, 0.0)
        return grad_gate, grad_up, grad_weights, None, None, None


def _bounded(
    gate: Tensor, up: Tensor | None, bound: float | None, offset: float
) -> tuple[Tensor, Tensor | None]:
    if bound is not None:
        gate, up = gate.clamp(max=bound), None if up is None else up.clamp(-bound, bound)
    return gate, up + offset if up is not None and offset else up
