"""Attention of packed rows in one call, whatever the number and lengths of their documents.

A call for each document would launch as many kernels, and cuDNN would plan anew for every length
that it has not seen. Shapes: B rows, S tokens, T = B * S, N query heads, G key/value heads, D head
features, C documents.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.blockwise import sink_grads
from fivefold.model.cuda_kernels import Grads, flash_backward, flash_forward, lacking_flash
from fivefold.model.traced import result


@dataclass(frozen=True)
class Pieces:
    """Documents of T tokens that lie end to end, and what a query sees of its own.

    Attributes:
        starts: [C + 1] int32 on the device, offset of each document, then T.
        longest: number of tokens of the longest document.
        window: how many tokens before itself a query sees; None: all.
        causal: whether it sees no later token.
    """

    starts: Tensor
    longest: int
    window: int | None = None
    causal: bool = True

    @property
    def bounds(self) -> dict[str, int]:
        """FlashAttention's window: tokens seen before a query and after it, -1 for all."""
        left = -1 if self.window is None else self.window
        return {"window_size_left": left, "window_size_right": 0 if self.causal else -1}


class PackedKernel(Protocol):
    """An implementation for queries [T, N, D], keys and values [T, G, D]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Pieces) -> tuple[Tensor, Tensor]:
        """Output [T, N, D], and log-sum-exp [N, T] in at least fp32."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        at: Pieces,
    ) -> Grads:
        """Gradients of q, k and v; `out` and `lse` may include a sink."""


class PackedFlash:
    """FlashAttention of several lengths; `lse` may include sinks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Pieces) -> tuple[Tensor, Tensor]:
        """See `PackedKernel`."""
        longest = at.longest, at.longest
        return flash_forward(q, k, v, at.starts, longest, at.causal, at.bounds)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        at: Pieces,
    ) -> Grads:
        """See `PackedKernel`."""
        longest, grad = (at.longest, at.longest), grad.contiguous()
        return flash_backward(grad, q, k, v, out, lse, at.starts, longest, at.causal, at.bounds)


def lacking_packed(q_BSND: Tensor, v_BSGD: Tensor) -> str:
    """Why queries and values like these cannot be attended to in one call; '' if they can."""
    if v_BSGD.shape[-1] > q_BSND.shape[-1]:
        return f"values must not have more features than queries, {v_BSGD.shape[-1]}"
    return lacking_flash(q_BSND)


def packed_attention(
    q_BSND: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    pieces: Pieces,
    sinks: Tensor | None = None,
    kernel: PackedKernel | None = None,
) -> Tensor:
    """Attention within each document, [B, S, N, Dv].

    Args:
        q_BSND: queries.
        k_BSGD: keys.
        v_BSGD: values, of at most as many features; kernels get them padded with zeros, and
            what is kept for the backward is not padded.
        pieces: the documents.
        sinks: logits [N], see `model.attention.Scope`.
        kernel: what computes it (default: FlashAttention).
    """
    B, S, N, _ = q_BSND.shape
    q, k, v = (x.flatten(0, 1) for x in (q_BSND, k_BSGD, v_BSGD))
    out: Tensor = _Packed.apply(q, k, v, sinks, pieces, kernel or PackedFlash())
    return out.view(B, S, N, -1)


def _padded(x: Tensor, features: int) -> Tensor:
    lacking = features - x.shape[-1]
    return F.pad(x, (0, lacking)) if lacking else x


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
        features, values = q.shape[-1], v.shape[-1]
        out, lse = kernel.forward(q, k, _padded(v, features), pieces)
        out = out[..., :values].contiguous()
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
        wide = [_padded(x, q.shape[-1]) for x in (grad, v, out)]
        dq, dk, dv = ctx.kernel.backward(wide[0], q, k, wide[1], wide[2], lse, ctx.pieces)
        of_sinks = None if sinks is None else sink_grads(sinks, grad[None], out[None], lse[None])
        return dq, dk, dv[..., : v.shape[-1]], of_sinks, None, None
