"""Cross entropy, summed over tokens; the caller divides once by the number of valid tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.config.data import IGNORED
from fivefold.model.caps import capped, capped_, capped_as, slope

CAPPED_AT_A_TIME = 1 << 22
"""Logits whose slope below their cap is made at a time: 16 MiB in fp32."""


class LossRule(NamedTuple):
    """How the loss of a token is computed from its logits.

    Attributes:
        vocab_size: size of the unpadded vocabulary; padding entries get no probability.
        smoothing: probability spread evenly over the unpadded vocabulary.
        z_coeff: factor of the square of the logits' log-sum-exp, which is added to the loss
            (Chowdhery et al., PaLM, 2022, section 5).
        cap: c, where the loss is of c tanh(logits / c); None: of the logits.
    """

    vocab_size: int
    smoothing: float = 0.0
    z_coeff: float = 0.0
    cap: float | None = None


def capped_into(out: Tensor, logits: Tensor, cap: float | None) -> Tensor:
    """`capped`, written into `out` in its type; without a cap, the logits."""
    return logits if cap is None else capped_(out.copy_(logits), cap)


def through_cap_(grad_TV: Tensor, logits_TV: Tensor, cap: float | None) -> Tensor:
    """Turn the gradient of capped logits into that of the logits, some tokens at a time."""
    if cap is not None:
        at_a_time = max(CAPPED_AT_A_TIME // logits_TV.shape[1], 1)
        for start in range(0, len(logits_TV), at_a_time):
            rows = slice(start, start + at_a_time)
            grad_TV[rows] *= slope(capped(logits_TV[rows].to(grad_TV.dtype), cap), cap)
    return grad_TV


def cross_entropy(
    logits_TV: Tensor,
    labels_T: Tensor,
    rule: LossRule,
    weights_T: Tensor | None = None,
    z_sums: list[Tensor] | None = None,
) -> Tensor:
    """Sum of the token losses, a scalar in fp32 (fp64 for fp64 logits).

    Args:
        logits_TV: logits over the padded vocabulary.
        labels_T: int64 below the rule's `vocab_size`, or IGNORED.
        rule: how losses are made.
        weights_T: weight of each token's loss; None: all 1.
        z_sums: receives the part of the sum that is z-loss, if there is some.
    """
    weights_T = token_weights(labels_T, weights_T, logits_TV.dtype)
    targets_T = labels_T.clamp_min(0)
    loss: Tensor = _CrossEntropy.apply(logits_TV, targets_T, weights_T, rule, z_sums)
    return loss


def token_weights(labels_T: Tensor, weights_T: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Weight of each token's loss, 0 where the label is IGNORED, in at least fp32."""
    valid_T = (labels_T != IGNORED).to(torch.promote_types(dtype, torch.float32))
    return valid_T if weights_T is None else valid_T * weights_T.to(valid_T.dtype)


def z_slope(lse_T: Tensor, z_coeff: float) -> Tensor:
    """Derivative of lse + z_coeff x lse^2, the log-sum-exp of logits and its z-loss."""
    return 1.0 + 2.0 * z_coeff * lse_T


def note_z(z_sums: list[Tensor] | None, z_coeff: float, lse_T: Tensor, weights_T: Tensor) -> None:
    """Add the weighted sum of tokens' z-losses to a list, if there is one and they have any."""
    if z_sums is not None and z_coeff:
        z_sums.append(z_coeff * (lse_T.detach().square() @ weights_T.to(lse_T.dtype)))


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits and their log-sum-exp; allocates one [T, V] tensor, the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        weights_T: Tensor,
        rule: LossRule,
        z_sums: list[Tensor] | None,
    ) -> Tensor:
        vocab_size, smoothing, z_coeff, cap = rule
        true_TV = capped_as(logits_TV[:, :vocab_size], weights_T.dtype, cap)
        norm_T = true_TV.logsumexp(dim=1)
        ctx.save_for_backward(logits_TV, targets_T, weights_T, norm_T)
        ctx.rule = rule
        expected_T = true_TV.gather(1, targets_T[:, None]).squeeze(1)
        if smoothing:
            expected_T = torch.lerp(expected_T, true_TV.mean(dim=1), smoothing)
        loss_T = norm_T - expected_T
        note_z(z_sums, z_coeff, norm_T, weights_T)
        return (loss_T + z_coeff * norm_T.square() if z_coeff else loss_T) @ weights_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, targets_T, weights_T, norm_T = ctx.saved_tensors
        vocab_size, smoothing, z_coeff, cap = ctx.rule
        own_TV = logits_TV[:, :vocab_size]
        scale_T1 = (grad * weights_T)[:, None]
        grad_TV = torch.empty_like(logits_TV, dtype=weights_T.dtype)
        grad_TV[:, vocab_size:] = 0.0
        true_TV = grad_TV[:, :vocab_size]
        torch.sub(capped_into(true_TV, own_TV, cap), norm_T[:, None], out=true_TV).exp_()
        true_TV.mul_(scale_T1 * z_slope(norm_T, z_coeff)[:, None])
        if smoothing:
            true_TV.sub_(scale_T1 * (smoothing / vocab_size))
        true_TV.scatter_add_(1, targets_T[:, None], (smoothing - 1.0) * scale_T1)
        through_cap_(true_TV, own_TV, cap)
        return grad_TV.to(logits_TV.dtype), None, None, None, None
