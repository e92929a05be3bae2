"""Attention to the tokens that an indexer chooses, and what trains the indexer.

DeepSeek Sparse Attention (DeepSeek-V3.2, 2025). The scores of all heads with all keys would take
far more memory than anything else, so a few queries are taken at a time, and the backward makes
their scores again. It also makes the gradient of the indexer: of the divergence of the indexer's
softmax from the mean of the heads' (detached). That is a sum over heads, so that ranks that split
them make parts of it; only to tell the loss itself do they sum the mean. Shapes: B rows, S queries,
L keys, N heads of attention, I of the indexer, D features, q queries at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.description.pieces import of_all, pieces
from fivefold.model.attention.blocks import DocumentMask, Span, indices, num_tokens
from fivefold.model.batch import Documents
from fivefold.model.context import BackwardLosses
from fivefold.model.dora import Summed

_LEAST = 1e-10
"""Added to probabilities whose logarithm is taken, as in Megatron-LM."""


@dataclass(frozen=True)
class IndexerTraining:
    """Settings of an indexer's training.

    Attributes:
        weight: factor of each query's divergence in the loss.
        sparse: whether it is of the chosen tokens alone.
        loss_scale: factor of the loss in its gradients, scalar; None: 1.
        heads: heads of attention, on all ranks.
        summed: sums over the ranks that split them.
        noted: receives this microbatch's loss in its backward.
    """

    weight: float
    sparse: bool
    loss_scale: Tensor | None
    heads: int
    summed: Summed
    noted: BackwardLosses


@dataclass(frozen=True)
class ChoiceSettings:
    """How tokens are chosen.

    Attributes:
        heads: I.
        topk: tokens to attend to.
        scale: factor of an indexer's scores.
        training: how it is trained; None: not now.
        instead: chooses in place of scores [B, q, L], given them; None: the best are chosen.
    """

    heads: int
    topk: int
    scale: float
    training: IndexerTraining | None
    instead: "Callable[[Tensor, SomeQueries], Tensor] | None" = None

    def asks(self, count: int) -> bool:
        """Whether scores decide the choice among this many tokens, which otherwise are all
        chosen."""
        return count > self.topk or self.instead is not None

    def chosen(self, scores: Tensor, queries: "SomeQueries") -> Tensor:
        """Which tokens are chosen; bool [B, q, L]."""
        choose = self.instead
        return best(scores, self.topk) if choose is None else choose(scores, queries)


@dataclass(frozen=True)
class Index:
    """An indexer's output for the tokens of a microbatch.

    Attributes:
        q_BSID, k_BLD: its queries, and the key of each token that all its heads share; where rows
            are split over ranks, those of this rank's tokens.
        w_BSI: weight of each head.
        rule: how tokens are chosen.
    """

    q_BSID: Tensor
    k_BLD: Tensor
    w_BSI: Tensor
    rule: ChoiceSettings


def sparse_attention(
    q_BSND: Tensor,
    k_BLND: Tensor,
    v_BLND: Tensor,
    index: Index,
    documents: Documents | None,
    scale: float,
) -> Tensor:
    """Output [B, S, N, D] of queries at the last S of L positions.

    Args:
        q_BSND: queries.
        k_BLND: keys.
        v_BLND: values.
        index: chooses among the tokens that are not behind a query, in its document.
        documents: documents of the keys; None: every row is one.
        scale: factor of q k^T.
    """
    tensors = q_BSND, k_BLND, v_BLND, index.q_BSID, index.k_BLD, index.w_BSI
    length = k_BLND.shape[1]
    begins_BL = None if documents is None else documents.begins_BL
    queries, whole = (length - q_BSND.shape[1], length), (0, length)
    view = View((queries,), (whole,), DocumentMask(whole), begins_BL)
    out: Tensor = _Sparse.apply(*tensors, index.rule, view, scale)
    return out


@dataclass(frozen=True)
class View:
    """Which keys queries see.

    Attributes:
        queries, keys: positions in a row of the tokens that are here, ascending.
        mask: documents of a row, as far as all rows have the same.
        begins_BL: position of the first token of each token's document; None: by `mask`.
    """

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    mask: DocumentMask
    begins_BL: Tensor | None

    def pieces(self, rows: int, numbers: Callable[[int], int]) -> Iterator["SomeQueries"]:
        """Pieces of queries that are processed at once, with all keys that they see.

        Args:
            rows: B.
            numbers: number of keys -> numbers that are held at once for a query.
        """
        for span in pieces(rows, numbers(num_tokens(self.keys)), self.queries):
            segment = next(self.mask.segments(span))
            seen = segment.keys[0], span[1]
            places = indices(self.queries, span), indices(self.keys, seen)
            yield SomeQueries(self, span, seen, *(slice(*place) for place in places))


@dataclass(frozen=True)
class SomeQueries:
    """Some queries, and the keys that they may see.

    Attributes:
        view: which keys queries see.
        at, of: positions of the queries and of the keys.
        rows, keys: where they lie in tensors of queries and of keys.
    """

    view: View
    at: Span
    of: Span
    rows: slice
    keys: slice

    @property
    def count(self) -> int:
        """Number of keys."""
        return self.of[1] - self.of[0]

    def seen(self, device: torch.device) -> Tensor:
        """bool [B or 1, q, L]."""
        at = torch.arange(*self.at, device=device)[:, None]
        k = torch.arange(*self.of, device=device)
        seen = (k <= at)[None]
        begins_BL = self.view.begins_BL
        return seen if begins_BL is None else seen & (k >= begins_BL[:, slice(*self.at), None])


def best(scores: Tensor, count: int) -> Tensor:
    """Which of the scores [..., L] are the `count` best, of equal ones the first; bool.

    What is chosen is then a function of the scores alone, whatever the device and the slices.
    """
    if scores.shape[-1] <= count:
        return torch.ones_like(scores, dtype=torch.bool)
    least = scores.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above, level = scores > least, scores == least
    return above | (level & (level.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


class IndexScores:
    """An indexer's scores of keys for some queries, in at least fp32.

    Attributes:
        scores: [B, q, L], minus infinity where a query does not see a key.
    """

    def __init__(
        self, q_BqID: Tensor, k_BLD: Tensor, w_BqI: Tensor, scale: float, seen: Tensor
    ) -> None:
        wide = torch.promote_types(q_BqID.dtype, torch.float32)
        self._q, self._k = q_BqID.to(wide), k_BLD.to(wide)
        self._w, self._scale = w_BqI.to(wide) * scale, scale
        products = self._q.flatten(1, 2) @ self._k.transpose(1, 2)
        self._kept = products.unflatten(1, self._q.shape[1:3]).relu_()  # [B, q, I, L]
        scores = (self._w[:, :, None] @ self._kept)[:, :, 0]
        self.scores = scores.masked_fill_(~seen, float("-inf"))

    def backward_at(self, grad: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, of k at these places [B, q, K, D], and of w, given the gradient of the
        scores there, [B, q, K]."""
        kept = self._kept.gather(-1, places[:, :, None].expand(-1, -1, self._w.shape[2], -1))
        dw = (kept @ grad[..., None])[..., 0] * self._scale
        dx = (kept > 0) * grad[:, :, None] * self._w[..., None]
        rows = torch.arange(len(places), device=places.device)[:, None, None]
        return dx @ self._k[rows, places], dx.transpose(2, 3) @ self._q, dw

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and w, given that of the scores, which is 0 where they are masked."""
        dw = (self._kept @ grad[..., None])[..., 0] * self._scale
        dx = (self._kept > 0) * grad[:, :, None] * self._w[..., None]
        dx = dx.flatten(1, 2)
        dq = (dx @ self._k).view_as(self._q)
        return dq, dx.transpose(1, 2) @ self._q.flatten(1, 2), dw


class _Sparse(torch.autograd.Function):
    """Autograd function that saves its inputs, its result and its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, rule, view, scale = arguments
        out, lse = attended(tensors, rule, view, scale)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.rest = rule, view, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        rule, view, scale = ctx.rest
        return *gradients(tensors, rule, view, scale, (grad, out, lse)), None, None, None


