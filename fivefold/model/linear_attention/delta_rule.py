"""The gated delta rule of chunks of tokens, after a short causal convolution.

Of each value head there is a state S [K, V]. A token with key k, value v, decay a in (0, 1] and
rate b in (0, 1) makes S <- a S, and then moves what k reads from it towards v:
S <- S + k (b (v - S^T k))^T (Yang et al., "Gated Delta Networks", 2024). Its query reads S^T q.
Within a chunk all corrections are solved at once, as one triangular system ("Parallelizing Linear
Transformers with the Delta Rule", 2024); only the states between chunks come one after the other.

Shapes: T tokens, G key heads, r value heads of each, K and V features of a key and a value head;
N chunks of C tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.description.linear_attention import CHUNK
from fivefold.model.linear_attention.chunks import DocumentChunks

EPSILON = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""


class StateSizes(NamedTuple):
    """Sizes of linear attention's heads.

    Attributes:
        key: K.
        value: V.
        shared: r, value heads of a key head.
    """

    key: int
    value: int
    shared: int

    @property
    def mixed(self) -> int:
        """Features of a key head that the convolution mixes: a query, a key, and r values."""
        return 2 * self.key + self.shared * self.value


class Parameters(NamedTuple):
    """What a rank's heads learn beside projections.

    Attributes:
        taps: [G * mixed, taps], of the convolution; the last is of the token itself.
        decay: [G * r], the logarithm of how fast heads forget.
        bias: [G * r], added to what tokens say of it.
    """

    taps: Tensor
    decay: Tensor
    bias: Tensor


def attend(
    mixed_BLGF: Tensor,
    rates_BLGR: Tensor,
    parameters: Parameters,
    sizes: StateSizes,
    of: DocumentChunks,
) -> Tensor:
    """What queries read, [B, L, G, r V].

    Keeps its arguments alone for the backward, which runs the forward again: what lies between is
    many times as large.

    Args:
        mixed_BLGF: query, key and r values of each key head.
        rates_BLGR: r numbers for its rates, then r for its decays.
        parameters: parameters of these heads.
        sizes: sizes of the heads.
        of: documents of the B * L tokens.
    """
    out: Tensor = _Attend.apply(mixed_BLGF, rates_BLGR, *parameters, sizes, of)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        rates: Tensor,
        taps: Tensor,
        decay: Tensor,
        bias: Tensor,
        sizes: StateSizes,
        of: DocumentChunks,
    ) -> Tensor:
        ctx.save_for_backward(mixed, rates, taps, decay, bias)
        ctx.rest = sizes, of
        chunks = _chunks(mixed, rates, Parameters(taps, decay, bias), sizes, of)
        return _by_token(walk(chunks, of.active), of).to(mixed.dtype).view(*mixed.shape[:3], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """First through the walk, then through what comes before it: never both at once."""
        (sizes, of), saved = ctx.rest, ctx.saved_tensors  # once, as a checkpoint wants it
        mixed, rates, *parameters = saved
        chunks = _chunks(mixed, rates, Parameters(*parameters), sizes, of)
        grads = _walked_back(chunks, grad, sizes, of)
        del chunks
        wanted = ctx.needs_input_grad[:5]
        inputs = [x.detach().requires_grad_(wants) for x, wants in zip(saved, wanted, strict=True)]
        mixed, rates, *parameters = inputs
        with torch.enable_grad():
            again = _chunks(mixed, rates, Parameters(*parameters), sizes, of)
        asked = [x for x in inputs if x.requires_grad]
        made = iter(torch.autograd.grad(again, asked, grads))
        return *(next(made) if wants else None for wants in wanted), None, None


def _walked_back(
    chunks: "Chunks", grad: Tensor, sizes: StateSizes, of: DocumentChunks
) -> tuple[Tensor, ...]:
    """The gradients of chunks, from that of what queries read [B, L, G, r V]."""
    leaves = Chunks(*(x.detach().requires_grad_() for x in chunks))
    with torch.enable_grad():
        out = _by_token(walk(leaves, of.active), of)
    return torch.autograd.grad(out, leaves, grad.reshape(out.shape).to(out.dtype))


def _chunks(
    mixed_BLGF: Tensor,
    rates_BLGR: Tensor,
    parameters: Parameters,
    sizes: StateSizes,
    of: DocumentChunks,
) -> "Chunks":
    """What the rule needs to know, in at least fp32, by operations that autograd knows."""
    heads = mixed_BLGF.shape[2]
    wide = torch.promote_types(mixed_BLGF.dtype, torch.float32)
    taps, decay, bias = (parameter.to(wide) for parameter in parameters)
    mixed_TF, rates_TGR = mixed_BLGF.flatten(2).flatten(0, 1), rates_BLGR.flatten(0, 1).to(wide)
    mixed_TF = F.silu(convolved(mixed_TF.to(wide), taps, of.position))
    split = [sizes.key, sizes.key, sizes.shared * sizes.value]
    q, k, v = mixed_TF.unflatten(1, (heads, -1)).split(split, dim=-1)
    rate, slow = rates_TGR.chunk(2, dim=-1)
    fade_TGr = -decay.exp().view(heads, -1) * F.softplus(slow + bias.view(heads, -1))
    chunks = Chunks(
        _by_chunk(unit(q) * sizes.key**-0.5, of, 2),
        _by_chunk(unit(k), of, 2),
        _by_chunk(v.unflatten(2, (sizes.shared, -1)), of, 3),
        _by_chunk(rate.sigmoid(), of, 3),
        _by_chunk(fade_TGr, of, 3),
    )
    if of.real is None:
        return chunks
    return chunks._replace(rate=chunks.rate * of.real[:, None, None])


def convolved(x_TF: Tensor, taps_FK: Tensor, position_T: Tensor) -> Tensor:
    """The causal convolution of each feature with its taps, within documents."""
    reach = taps_FK.shape[1]
    y_TF = x_TF * taps_FK[:, -1]
    for back in range(1, min(reach, len(x_TF))):
        before_TF = F.pad(x_TF[:-back], (0, 0, back, 0)) * (position_T >= back)[:, None]
        y_TF = y_TF + before_TF * taps_FK[:, -1 - back]
    return y_TF


def unit(x: Tensor) -> Tensor:
    """x divided by its length over the last dim."""
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


class Chunks(NamedTuple):
    """What the rule needs to know of chunks.

    Attributes:
        q: [N, G, C, K].
        k: the same.
        v: [N, G, r, C, V].
        rate: [N, G, r, C], 0 where a token does not count.
        fade: [N, G, r, C], the logarithm of the decay of each token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rate: Tensor
    fade: Tensor


