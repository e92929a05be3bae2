"""Attention block by block, without ever holding S x S scores.

Partial outputs are merged by their log-sum-exp, in at least fp32, as in FlashAttention (Dao et al.
2022) and ring attention (Liu et al. 2023). Shapes: B batch, S queries, L keys, N query heads,
G key/value heads, D head features.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fivefold.model.attention.blocks import Block, DocumentMask, Span, cut, joined
from fivefold.model.attention.kernels import BlockKernel, choose_kernel
from fivefold.model.attention.scores import USUAL, Scores
from fivefold.model.dropout import HeadDropout, PairDropout


@dataclass(frozen=True)
class Keys:
    """Keys and values available on this rank, and the blocks that use them.

    Attributes:
        k: keys [B, L, G, D], possibly of a subset of the heads.
        v: values [B, L, G, Dv] of the same heads.
        blocks: blocks whose `k` indexes these keys.
        spans: positions of these keys in the row.
        heads: range of key/value heads these are; None: all.
        ids: token ids [B, L], needed only if probabilities are dropped.
    """

    k: Tensor
    v: Tensor
    blocks: tuple[Block, ...]
    spans: tuple[Span, ...]
    heads: Span | None = None
    ids: Tensor | None = None


@dataclass
class Queries:
    """The queries of a rank, with their partial outputs and gradients.

    Attributes:
        q: queries [B, S, N, D].
        num_kv_heads: G, all key/value heads of this rank.
        drop: dropout of the probabilities, or None.
        ids: token ids [B, S], needed only if probabilities are dropped.
        scores: how scores are made of q k^T.
        out: output [B, S, N, Dv] over the keys seen so far; in a backward, over all keys.
        lse: log-sum-exp [B, N, S] over the same keys.
        grad: gradient of the output, in a backward.
        dq: gradient of the queries so far, in at least fp32.

    What kernels get is a view with the heads first, made once: it costs the host time.
    """

    q: Tensor
    num_kv_heads: int
    drop: HeadDropout | None
    ids: Tensor | None
    scores: Scores
    out: Tensor = field(init=False)
    lse: Tensor = field(init=False)
    grad: Tensor = field(init=False)
    dq: Tensor = field(init=False)
    _views: tuple[Tensor, ...] = field(init=False)

    @cached_property
    def wide(self) -> torch.dtype:
        """The dtype in which outputs are merged and gradients summed: at least fp32."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def begin(self, value_dim: int, sinks: Tensor | None = None) -> None:
        """Start with no keys; a sink [N] per head only adds to the log-sum-exp."""
        B, S, N, _ = self.q.shape
        self.out = self.q.new_zeros((B, S, N, value_dim), dtype=self.wide)
        self.lse = self.q.new_full((B, N, S), float("-inf"), dtype=self.wide)
        if sinks is not None:
            self.lse.copy_(sinks.detach()[:, None].expand(B, N, S))
        self._views = _heads_first(self.q, self.out)

    def meet(self, keys: Keys) -> None:
        """Attend to more keys: merge their partial outputs into `out` and `lse`."""
        heads = self._heads(keys)
        kernel = self._kernel(keys, self.scores.of_heads(*heads))
        (q, merged), (k, v) = self._views, _heads_first(keys.k, keys.v)
        every = 0, k.shape[1]
        for block in keys.blocks:
            mine, theirs = (heads, block.q), (every, block.k)
            out, lse = kernel.forward(_part(q, *mine), _part(k, *theirs), _part(v, *theirs), block)
            known = _part(self.lse, *mine)
            total = torch.logaddexp(known, lse)
            share = (lse - total).exp_()[..., None]
            _part(merged, *mine).lerp_(out.to(self.wide), share)
            known.copy_(total)

    def begin_backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> None:
        """Start a backward, with `out` and `lse` over all keys."""
        self.grad, self.out, self.lse = grad, out, lse
        self.dq = torch.zeros_like(self.q, dtype=self.wide)
        self._views = _heads_first(grad, self.q, out, self.dq)

    def meet_backward(self, keys: Keys) -> Tensor:
        """Add to `dq`; return the gradients of these keys and values, side by side [B, L, G,
        Dk + Dv] as they are sent, in at least fp32."""
        heads, kernel = self._heads(keys), self._kernel(keys, self.scores.unnoted)
        features = keys.k.shape[-1] + keys.v.shape[-1]
        grads_kv = keys.k.new_zeros((*keys.k.shape[:-1], features), dtype=self.wide)
        dk, dv = grads_kv[..., : keys.k.shape[-1]], grads_kv[..., keys.k.shape[-1] :]
        (grad, q, out, dq), (k, v, *sums) = self._views, _heads_first(keys.k, keys.v, dk, dv)
        every = 0, k.shape[1]
        for block in keys.blocks:
            mine, theirs = (heads, block.q), (every, block.k)
            grads = kernel.backward(
                _part(grad, *mine),
                _part(q, *mine),
                _part(k, *theirs),
                _part(v, *theirs),
                _part(out, *mine),
                _part(self.lse, *mine),
                block,
            )
            for total, at, more in zip((dq, *sums), (mine, theirs, theirs), grads, strict=True):
                _part(total, *at).add_(more)
            del grads, more  # before the next block makes its own
        return grads_kv

    def sink_grads(self, sinks: Tensor) -> Tensor:
        """Gradients of the sinks [N], after `begin_backward`."""
        return sink_grads(sinks, self.grad, self.out, self.lse)

    def _heads(self, keys: Keys) -> Span:
        """The query heads that share these key/value heads."""
        shared = self.q.shape[2] // self.num_kv_heads
        first, last = keys.heads or (0, self.num_kv_heads)
        return first * shared, last * shared

    def _kernel(self, keys: Keys, scores: Scores) -> BlockKernel:
        return choose_kernel(self.q, keys.v, self._dropout(keys), scores)

    def _dropout(self, keys: Keys) -> PairDropout | None:
        if self.drop is None:
            return None
        assert self.ids is not None and keys.ids is not None, "dropout needs token ids"
        return PairDropout(self.drop.after(self._heads(keys)[0]), self.ids, keys.ids)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, S, N, D] -> [B, N, S, D] each."""
    return tuple([x.transpose(1, 2) for x in tensors])


def _part(x_BNS: Tensor, heads: Span, tokens: Span) -> Tensor:
    """Some heads and tokens of [B, N, S, ..]; itself if they are all: a view costs the host."""
    if heads != (0, x_BNS.shape[1]):
        x_BNS = x_BNS[:, slice(*heads)]
    return x_BNS if tokens == (0, x_BNS.shape[2]) else x_BNS[:, :, slice(*tokens)]


def sink_grads(sinks_N: Tensor, grad_BSND: Tensor, out_BSND: Tensor, lse_BNS: Tensor) -> Tensor:
    """Gradients of sinks [N]: they take probability from the keys and contribute no value.

    Args:
        sinks_N: the sinks' logits.
        grad_BSND: gradient of the output.
        out_BSND: output over all keys.
        lse_BNS: log-sum-exp over all keys and the sinks, in at least fp32.
    """
    share_BNS = (sinks_N.detach().to(lse_BNS.dtype)[:, None] - lse_BNS).exp_()
    given_BSN = (grad_BSND * out_BSND).sum(-1, dtype=lse_BNS.dtype)
    return -(share_BNS * given_BSN.transpose(1, 2)).sum((0, 2)).to(sinks_N.dtype)


def local_attention(
    q_BSND: Tensor,
    k_BLGD: Tensor,
    v_BLGD: Tensor,
    mask: DocumentMask,
    sinks: Tensor | None = None,
    drop: HeadDropout | None = None,
    scores: Scores = USUAL,
) -> Tensor:
    """Attention of rows on one rank, which skips masked blocks.

    Args:
        q_BSND: queries, the last S tokens of each row.
        k_BLGD: keys.
        v_BLGD: values.
        mask: keys that are seen, of each row alike, or of all B * L tokens in one row.
        sinks: logits [N], see `model.attention.grouped_query.Scope`.
        drop: dropout of the probabilities, or None.
        scores: how scores are made of q k^T.

    Returns:
        [B, S, N, Dv].
    """
    shape, length, last = q_BSND.shape, k_BLGD.shape[1], mask.starts[-1]
    k_ids = None if drop is None else drop.token_ids_BL
    q_ids = None if k_ids is None else k_ids[:, -shape[1] :]
    if last > length:
        q_BSND, k_BLGD, v_BLGD = (x.flatten(0, 1)[None] for x in (q_BSND, k_BLGD, v_BLGD))
        q_ids, k_ids = (None if x is None else x.reshape(1, -1) for x in (q_ids, k_ids))
    queries = [(end - shape[1], end) for end in range(length, last + 1, length)]
    blocks = cut(joined(queries), ((0, last),), mask)
    dropping = drop, q_ids, k_ids
    out: Tensor = _Local.apply(q_BSND, k_BLGD, v_BLGD, sinks, blocks, dropping, scores)
    return out.reshape(*shape[:3], -1)


Dropping = tuple[HeadDropout | None, Tensor | None, Tensor | None]
"""Dropout, and the ids of the tokens that queries and keys stand for."""


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        blocks: tuple[Block, ...],
        dropping: Dropping,
        scores: Scores,
    ) -> Tensor:
        drop, q_ids, k_ids = dropping
        queries = Queries(q, k.shape[2], drop, q_ids, scores)
        queries.begin(v.shape[-1], sinks)
        queries.meet(Keys(k, v, blocks, ((0, k.shape[1]),), ids=k_ids))
        out = queries.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, queries.lse)
        ctx.rest = sinks, blocks, dropping, scores
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        sinks, blocks, (drop, q_ids, k_ids), scores = ctx.rest
        queries = Queries(q, k.shape[2], drop, q_ids, scores)
        queries.begin_backward(grad, out, lse)
        both = queries.meet_backward(Keys(k, v, blocks, ((0, k.shape[1]),), ids=k_ids))
        dk, dv = both.split([k.shape[-1], v.shape[-1]], dim=-1)
        d_sinks = None if sinks is None else queries.sink_grads(sinks)
        grads = queries.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
        return *grads, d_sinks, None, None, None