def attended(
    tensors: Sequence[Tensor], rule: ChoiceSettings, view: View, scale: float
) -> tuple[Tensor, Tensor]:
    """The output [B, S, N, D], and the log-sum-exp of scores [B, N, S].

    Args:
        tensors: queries, keys and values of attention; queries, keys and weights of the indexer.
        rule: how tokens are chosen.
        view: which there are.
        scale: factor of q k^T.
    """
    q, k, v = by_heads(*tensors[:3])
    outs, lses = [], []
    for piece in view.pieces(len(q), partial(of_all, q.shape[1], rule.heads)):
        chosen = seen = piece.seen(q.device)
        if rule.asks(piece.count):
            indexed = scored(tensors[3:], rule, piece, seen)
            chosen = seen & rule.chosen(indexed.scores, piece)
        scores = _products(q, k, piece, scale).masked_fill_(~chosen[:, None], float("-inf"))
        lse = scores.logsumexp(-1)
        outs.append(scores.sub_(lse[..., None]).exp_() @ v[:, :, piece.keys])
        lses.append(lse)
    out = torch.cat(outs, 2).transpose(1, 2).to(tensors[0].dtype).contiguous()
    return out, torch.cat(lses, 2)


def gradients(
    tensors: Sequence[Tensor],
    rule: ChoiceSettings,
    view: View,
    scale: float,
    saved: tuple[Tensor, Tensor, Tensor],
) -> Iterator[Tensor]:
    """Those of `tensors`, in their types, from that of the output.

    Args:
        tensors: as of `attended`, like those that follow.
        rule: how tokens are chosen.
        view: which there are.
        scale: factor of q k^T.
        saved: gradient of the output, the output, and the log-sum-exp.
    """
    walk = _Backward(tensors, rule, view, scale)
    grad, out = by_heads(*saved[:2])
    walk.run(grad, (grad * out).sum(-1), saved[2])
    return walk.gradients()


