"""Activations as one Triton kernel forward and one backward, each reading its inputs once.

Imported only where they run, since Triton is. They are proven without a GPU by Triton's
interpreter (`TRITON_INTERPRET=1`).

Shapes: T rows, F inner features.
"""

from collections.abc import Mapping, Sequence
from math import pi, sqrt
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.mesh.device import launch

AT_A_TIME = 1024
"""Features of a row that a program holds in registers."""


CURVES: Mapping[str, tuple[float | None, float]] = MappingProxyType(
    {
        "silu": (1.0, 0.0),
        "quick_gelu": (1.702, 0.0),
        "gelu_tanh": (2 * sqrt(2 / pi), 0.044715),
        "gelu": (None, 0.0),
        "relu": (-1.0, 0.0),
        "squared_relu": (0.0, 0.0),
    }
)
"""Slope s and cubic c of x * sigmoid(s (x + c x^3)), since (1 + tanh(z)) / 2 is sigmoid(2 z); no
slope: x times the normal distribution's share below x; of slope 0: x times max(x, 0); below 0: x
where that is above 0."""


def gated(
    gate: Tensor,
    up: Tensor | None,
    weights_T: Tensor | None,
    name: str,
    bound: float | None,
    offset: float,
) -> Tensor:
    """activation(g) * (u + offset) * weight, under autograd, which saves only its inputs.

    g is the gate clamped to at most `bound`, u is up clamped to +-`bound`; without `up`, only the
    activation is weighted. Computed in at least fp32.

    Args:
        gate: [T, F].
        up: [T, F] or None.
        weights_T: weight of each row; None: all 1.
        name: activation, of `CURVES`.
        bound: largest magnitude of g and u; None: any.
        offset: added to u.
    """
    y_TF: Tensor = _Gated.apply(gate, up, weights_T, *CURVES[name], bound, offset)
    return y_TF


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor | None, weights_T: Tensor | None, *how: float | None
    ) -> Tensor:
        gate, up = gate.contiguous(), None if up is None else up.contiguous()
        ctx.save_for_backward(gate, up, weights_T)
        ctx.how = how
        y_TF = torch.empty_like(gate)
        _run((gate, up, weights_T), (None, y_TF, None, None), how)
        return y_TF

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        made = [None if x is None else torch.empty_like(x) for x in saved]
        _run(saved, (grad_TF.contiguous(), *made), ctx.how)
        return *made, None, None, None, None


def _run(
    given: Sequence[Tensor | None], others: Sequence[Tensor | None], how: Sequence[float | None]
) -> None:
    """Launch; a missing tensor is replaced by the gate, which the kernel then ignores."""
    gate, up, weights_T = given
    assert gate is not None
    rows, features = gate.shape
    slope, cubic, bound, offset = how
    tensors = [gate if x is None else x for x in (*given, *others)]
    if rows:
        launch(
            _gate,
            (rows,),
            *tensors,
            features,
            slope=slope,
            cubic=cubic,
            bound=bound,
            offset=offset,
            paired=up is not None,
            weighted=weights_T is not None,
            backward=others[0] is not None,
            wide=tl.float64 if gate.dtype == torch.float64 else tl.float32,
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
    cubic: tl.constexpr,
    bound: tl.constexpr,
    offset: tl.constexpr,
    paired: tl.constexpr,
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
        g, u = g_whole, 1.0
        if bound is not None:
            g = tl.where(g > bound, bound, g)
        if paired:
            u_whole = tl.load(up + place, mask=inside, other=0.0).to(wide)
            u = u_whole
            if bound is not None:
                u = tl.where(u > bound, bound, tl.where(u < -bound, -bound, u))
            u += offset
        if slope is None:  # the normal distribution: its share below g, and its density there
            share = 0.5 + 0.5 * tl.erf(g * 0.7071067811865476)
            steep = 0.3989422804014327 * tl.exp(-0.5 * g * g)
        elif slope < 0.0:
            share = tl.where(g > 0.0, 1.0, 0.0).to(wide)
            steep = tl.zeros((size,), wide)
        elif slope == 0.0:
            share = tl.where(g > 0.0, g, 0.0)
            steep = tl.where(g > 0.0, 1.0, 0.0)
        else:
            share = 1.0 / (1.0 + tl.exp(-slope * (g + cubic * g * g * g)))
            steep = slope * (1.0 + 3.0 * cubic * g * g) * share * (1.0 - share)
        value = g * share
        if backward:
            dy = tl.load(grad + place, mask=inside, other=0.0).to(wide)
            if weighted:
                total += tl.where(inside, dy * value * u, 0.0)
                dy *= weight
            dg = dy * u * (share + g * steep)
            if bound is not None:
                dg = tl.where(g_whole > bound, 0.0, dg)
            tl.store(first + place, dg.to(first.dtype.element_ty), mask=inside)
            if paired:
                du = dy * value
                if bound is not None:
                    du = tl.where((u_whole > bound) | (u_whole < -bound), 0.0, du)
                tl.store(second + place, du.to(second.dtype.element_ty), mask=inside)
        else:
            y = value * u
            if weighted:
                y *= weight
            tl.store(first + place, y.to(first.dtype.element_ty), mask=inside)
    if backward and weighted:
        tl.store(sums + row, tl.sum(total, 0).to(sums.dtype.element_ty))