def walk(chunks: Chunks, active: Sequence[int]) -> Tensor:
    """What queries read, [N, G, r, C, V], from states that begin as zeros.

    Args:
        chunks: the chunks of all documents, in the order of `DocumentChunks`.
        active: documents in each step.
    """
    q, k, v, rate, fade = chunks
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    # Sums of the logarithms between two tokens, not differences of sums, which cancel each other.
    since = fade[..., None].masked_fill(~later.mT, 0.0).cumsum(-2)
    left = since.masked_fill(later, -torch.inf).exp()  # of what a token before has written
    k_each, q_each = k[:, :, None], q[:, :, None]
    meets = (k @ k.mT)[:, :, None] * left * rate[..., None]
    reads = (q @ k.mT)[:, :, None] * left
    begun = fade.cumsum(-1).exp()[..., None]
    asked = torch.cat((v, k_each * begun), dim=-1) * rate[..., None]
    solved = torch.linalg.solve_triangular(meets, asked, upper=False, unitriangular=True)
    fresh, stale = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    per_chunk = (
        fresh,  # corrections, were the state zero
        stale,  # what of the state they read
        q_each * begun,
        reads,
        k_each * left[..., -1, :, None],
        begun[..., -1:, :],
    )
    state = v.new_zeros(active[0], *v.shape[1:3], k.shape[-1], v.shape[-1])
    outs = []
    for fresh, stale, q_read, reads, k_left, kept in zip(
        *(x.split(list(active)) for x in per_chunk), strict=True
    ):
        state = state[: len(fresh)]
        written = fresh - stale @ state
        outs.append(q_read @ state + reads @ written)
        state = state * kept + k_left.mT @ written
    return torch.cat(outs)


def _by_chunk(x: Tensor, of: DocumentChunks, dim: int) -> Tensor:
    """[T, ...] -> [N, ...], with the C tokens of a chunk in dim `dim`."""
    return x.index_select(0, of.take.flatten()).unflatten(0, (-1, CHUNK)).movedim(1, dim)


def _by_token(out_NGrCV: Tensor, of: DocumentChunks) -> Tensor:
    """[N, G, r, C, V] -> [T, G, r, V]."""
    return out_NGrCV.movedim(3, 1).flatten(0, 1).index_select(0, of.put)
