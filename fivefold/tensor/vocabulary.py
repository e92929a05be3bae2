"""Embedding and loss with the vocabulary split over tensor-parallel ranks.

Shapes: T tokens, t = T / tp, V padded vocabulary, v = V / tp rows of this rank, H features.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.config.data import IGNORED
from fivefold.mesh.collectives import all_gather
from fivefold.mesh.device import uses_gpu_kernels
from fivefold.model.caps import capped_as
from fivefold.model.layers import Embedding
from fivefold.model.leaves import local
from fivefold.model.loss import (
    LossRule,
    capped_into,
    note_z,
    through_cap_,
    token_weights,
    z_slope,
)
from fivefold.model.products import Kept, Products
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.linear import sum_tokens


@dataclass(frozen=True)
class VocabularyLookup:
    """The `lookup` seam: each rank looks up tokens whose rows it holds; the results are summed.

    Attributes:
        group: tensor-parallel group; None: one rank, which holds every row.
        sequence_parallel: whether the result is sharded along the tokens.
        deferred: receives the gradient of the rows while a backward defers it.
    """

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    deferred: DeferredWeights

    def __call__(self, indices_T: Tensor, embedding: Embedding) -> Tensor:
        """[T] -> [T or t, H]."""
        rows_vH = local(embedding.weight)
        if self.group is None:
            return self._rows(indices_T, rows_vH, embedding)
        held = rows_vH.shape[0]
        here_T, mine_T = _own_rows(indices_T, self.group.rank() * held, held)
        # Masking avoids the copy of the table that an extra row of zeros would need.
        found_TH = self._rows(mine_T, rows_vH, embedding).masked_fill(~here_T[:, None], 0.0)
        return sum_tokens(found_TH, self.group, self.sequence_parallel)

    def _rows(self, indices_T: Tensor, rows_vH: Tensor, embedding: Embedding) -> Tensor:
        # Within the embedding: of a tensor among the arguments, hooks would hear a second time.
        rows: Tensor = _Rows.apply(indices_T, rows_vH, self.deferred, embedding)
        return rows


class _Rows(torch.autograd.Function):
    """`F.embedding` whose weight gradient can be deferred, or added up where it is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        indices_T: Tensor,
        rows_vH: Tensor,
        deferred: DeferredWeights,
        embedding: Embedding,
    ) -> Tensor:
        ctx.save_for_backward(indices_T)
        ctx.deferred, ctx.parameter, ctx.rows = deferred, embedding.weight, rows_vH.shape[0]
        return F.embedding(indices_T, rows_vH)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Any, ...]:
        of = ctx.parameter, _Lookup(ctx.rows), (grad_TH,), ctx.saved_tensors
        return None, ctx.deferred.made_or_put(*of), None, None


@dataclass(frozen=True)
class _Lookup(Products):
    """The product of one-hot rows with a table, of which only the gradient is made.

    Attributes:
        rows: rows of the table.
    """

    rows: int

    def weight_gradient(self, grad: Kept, kept: Kept, onto_vH: Tensor | None = None) -> Tensor:
        """[v, H], added to `onto_vH` in place if there is one.

        Rows are added one by one to what is as wide as fp32. In bf16 that would round away all but
        the first few hundred of a frequent token's, as PyTorch's product does on a CPU.
        """
        (grad_TH,), (indices_T,) = grad, kept
        wide = torch.promote_types(grad_TH.dtype, torch.float32)
        on_gpu = uses_gpu_kernels(grad_TH)
        if onto_vH is not None and onto_vH.dtype == torch.promote_types(onto_vH.dtype, wide):
            grad_TH = grad_TH.to(onto_vH.dtype)
            if on_gpu:  # where `index_add_` adds in any order
                return onto_vH.index_put_((indices_T,), grad_TH, accumulate=True)
            return onto_vH.index_add_(0, indices_T, grad_TH)
        summed = grad_TH if on_gpu else grad_TH.to(wide)
        made: Tensor = torch.ops.aten.embedding_dense_backward(
            summed, indices_T, self.rows, -1, False
        )
        return made.to(grad_TH.dtype) if onto_vH is None else onto_vH.add_(made)

    def write_weight_gradient(self, grad: Kept, kept: Kept, out_vH: Tensor) -> None:
        """`weight_gradient` into `out_vH`."""
        self.weight_gradient(grad, kept, out_vH.zero_())


@dataclass(frozen=True)
class VocabularyCrossEntropy:
    """The `cross_entropy` seam for logits split along the vocabulary, with one collective.

    Per token, each rank contributes the log-sum-exp of its logits, the target's logit if it holds
    it (else 0) and, for label smoothing, the sum of its logits. One all-gather of these [3, T]
    (2 without smoothing) gives every rank the exact loss.
    """

    group: dist.ProcessGroup

    def __call__(
        self,
        logits_Tv: Tensor,
        labels_T: Tensor,
        rule: LossRule,
        weights_T: Tensor | None = None,
        z_sums: list[Tensor] | None = None,
    ) -> Tensor:
        """Sum of the token losses; arguments as in `model.loss.cross_entropy`."""
        entries = Entries(self.group.rank() * logits_Tv.shape[1], rule)

        def note(lse_T: Tensor) -> None:
            note_z(z_sums, rule.z_coeff, lse_T, token_weights(labels_T, weights_T, lse_T.dtype))

        loss_T: Tensor = _VocabularyCrossEntropy.apply(
            logits_Tv, labels_T, entries, self.group, note
        )
        return loss_T.sum() if weights_T is None else (loss_T * weights_T.to(loss_T.dtype)).sum()


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Tv: Tensor,
        labels_T: Tensor,
        entries: "Entries",
        group: dist.ProcessGroup,
        note: Callable[[Tensor], None],
    ) -> Tensor:
        losses = entries.losses(entries.statistics(logits_Tv, labels_T), group)
        note(losses.lse_T)
        ctx.save_for_backward(logits_Tv, labels_T, losses.lse_T)
        ctx.entries = entries
        return losses.loss_T.masked_fill(labels_T == IGNORED, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Any, ...]:
        logits_Tv, labels_T, lse_T = ctx.saved_tensors
        scale_T = grad_T.masked_fill(labels_T == IGNORED, 0.0)
        grad_Tv = ctx.entries.gradient(logits_Tv, labels_T, lse_T, scale_T)
        return grad_Tv.to(logits_Tv.dtype), None, None, None, None


