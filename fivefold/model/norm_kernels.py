"""The residual sum and the RMSNorm after it as one Triton kernel, and their backward as another.

Imported only where they run, since Triton is. They are proven without a GPU by Triton's
interpreter (`TRITON_INTERPRET=1`).

Shapes: T rows, H features.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.mesh.device import launch

PROGRAMS = 512
"""Programs of a backward, each of which sums the weight's gradient over its rows."""


def sum_and_norm(
    x_TH: Tensor, onto_TH: Tensor, factor: float, weight_H: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """onto + factor x, rounded to its dtype, and the RMSNorm of that (Zhang and Sennrich 2019).

    Under autograd, which saves the sum and one number a row. Computed in at least fp32.

    Args:
        x_TH: what is added.
        onto_TH: what it is added to.
        factor: factor of what is added.
        weight_H: the norm's weight.
        epsilon: added to the mean square.
    """
    total_TH, y_TH = _SumAndNorm.apply(x_TH, onto_TH, factor, weight_H, epsilon)
    return total_TH, y_TH


class _SumAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, onto: Tensor, factor: float, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        x, onto = x.contiguous(), onto.contiguous()
        total, y = torch.empty_like(x), torch.empty_like(x)
        scale_T = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
        if len(x):
            launch(
                _forward,
                (len(x),),
                *(x, onto, weight, total, y, scale_T, x.shape[1]),
                epsilon=epsilon,
                factor=factor,
                **_sizes(x),
            )
        ctx.save_for_backward(total, weight, scale_T)
        ctx.factor = factor
        return total, y

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, scale_T = ctx.saved_tensors
        rows, features = total.shape
        grad, programs = torch.empty_like(total), min(rows, PROGRAMS)
        sums = scale_T.new_zeros(max(programs, 1), features)
        if rows:
            grads = grad_total.contiguous(), grad_y.contiguous()
            launch(
                _backward,
                (programs,),
                *(total, weight, scale_T, *grads, grad, sums, rows, features, programs),
                **_sizes(total),
            )
        of_x = grad if ctx.factor == 1.0 else grad * ctx.factor
        return of_x, grad, None, sums.sum(0).to(weight.dtype), None


def _sizes(x: Tensor) -> dict[str, Any]:
    size = triton.next_power_of_2(x.shape[1])
    wide = tl.float64 if x.dtype == torch.float64 else tl.float32
    return {"wide": wide, "size": size, "num_warps": min(max(size // 512, 1), 16)}


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x,
    onto,
    weight,
    total,
    y,
    scales,
    features,
    epsilon: tl.constexpr,
    factor: tl.constexpr,
    wide: tl.constexpr,
    size: tl.constexpr,
):
    """A program holds a row in registers."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, size)
    inside, place = lanes < features, row * features + lanes
    added = tl.load(x + place, mask=inside, other=0.0).to(wide) * factor
    added += tl.load(onto + place, mask=inside, other=0.0).to(wide)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + place, rounded, mask=inside)
    added = rounded.to(wide)
    scale = 1.0 / tl.sqrt(tl.sum(added * added, 0) / features + epsilon)
    tl.store(scales + row, scale)
    by = tl.load(weight + lanes, mask=inside, other=0.0).to(wide)
    tl.store(y + place, (added * scale * by).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    total,
    weight,
    scales,
    grad_total,
    grad_y,
    grad,
    sums,
    rows,
    features,
    programs,
    wide: tl.constexpr,
    size: tl.constexpr,
):
    """Gradients of the sum, with what comes beside the norm, and a part of the weight's."""
    first, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, size)
    inside = lanes < features
    factor = tl.load(weight + lanes, mask=inside, other=0.0).to(wide)
    of_weight = tl.zeros((size,), wide)
    for row in range(first, rows, programs):
        place, scale = row * features + lanes, tl.load(scales + row)
        normed = tl.load(total + place, mask=inside, other=0.0).to(wide) * scale
        dy = tl.load(grad_y + place, mask=inside, other=0.0).to(wide)
        of_weight += dy * normed
        dy *= factor
        mean = tl.sum(dy * normed, 0) / features
        dx = (dy - normed * mean) * scale
        dx += tl.load(grad_total + place, mask=inside, other=0.0).to(wide)
        tl.store(grad + place, dx.to(grad.dtype.element_ty), mask=inside)
    tl.store(sums + first * features + lanes, of_weight, mask=inside)
