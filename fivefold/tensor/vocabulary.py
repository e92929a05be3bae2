"""Embedding and loss with the vocabulary split over tensor-parallel ranks.

Shapes: T tokens, t = T / tp, V padded vocabulary, v = V / tp rows of this rank, H features.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.mesh.collectives import all_gather
from fivefold.model.layers import Embedding, local
from fivefold.model.loss import IGNORED
from fivefold.tensor.deferred_weight import DeferredWeights, add_to_grad
from fivefold.tensor.linear import Target, sum_tokens


@dataclass(frozen=True)
class VocabularyLookup:
    """The `lookup` seam: each rank looks up the tokens whose rows it holds, then all are summed.

    Attributes:
        group: of tensor parallelism; None for one rank, which holds every row.
        sequence_parallel: whether the result leaves sharded along the tokens.
        deferred: where the gradient of the rows goes while a backward defers it.
    """

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    deferred: DeferredWeights

    def __call__(self, indices_T: Tensor, embedding: Embedding) -> Tensor:
        """[T] -> [T or t, H]."""
        rows_vH = local(embedding.weight)
        if self.group is None:
            return self._rows(indices_T, rows_vH, embedding)
        here_T, mine_T = _own_rows(indices_T, rows_vH.shape[0], self.group.rank())
        # An extra row of zeros would copy the table; a row looked up in vain is masked instead.
        found_TH = self._rows(mine_T, rows_vH, embedding).masked_fill(~here_T[:, None], 0.0)
        return sum_tokens(found_TH, self.group, self.sequence_parallel)

    def _rows(self, indices_T: Tensor, rows_vH: Tensor, embedding: Embedding) -> Tensor:
        rows: Tensor = _Rows.apply(indices_T, rows_vH, self.deferred, (embedding.weight, None))
        return rows


class _Rows(torch.autograd.Function):
    """`F.embedding`, whose gradient may wait."""

    @staticmethod
    def forward(
        ctx: Any, indices_T: Tensor, rows_vH: Tensor, deferred: DeferredWeights, target: Target
    ) -> Tensor:
        ctx.save_for_backward(indices_T)
        ctx.deferred, ctx.parameter, ctx.rows = deferred, target[0], rows_vH.shape[0]
        return F.embedding(indices_T, rows_vH)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Any, ...]:
        (indices_T,) = ctx.saved_tensors
        parameter, rows = ctx.parameter, ctx.rows

        def grad_vH() -> Tensor:
            # Dense, as autograd makes it: other sums would round in another order.
            grad: Tensor = torch.ops.aten.embedding_dense_backward(
                grad_TH, indices_T, rows, -1, False
            )
            return grad

        if ctx.deferred.deferring:
            ctx.deferred.put([parameter], lambda: add_to_grad(parameter, grad_vH()))
            return None, None, None, None
        return None, grad_vH(), None, None


@dataclass(frozen=True)
class VocabularyCrossEntropy:
    """The `cross_entropy` seam on logits split along the vocabulary, with one collective.

    Each rank contributes per token the log-sum-exp of its logits, the target's logit where it
    holds it (0 elsewhere) and, for label smoothing, the sum of its logits; one all-gather of
    these [3, T] (2 without smoothing) makes the exact loss on every rank.
    """

    group: dist.ProcessGroup

    def __call__(
        self,
        logits_Tv: Tensor,
        labels_T: Tensor,
        vocab_size: int,
        label_smoothing: float = 0.0,
        weights_T: Tensor | None = None,
    ) -> Tensor:
        """Sum of the token losses; arguments as in `model.loss.cross_entropy`."""
        loss_T: Tensor = _CrossEntropy.apply(
            logits_Tv, labels_T, vocab_size, label_smoothing, self.group
        )
        return loss_T.sum() if weights_T is None else (loss_T * weights_T.to(loss_T.dtype)).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Tv: Tensor,
        labels_T: Tensor,
        vocab_size: int,
        smoothing: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        held = logits_Tv.shape[1]
        true_entries = min(max(vocab_size - group.rank() * held, 0), held)
        wide = logits_Tv.to(torch.promote_types(logits_Tv.dtype, torch.float32))
        true = wide[:, :true_entries]
        here_T, mine_T = _own_rows(labels_T, held, group.rank())
        # A rank may hold padding only: the log-sum-exp over no entries is -inf, its sum 0.
        target_T = wide.gather(1, mine_T[:, None]).squeeze(1).masked_fill(~here_T, 0.0)
        own = [true.logsumexp(1), target_T] + ([true.sum(1)] if smoothing else [])
        every = all_gather(torch.stack(own)[None], group)
        lse_T = every[:, 0].logsumexp(0)
        loss_T = lse_T - every[:, 1].sum(0)
        if smoothing:
            mean_T = every[:, 2].sum(0) / vocab_size
            loss_T = (1 - smoothing) * loss_T + smoothing * (lse_T - mean_T)
        ctx.save_for_backward(logits_Tv, labels_T, here_T, mine_T, lse_T)
        ctx.true_entries, ctx.vocab_size, ctx.smoothing = true_entries, vocab_size, smoothing
        return loss_T.masked_fill(labels_T == IGNORED, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Any, ...]:
        logits_Tv, labels_T, here_T, mine_T, lse_T = ctx.saved_tensors
        grad_T = grad_T.masked_fill(labels_T == IGNORED, 0.0)
        # exp(x - lse) in one new buffer; padding entries have no probability and no gradient.
        grad_Tv = (logits_Tv.to(lse_T.dtype) - lse_T[:, None]).exp_()
        if ctx.smoothing:
            grad_Tv -= ctx.smoothing / ctx.vocab_size
        share_T = here_T.to(grad_Tv.dtype).mul_(ctx.smoothing - 1.0)
        grad_Tv.scatter_add_(1, mine_T[:, None], share_T[:, None])
        grad_Tv[:, ctx.true_entries :] = 0.0
        grad_Tv *= grad_T[:, None]
        return grad_Tv.to(logits_Tv.dtype), None, None, None, None


def _own_rows(indices_T: Tensor, held: int, rank: int) -> tuple[Tensor, Tensor]:
    """Whether each index is among this rank's `held` rows, and its local row (0 where not)."""
    local_T = indices_T - rank * held
    here_T = (local_T >= 0) & (local_T < held)
    return here_T, local_T.masked_fill(~here_T, 0)