class _Backward:
    """The backward of one layer, some queries at a time; gradients are summed in at least fp32."""

    def __init__(
        self, tensors: Sequence[Tensor], rule: ChoiceSettings, view: View, scale: float
    ) -> None:
        self._tensors, self._rule, self._view, self._scale = tensors, rule, view, scale
        self._q, self._k, self._v = by_heads(*tensors[:3])
        self._wide = self._q.dtype
        self._sums = [torch.zeros_like(x) for x in (self._q, self._k, self._v)]
        self._of_index = [torch.zeros_like(x, dtype=self._wide) for x in tensors[3:]]

    def run(self, grad: Tensor, delta: Tensor, lse: Tensor) -> None:
        """Process the queries piece by piece, given the gradient of the output, its products with
        it, and the log-sum-exp."""
        rule, training = self._rule, self._rule.training
        losses = []
        q, k = self._q, self._k
        for piece in self._view.pieces(len(q), partial(of_all, q.shape[1], rule.heads)):
            seen = chosen = piece.seen(q.device)
            indexed = None
            if training is not None or rule.asks(piece.count):
                indexed = scored(self._tensors[3:], rule, piece, seen)
                chosen = seen & rule.chosen(indexed.scores, piece)
            scores = _products(q, k, piece, self._scale)
            target = None
            if training is not None and not training.sparse:
                whole = scores.masked_fill(~seen[:, None], float("-inf"))
                target = whole.softmax(-1).sum(1)
                del whole
            scores.masked_fill_(~chosen[:, None], float("-inf"))
            p = scores.sub_(lse[:, :, piece.rows, None]).exp_()
            if target is None:
                target = p.sum(1)
            self._attended(p, grad, delta, piece)
            if training is not None and indexed is not None:
                logits = indexed.scores
                if training.sparse:
                    logits = logits.masked_fill(~chosen, float("-inf"))
                d_scores, loss = divergence(logits.softmax(-1), target / training.heads, training)
                losses.append(loss)
                add_each(self._of_index, indexed.backward(d_scores), piece)
        if training is not None:
            training.noted.add(torch.stack(losses).sum())

    def _attended(self, p: Tensor, grad: Tensor, delta: Tensor, piece: SomeQueries) -> None:
        """Add the gradients of queries, keys and values from probabilities [B, N, q, L], which are
        overwritten."""
        dq, dk, dv = self._sums
        rows, keys = piece.rows, piece.keys
        of = grad[:, :, rows]
        dv[:, :, keys] += p.transpose(2, 3) @ of
        dp = of @ self._v[:, :, keys].transpose(2, 3)
        ds = dp.sub_(delta[:, :, rows, None]).mul_(p).mul_(self._scale)
        dq[:, :, rows] = ds @ self._k[:, :, keys]
        dk[:, :, keys] += ds.transpose(2, 3) @ self._q[:, :, rows]

    def gradients(self) -> Iterator[Tensor]:
        """Gradients of all inputs, in their types."""
        of_heads = (total.transpose(1, 2) for total in self._sums)
        totals = (*of_heads, *self._of_index)
        return (total.to(x.dtype) for total, x in zip(totals, self._tensors, strict=True))


def add_each(totals: Sequence[Tensor], grads: Sequence[Tensor], piece: SomeQueries) -> None:
    """Add gradients of some of an indexer's queries, keys and weights to the totals."""
    parts = piece.rows, piece.keys, piece.rows
    for total, grad, part in zip(totals, grads, parts, strict=True):
        total[:, part] += grad


def divergence(p_BqL: Tensor, own_BqL: Tensor, training: IndexerTraining) -> tuple[Tensor, Tensor]:
    """This rank's part of the gradient of an indexer's scores, and the whole loss of the queries.

    Args:
        p_BqL: its probabilities.
        own_BqL: the part of the heads' mean that this rank's heads make.
        training: how it is trained.
    """
    ratio = own_BqL / (p_BqL + _LEAST)
    grad = p_BqL * ((p_BqL * ratio).sum(-1, keepdim=True) - ratio) * training.weight
    if training.loss_scale is not None:
        grad = grad * training.loss_scale.to(grad.dtype)
    mean = training.summed(own_BqL)
    apart = mean * ((mean + _LEAST).log() - (p_BqL + _LEAST).log())
    return grad, apart.sum(dtype=torch.float64) * training.weight


def scored(
    tensors: Sequence[Tensor], rule: ChoiceSettings, piece: SomeQueries, seen: Tensor
) -> IndexScores:
    """An indexer's scores of the keys of a piece, from its queries, keys and weights."""
    q, k, w = tensors
    return IndexScores(q[:, piece.rows], k[:, piece.keys], w[:, piece.rows], rule.scale, seen)


def _products(q: Tensor, k: Tensor, piece: SomeQueries, scale: float) -> Tensor:
    """Scores [B, N, q, L] before any is masked."""
    return (q[:, :, piece.rows] * scale) @ k[:, :, piece.keys].transpose(2, 3)


def by_heads(*tensors_BSND: Tensor) -> list[Tensor]:
    """[B, S, N, D] each -> [B, N, S, D] in at least fp32."""
    wide = torch.promote_types(tensors_BSND[0].dtype, torch.float32)
    return [x.transpose(1, 2).to(wide) for x in tensors_BSND]
