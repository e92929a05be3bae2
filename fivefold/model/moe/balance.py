"""Load balancing of experts: auxiliary losses, and Sinkhorn assignment.

A loss is a mean over the microbatches of the global batch, so that no layout changes it: each rank
computes the share of its own tokens, and the shares add up. Shapes: T tokens of this rank,
E experts, B rows of the microbatch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SINKHORN_TOLERANCE = 1e-4
SINKHORN_ROUNDS = 1000


@dataclass(frozen=True)
class Load:
    """How many tokens chose each expert, as a balancing loss needs it.

    Attributes:
        kind: aux_loss, seq_aux_loss or global_aux_loss.
        counts: tokens that chose each expert on all ranks: [E], or [B, E] per row.
        tokens: tokens counted: of the microbatch, of a row, or of the batch so far.
    """

    kind: str
    counts: Tensor
    tokens: int


def balancing_loss(
    load: Load, scores_TE: Tensor, rows_T: Tensor, topk: int, microbatch_tokens: int
) -> Tensor:
    """This rank's share of E sum_i f_i P_i of a microbatch (Switch Transformer, Fedus et al. 2022).

    f_i is the fraction of all choices that fell on expert i; P_i is its mean score, to which this
    rank contributes its own tokens. For seq_aux_loss: the mean of each row's loss (DeepSeek-V2).

    Args:
        load: choices per expert.
        scores_TE: scores that add up to 1 for each token.
        rows_T: index of each token's row in the microbatch.
        topk: experts per token.
        microbatch_tokens: tokens of the microbatch on all ranks.
    """
    experts = scores_TE.shape[1]
    factor = experts / (topk * load.tokens)
    if load.kind == "seq_aux_loss":
        rows = len(load.counts)
        shares_TE = load.counts.to(scores_TE.dtype)[rows_T]
        return (shares_TE * scores_TE).sum() * (factor / (load.tokens * rows))
    mean_E = scores_TE.sum(0) / microbatch_tokens
    return (load.counts.to(scores_TE.dtype) * mean_E).sum() * factor


def z_loss(logits_TE: Tensor, microbatch_tokens: int) -> Tensor:
    """This rank's share of the mean squared log-sum-exp (Zoph et al., ST-MoE, 2022)."""
    return logits_TE.logsumexp(-1).square().sum() / microbatch_tokens


def sinkhorn(logits_TE: Tensor) -> Tensor:
    """Scores whose rows and columns have nearly equal sums (Sinkhorn and Knopp 1967), [T, E].

    Used for the choice only, as in BASE layers (Lewis et al. 2021) and Megatron-LM.
    """
    cost_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)).exp()
    tokens, experts = cost_TE.shape
    of_experts_E = cost_TE.new_ones(experts)
    for _ in range(SINKHORN_ROUNDS):
        of_tokens_T = 1 / (tokens * ((of_experts_E * cost_TE).sum(1) + 1e-8))
        before = of_experts_E
        of_experts_E = 1 / (experts * ((of_tokens_T[:, None] * cost_TE).sum(0) + 1e-8))
        if float((before - of_experts_E).abs().mean()) <= SINKHORN_TOLERANCE:
            break
    return of_experts_E * cost_TE * of_tokens_T[:, None]


def attach(x: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
    """`x` unchanged; its backward also backpropagates `loss`, times `scale` (default 1)."""
    y: Tensor = _Attached.apply(x, loss, scale)
    return y


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
        ctx.kind, ctx.scale = (loss.dtype, loss.device), scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.kind
        if ctx.scale is not None:
            return grad, ctx.scale.to(dtype), None
        return grad, torch.ones((), dtype=dtype, device=device), None
