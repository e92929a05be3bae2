"""RMSNorm, with a residual sum before it or without, as one Triton kernel forward and one backward.

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
    x_TH: Tensor,
    onto_TH: Tensor,
    weight_H: Tensor | None,
    epsilon: float,
    offset: float,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """onto + factor x, rounded to its dtype, and the RMSNorm of that (Zhang and Sennrich 2019).

    Under autograd, which saves the sum and one number a row. Computed in at least fp32.

    Args:
        x_TH: what is added.
        onto_TH: what it is added to.
        weight_H: the norm's weight; None: it has none.
        epsilon: added to the mean square.
        offset: added to the weight.
        factor: factor of what is added.
    """
    rest = epsilon, offset, factor
    total_TH, y_TH = _SumAndNorm.apply(x_TH, onto_TH, weight_H, *rest)
    return total_TH, y_TH


def norm(x: Tensor, weight_H: Tensor | None, epsilon: float, offset: float) -> Tensor:
    """The RMSNorm of x [..., H]; like `sum_and_norm` without a sum."""
    x_TH = x.reshape(-1, x.shape[-1]).contiguous()
    y_TH: Tensor = _NormAlone.apply(x_TH, weight_H, epsilon, offset)
    return y_TH.view(x.shape)


class _SumAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        onto: Tensor,
        weight: Tensor | None,
        epsilon: float,
        offset: float,
        factor: float,
    ) -> tuple[Tensor, Tensor]:
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        both, rest = (x.contiguous(), onto.contiguous()), (epsilon, offset, factor)
        y, scale_T = _normed(*both, weight, total, *rest)
        ctx.save_for_backward(total, weight, scale_T)
        ctx.offset, ctx.factor = offset, factor
        return total, y

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        grad, of_weight = _gradients(ctx.saved_tensors, grad_total, grad_y, ctx.offset)
        of_x = grad if ctx.factor == 1.0 else grad * ctx.factor
        return of_x, grad, of_weight, None, None, None


class _NormAlone(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float, offset: float
    ) -> Tensor:
        y, scale_T = _normed(x, None, weight, x, epsilon, offset)
        ctx.save_for_backward(x, weight, scale_T)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx.saved_tensors, None, grad_y, ctx.offset), None, None


def _normed(
    x: Tensor,
    onto: Tensor | None,
    weight: Tensor | None,
    total: Tensor,
    epsilon: float,
    offset: float,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The norm, and the inverse root mean square of each row; fills `total` if there is a sum."""
    y = torch.empty_like(x)
    scale_T = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
    if len(x):
        rest = x if onto is None else onto, x if weight is None else weight
        operands = x, *rest, total, y, scale_T, x.shape[1]
        launch(
            _forward,
            (len(x),),
            *operands,
            epsilon=epsilon,
            offset=offset,
            factor=factor,
            adds=onto is not None,
            weighs=weight is not None,
            **_sizes(x),
        )
    return y, scale_T


def _gradients(
    saved: tuple[Tensor, Tensor | None, Tensor],
    beside: Tensor | None,
    grad_y: Tensor,
    offset: float,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the normalised tensor (plus `beside`), and of the weight."""
    total, weight, scale_T = saved
    rows, features = total.shape
    grad, programs = torch.empty_like(total), min(rows, PROGRAMS)
    sums = scale_T if weight is None else scale_T.new_zeros(max(programs, 1), features)
    if rows:
        grad_y = grad_y.contiguous()
        grads = grad_y if beside is None else beside.contiguous(), grad_y
        by = total if weight is None else weight
        operands = total, by, scale_T, *grads, grad, sums, rows, features, programs
        launch(
            _backward,
            (programs,),
            *operands,
            offset=offset,
            adds=beside is not None,
            weighs=weight is not None,
            **_sizes(total),
        )
    return grad, None if weight is None else sums.sum(0).to(weight.dtype)


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
    offset: tl.constexpr,
    factor: tl.constexpr,
    adds: tl.constexpr,
    weighs: tl.constexpr,
    wide: tl.constexpr,
    size: tl.constexpr,
):
    """A program holds a row in registers."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, size)
    inside, place = lanes < features, row * features + lanes
    added = tl.load(x + place, mask=inside, other=0.0).to(wide) * factor
    if adds:
        added += tl.load(onto + place, mask=inside, other=0.0).to(wide)
        rounded = added.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        added = rounded.to(wide)
    scale = 1.0 / tl.sqrt(tl.sum(added * added, 0) / features + epsilon)
    tl.store(scales + row, scale)
    normed = added * scale
    if weighs:
        normed *= tl.load(weight + lanes, mask=inside, other=0.0).to(wide) + offset
    tl.store(y + place, normed.to(y.dtype.element_ty), mask=inside)


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
    offset: tl.constexpr,
    adds: tl.constexpr,
    weighs: tl.constexpr,
    wide: tl.constexpr,
    size: tl.constexpr,
):
    """Gradients of what was normalised, of a sum with those beside, and a part of the weight's."""
    first, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, size)
    inside = lanes < features
    factor = tl.zeros((size,), wide) + 1.0
    if weighs:
        factor = tl.load(weight + lanes, mask=inside, other=0.0).to(wide) + offset
    of_weight = tl.zeros((size,), wide)
    for row in range(first, rows, programs):
        place, scale = row * features + lanes, tl.load(scales + row)
        normed = tl.load(total + place, mask=inside, other=0.0).to(wide) * scale
        dy = tl.load(grad_y + place, mask=inside, other=0.0).to(wide)
        of_weight += dy * normed
        dy *= factor
        mean = tl.sum(dy * normed, 0) / features
        dx = (dy - normed * mean) * scale
        if adds:
            dx += tl.load(grad_total + place, mask=inside, other=0.0).to(wide)
        tl.store(grad + place, dx.to(grad.dtype.element_ty), mask=inside)
    if weighs:
        tl.store(sums + first * features + lanes, of_weight, mask=inside)