class TokenLosses(NamedTuple):
    """Loss of each token and the log-sum-exp of its logits, both [T]."""

    loss_T: Tensor
    lse_T: Tensor


@dataclass(frozen=True)
class Entries:
    """A range of vocabulary entries, from which the loss over the whole vocabulary is computed.

    Attributes:
        first: index of the first entry.
        rule: how losses are made.
    """

    first: int
    rule: LossRule

    def statistics(self, logits_Tv: Tensor, labels_T: Tensor) -> Tensor:
        """Statistics of these logits for the loss: [3, T], or [2, T] without smoothing.

        The rows are the log-sum-exp, the target's logit if in this range (else 0), and the sum.
        """
        dtype = torch.promote_types(logits_Tv.dtype, torch.float32)
        wide = capped_as(logits_Tv, dtype, self.rule.cap)
        true = wide[:, : self.true(logits_Tv)]
        here_T, mine_T = _own_rows(labels_T, self.first, logits_Tv.shape[1])
        # A range of padding only is allowed: its log-sum-exp is -inf and its sum 0.
        target_T = wide.gather(1, mine_T[:, None]).squeeze(1).masked_fill(~here_T, 0.0)
        return torch.stack(
            [true.logsumexp(1), target_T] + ([true.sum(1)] if self.rule.smoothing else [])
        )

    def losses(self, own: Tensor, group: dist.ProcessGroup | None) -> TokenLosses:
        """The losses, from all ranks' statistics by one all-gather.

        `own`: [2 or 3, T] this rank's log-sum-exp, target logit and, with smoothing, logit sum.
        """
        vocab_size, smoothing, z_coeff, _ = self.rule
        lse_T, target_T, *sums = merge_statistics(all_gather(own[None], group))
        loss_T = lse_T - target_T
        if smoothing:
            mean_T = sums[0] / vocab_size
            loss_T = (1 - smoothing) * loss_T + smoothing * (lse_T - mean_T)
        if z_coeff:
            loss_T += z_coeff * lse_T.square()
        return TokenLosses(loss_T, lse_T)

    def gradient(
        self, logits_Tv: Tensor, labels_T: Tensor, lse_T: Tensor, scale_T: Tensor
    ) -> Tensor:
        """Gradient with respect to these logits, in one new buffer of at least fp32.

        Args:
            logits_Tv: logits of this range.
            labels_T: labels in the whole vocabulary, or IGNORED.
            lse_T: log-sum-exp over the whole vocabulary.
            scale_T: upstream gradient times the weight of each token's loss; 0 where ignored.
        """
        vocab_size, smoothing, z_coeff, cap = self.rule
        grad_Tv = torch.empty_like(logits_Tv, dtype=lse_T.dtype)
        torch.sub(capped_into(grad_Tv, logits_Tv, cap), lse_T[:, None], out=grad_Tv).exp_()
        grad_Tv *= (scale_T * z_slope(lse_T, z_coeff))[:, None]
        if smoothing:
            grad_Tv -= (scale_T * (smoothing / vocab_size))[:, None]
        here_T, mine_T = _own_rows(labels_T, self.first, logits_Tv.shape[1])
        share_T = (scale_T * (smoothing - 1.0)).to(grad_Tv.dtype).masked_fill_(~here_T, 0.0)
        grad_Tv.scatter_add_(1, mine_T[:, None], share_T[:, None])
        through_cap_(grad_Tv, logits_Tv, cap)
        grad_Tv[:, self.true(logits_Tv) :] = 0.0
        return grad_Tv

    def after(self, skipped: int) -> "Entries":
        """The range without its first `skipped` entries."""
        return replace(self, first=self.first + skipped)

    def true(self, logits_Tv: Tensor) -> int:
        """How many of these logits are of the unpadded vocabulary."""
        return min(max(self.rule.vocab_size - self.first, 0), logits_Tv.shape[1])


def merge_statistics(parts: Tensor) -> Tensor:
    """Merge statistics of n vocabulary ranges: [n, 3 or 2, T] -> [3 or 2, T]."""
    return torch.cat([parts[:, :1].logsumexp(0), parts[:, 1:].sum(0)])


def _own_rows(indices_T: Tensor, first: int, held: int) -> tuple[Tensor, Tensor]:
    """Whether each index is in [first, first + held), and the row that it adds to.

    It is its own row there. Others add 0, to rows all over, as a GPU adds to one row in turn.
    """
    local_T = indices_T - first
    here_T = (local_T >= 0) & (local_T < held)
    return here_T, local_T.remainder(held)
