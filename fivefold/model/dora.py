"""Adapters with magnitudes (DoRA, Liu et al. 2024): rows of W + s B A get trained lengths.

y = m / n * (W x + s B A x) + b, where n is the length of each row of W + s B A: a constant in the
backward, as in section 4.3 of the paper and in PEFT. W + s B A is never made: its squared lengths
are sums over parts of the rows, |w|^2 + (2 s W A^T + s^2 B (A A^T)) . b, so that ranks which split
the rows of W sum one number for each. Shapes: T tokens, F output features, H inputs, R rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fivefold.model.traced import result

Summed = Callable[[Tensor], Tensor]
"""Sums [F] over the ranks that split the rows of W."""


def plain_sum(squares_F: Tensor) -> Tensor:
    """The numbers unchanged; replaced if ranks split the rows."""
    return squares_F


def squared_lengths(weight_FH: Tensor, down_RH: Tensor, up_FR: Tensor, scale: float) -> Tensor:
    """Squared lengths of the rows of W + s B A, or of parts of them, [F] in at least fp32.

    Args:
        weight_FH: W.
        down_RH: A.
        up_FR: B.
        scale: s.
    """
    wide = torch.promote_types(weight_FH.dtype, torch.float32)
    own_F = torch.linalg.vector_norm(weight_FH, dim=1, dtype=wide).square()
    mixed_FR = (weight_FH @ down_RH.t()).to(wide) * (2 * scale)
    up_FR = up_FR.to(wide)
    mixed_FR += up_FR @ (down_RH @ down_RH.t()).to(wide) * scale**2
    return own_F + (mixed_FR * up_FR).sum(1)


def rescaled(
    made_TF: Tensor, magnitude_F: Tensor, lengths_F: Tensor, bias_F: Tensor | None
) -> Tensor:
    """m / n times the output of W and the adapter, plus the bias."""
    y_TF: Tensor = _Rescaled.apply(made_TF, magnitude_F, lengths_F, bias_F)
    return y_TF


class _Rescaled(torch.autograd.Function):
    """Autograd function that keeps the unscaled result, for the gradient of m."""

    @staticmethod
    def forward(
        ctx: Any, made_TF: Tensor, magnitude_F: Tensor, lengths_F: Tensor, bias_F: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(made_TF, magnitude_F, lengths_F)
        y_TF = made_TF * (magnitude_F / lengths_F).to(made_TF.dtype)
        return result(y_TF if bias_F is None else y_TF.add_(bias_F))

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_gradients(grad_TF, *ctx.saved_tensors), None, None


def rescaled_beside(
    made_TF: Tensor,
    dropped_TF: Tensor,
    added_TF: Tensor,
    magnitude_F: Tensor,
    lengths_F: Tensor,
    bias_F: Tensor | None,
) -> Tensor:
    """y = W x + (m / n - 1) W d + m / n s B A d + b, where dropout leaves d of x for the adapter.

    As PEFT has it.

    Args:
        made_TF: W x.
        dropped_TF: W d.
        added_TF: s B A d.
        magnitude_F: m.
        lengths_F: n.
        bias_F: b.
    """
    y_TF: Tensor = _RescaledBeside.apply(
        made_TF, dropped_TF, added_TF, magnitude_F, lengths_F, bias_F
    )
    return y_TF


class _RescaledBeside(torch.autograd.Function):
    """Autograd function that keeps W d + s B A d."""

    @staticmethod
    def forward(
        ctx: Any,
        made_TF: Tensor,
        dropped_TF: Tensor,
        added_TF: Tensor,
        magnitude_F: Tensor,
        lengths_F: Tensor,
        bias_F: Tensor | None,
    ) -> Tensor:
        both_TF = dropped_TF + added_TF
        ctx.save_for_backward(both_TF, magnitude_F, lengths_F)
        scale_F = (magnitude_F / lengths_F).to(made_TF.dtype)
        y_TF = (made_TF - dropped_TF).addcmul_(both_TF, scale_F)
        return result(y_TF if bias_F is None else y_TF.add_(bias_F))

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        both_TF, magnitude_F, lengths_F = ctx.saved_tensors
        of_added_TF, of_magnitude_F = _gradients(grad_TF, both_TF, magnitude_F, lengths_F)
        return grad_TF, of_added_TF - grad_TF, of_added_TF, of_magnitude_F, None, None


def _gradients(
    grad_TF: Tensor, made_TF: Tensor, magnitude_F: Tensor, lengths_F: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the unscaled result, and of the magnitudes."""
    of_magnitude_F = (grad_TF * made_TF).sum(0, dtype=lengths_F.dtype) / lengths_F
    of_made_TF = grad_TF * (magnitude_F / lengths_F).to(grad_TF.dtype)
    return of_made_TF, of_magnitude_F.to(magnitude_F.dtype)
