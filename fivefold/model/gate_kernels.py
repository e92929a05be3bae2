"""Gated activations as one Triton kernel forward and one backward, each of which reads once.

Imported only where they run, since Triton is. They are proven without a GPU by Triton's
interpreter (`TRITON_INTERPRET=1`).

Shapes: T rows, F inner features.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_A_TIME = 1024
"""Features of a row that a program holds in registers."""


def gated(
    gate: Tensor,
    up: Tensor,
    weights_T: Tensor | None,
    slope: float,
    bound: float | None,
    offset: float,
) -> Tensor:
    """g * sigmoid(slope * g) * (u + offset) * weight, under autograd, which saves only its inputs.

    g is the gate clamped to at most `bound`, u is up clamped to +-`bound`. Computed in at least
    fp32.
    """
    y_TF: Tensor = _Gated.apply(gate, up, weights_T, slope, bound, offset)
    return y_TF


class _Gated(torch.autograd.Function):
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
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up, weights_T)
        ctx.how = slope, bound, offset
        y_TF = torch.empty_like(gate)
        weights = gate if weights_T is None else weights_T
        tensors = gate, up, weights, gate, y_TF, gate, gate
        _run(tensors, *ctx.how, weighted=weights_T is not None, backward=False)
        return y_TF

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weights_T = ctx.saved_tensors
        made = torch.empty_like(gate), torch.empty_like(up)
        grad_weights = None if weights_T is None else torch.empty_like(weights_T)
        weights, sums = (gate if x is None else x for x in (weights_T, grad_weights))
        tensors = gate, up, weights, grad_TF.contiguous(), *made, sums
        _run(tensors, *ctx.how, weighted=weights_T is not None, backward=True)
        return *made, grad_weights, None, None, None


def _run(
    tensors: tuple[Tensor, ...],
    slope: float,
    bound: float | None,
    offset: float,
    *,
    weighted: bool,
    backward: bool,
) -> None:
    rows, features = tensors[0].shape
    if rows:
        _gate[(rows,)](
            *tensors,
            features,
            slope=slope,
            bound=bound,
            offset=offset,
            weighted=weighted,
            backward=backward,
            wide=tl.float64 if tensors[0].dtype == torch.float64 else tl.float32,
            size=AT_A_TIME,
        )


@triton.jit
def _gate(  # type: ignore[no-untyped-def]
    gate,
    up,
    weights,
    grad,
    first,
    second,
    sums,
    features,
    slope: tl.constexpr,
    bound: tl.constexpr,
    offset: tl.constexpr,
    weighted: tl.constexpr,
    backward: tl.constexpr,
    wide: tl.constexpr,
    size: tl.constexpr,
):
    """Forward: the result is `first`. Backward: gradients of gate, up and weights."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, size)
    weight = 1.0
    if weighted:
        weight = tl.load(weights + row).to(wide)
    total = tl.zeros((size,), wide)
    for start in range(0, features, size):
        inside = start + lanes < features
        place = row * features + start + lanes
        g_whole = tl.load(gate + place, mask=inside, other=0.0).to(wide)
        u_whole = tl.load(up + place, mask=inside, other=0.0).to(wide)
        g, u = g_whole, u_whole
        if bound is not None:
            g = tl.where(g > bound, bound, g)
            u = tl.where(u > bound, bound, tl.where(u < -bound, -bound, u))
        u += offset
        share = 1.0 / (1.0 + tl.exp(-slope * g))
        value = g * share
        if backward:
            dy = tl.load(grad + place, mask=inside, other=0.0).to(wide)
            if weighted:
                total += tl.where(inside, dy * value * u, 0.0)
                dy *= weight
            dg, du = dy * u * share * (1.0 + slope * g * (1.0 - share)), dy * value
            if bound is not None:
                dg = tl.where(g_whole > bound, 0.0, dg)
                du = tl.where((u_whole > bound) | (u_whole < -bound), 0.0, du)
            tl.store(first + place, dg.to(first.dtype.element_ty), mask=inside)
            tl.store(second + place, du.to(second.dtype.element_ty), mask=inside)
        else:
            y = value * u
            if weighted:
                y *= weight
            tl.store(first + place, y.to(first.dtype.element_ty), mask=inside)
    if backward and weighted:
        tl.store(sums + row, tl.sum(total, 0).to(sums.dtype.element_ty))
