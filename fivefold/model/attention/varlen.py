"""Attention of packed rows in one call, whatever the number and lengths of their documents.

A call for each document would launch as many kernels, and cuDNN would plan anew for every length
that it has not seen. Shapes: B rows, S tokens, T = B * S, N query heads, G key/value heads, D head
features, C documents.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fivefold.model.attention.blockwise import sink_grads
from fivefold.model.attention.cuda_kernels import (
    Grads,
    flash_backward,
    flash_forward,
    lacking_flash,
)
from fivefold.model.attention.kernels import padded
from fivefold.model.attention.scores import USUAL, Scores
from fivefold.model.dropout import HeadDropout, PairDropout
from fivefold.model.traced import result


@dataclass(frozen=True)
class Pieces:
    """Documents of T tokens that lie end to end, and what a query sees of its own.

    Attributes:
        starts: [C + 1] int32 on the device, offset of each document, then T.
        longest: number of tokens of the longest document.
        window: how many tokens before itself a query sees; None: all.
    """

    starts: Tensor
    longest: int
    window: int | None

    @property
    def bounds(self) -> dict[str, int]:
        """FlashAttention's window: tokens seen before a query and after it, -1 for all."""
        left = -1 if self.window is None else self.window
        return {"window_size_left": left, "window_size_right": 0}


class PackedKernel(Protocol):
    """An implementation for queries [T, N, D], keys [T, G, D] and values [T, G, Dv]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Pieces) -> tuple[Tensor, Tensor]:
        """Output [T, N, Dv], and log-sum-exp [N, T] in at least fp32."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Pieces
    ) -> Grads:
        """Gradients of q, k and v; `out` and `lse` may include a sink."""


@dataclass(frozen=True)
class PackedFlash:
    """FlashAttention of several lengths, for values of at most as many features as queries.

    It gets them padded with zeros.

    Attributes:
        scale: what q k^T is multiplied by; None: 1 / sqrt(D).
    """

    scale: float | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Pieces) -> tuple[Tensor, Tensor]:
        """See `PackedKernel`."""
        longest, wide = (at.longest, at.longest), padded(v, q.shape[-1])
        out, lse = flash_forward(q, k, wide, at.starts, longest, True, at.bounds, self.scale)
        return out[..., : v.shape[-1]].contiguous(), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Pieces
    ) -> Grads:
        """See `PackedKernel`."""
        grad, wide, out = (padded(x, q.shape[-1]) for x in (grad.contiguous(), v, out))
        pieces = at.starts, (at.longest, at.longest), True, at.bounds, self.scale
        dq, dk, dv = flash_backward(grad, q, k, wide, out, lse, *pieces)
        return dq, dk, dv[..., : v.shape[-1]]


@dataclass(frozen=True)
class PackedOwn:
    """Our FlashAttention with dropout by hash, caps and recorded scores, where
    `cuda_kernels.runs_own` allows it.

    Attributes:
        drop: dropout of the probabilities; its ids are those of the T tokens.
        scores: how scores are made of q k^T.
    """

    drop: HeadDropout | None = None
    scores: Scores = USUAL

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Pieces) -> tuple[Tensor, Tensor]:
        """See `PackedKernel`."""
        from fivefold.model.kernels import attention as attention_kernels

        return attention_kernels.forward(q, k, v, *self._within(at), self.scores)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Pieces
    ) -> Grads:
        """See `PackedKernel`."""
        from fivefold.model.kernels import attention as attention_kernels

        rest = *self._within(at), self.scores
        return attention_kernels.backward(grad, q, k, v, out, lse, *rest)

    def _within(self, at: Pieces) -> tuple[Any, PairDropout | None]:
        from fivefold.model.kernels.attention import Seen

        seen = Seen(at.starts, at.starts, (at.longest, at.longest), True, window=at.window)
        if self.drop is None:
            return seen, None
        ids = self.drop.token_ids_BL
        return seen, PairDropout(self.drop, ids, ids)


def lacking_packed(q_BSND: Tensor, v_BSGD: Tensor) -> str:
    """Why these queries and values cannot be processed in one call; '' if they can."""
    if v_BSGD.shape[-1] > q_BSND.shape[-1]:
        return f"values must not have more features than queries, {v_BSGD.shape[-1]}"
    return lacking_flash(q_BSND)


def packed_attention(
    q_BSND: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    pieces: Pieces,
    kernel: PackedKernel,
    sinks: Tensor | None,
) -> Tensor:
    """Attention within each document, [B, S, N, Dv].

    Args:
        q_BSND: queries.
        k_BSGD: keys.
        v_BSGD: values.
        pieces: the documents.
        kernel: what computes it.
        sinks: logits [N], see `model.attention.grouped_query.Scope`.
    """
    B, S, N, _ = q_BSND.shape
    q, k, v = (x.flatten(0, 1) for x in (q_BSND, k_BSGD, v_BSGD))
    out: Tensor = _Packed.apply(q, k, v, sinks, pieces, kernel)
    return out.view(B, S, N, -1)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        pieces: Pieces,
        kernel: PackedKernel,
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v, pieces)
        if sinks is not None:
            # A sink only adds to the denominator of the softmax.
            total = torch.logaddexp(lse, sinks.detach()[:, None].to(lse.dtype))
            out = result((out * (lse - total).exp_().t()[..., None]).to(q.dtype))
            lse = total
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.pieces, ctx.kernel = pieces, kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dq, dk, dv = ctx.kernel.backward(grad, q, k, v, out, lse, ctx.pieces)
        of_sinks = None if sinks is None else sink_grads(sinks, grad[None], out[None], lse[None])
        return dq, dk, dv, of_sinks, None, None
