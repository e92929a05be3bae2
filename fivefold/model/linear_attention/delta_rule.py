"""The gated delta rule of chunks of tokens, after a short causal convolution.

What rules that correct states have in common is here, too; `kimi_delta_rule` has another one.

Of each value head there is a state S [K, V]. A token with key k, value v, decay a in (0, 1] and
rate b in (0, 1) makes S <- a S, and then moves what k reads from it towards v:
S <- S + k (b (v - S^T k))^T (Yang et al., "Gated Delta Networks", 2024). Its query reads S^T q.
Within a chunk all corrections are solved at once, as one triangular system ("Parallelizing Linear
Transformers with the Delta Rule", 2024); only the states between chunks come one after the other.

Shapes: T tokens, G key heads, r value heads of each, K and V features of a key and a value head;
N chunks of C tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.linear_attention.chunks import DocumentChunks
from fivefold.model.linear_attention.recurrence import (
    StateGroup,
    StateRule,
    by_chunk,
    convolved,
    faded,
)

EPSILON = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""


class DeltaChunks(NamedTuple):
    """The chunks in the form in which the rule reads them.

    Attributes:
        q: [N, G, C, K].
        k: the same.
        v: [N, G, r, C, V].
        rate: [N, G, r, C], 0 where a token does not count.
        fade: [N, G, r, C], the logarithm of the decay of each token; or [N, G, C, K], of each
            feature of its keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rate: Tensor
    fade: Tensor


def _chunks(
    mixed_BLGF: Tensor,
    rates_BLGR: Tensor,
    parameters: Sequence[Tensor],
    group: StateGroup,
    of: DocumentChunks,
) -> DeltaChunks:
    """See `StateRule.chunks`.

    The parameters are the taps [G F, taps] of the convolution, whose last tap is for the token
    itself, and for each value head the logarithm of its decay rate and a bias of its step. Mixed
    are a query, a key and r values; rates are r numbers for rates, then r for decays.
    """
    wide = torch.promote_types(mixed_BLGF.dtype, torch.float32)
    taps, decay, bias = (parameter.to(wide) for parameter in parameters)
    heads, (rate, slow) = mixed_BLGF.shape[2], rates_BLGR.flatten(0, 1).to(wide).chunk(2, dim=-1)
    fade_TGr = -decay.exp().view(heads, -1) * F.softplus(slow + bias.view(heads, -1))
    mixed = mixed_chunks(mixed_BLGF, taps, group, of)
    return DeltaChunks(*mixed, learning(rate, of), by_chunk(fade_TGr, of, 3))


def mixed_chunks(
    mixed_BLGF: Tensor, taps: Tensor, group: StateGroup, of: DocumentChunks
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [N, G, C, K], divided by their lengths, and values [N, G, r, C, V]."""
    mixed_TF = convolved(mixed_BLGF.flatten(2).flatten(0, 1).to(taps.dtype), taps, of.position)
    split = [group.key, group.key, group.shared * group.value]
    q, k, v = F.silu(mixed_TF).unflatten(1, (mixed_BLGF.shape[2], -1)).split(split, dim=-1)
    return (
        by_chunk(unit(q) * group.key**-0.5, of, 2),
        by_chunk(unit(k), of, 2),
        by_chunk(v.unflatten(2, (group.shared, -1)), of, 3),
    )


def learning(rate_TGr: Tensor, of: DocumentChunks) -> Tensor:
    """How far each token corrects a state [N, G, r, C], 0 where a place does not count."""
    rate = by_chunk(rate_TGr.sigmoid(), of, 3)
    return rate if of.real is None else rate * of.real[:, None, None]


def unit(x: Tensor) -> Tensor:
    """x divided by its length over the last dim."""
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


def _walk(chunks: Sequence[Tensor], active: Sequence[int]) -> Tensor:
    """See `StateRule.walk`."""
    q, k, v, rate, fade = chunks
    left, begun = faded(fade)
    begun = begun[..., None]
    k_each, q_each = k[:, :, None], q[:, :, None]
    meets = (k @ k.mT)[:, :, None] * left * rate[..., None]
    reads = (q @ k.mT)[:, :, None] * left
    corrections = corrected(meets, v, k_each * begun, rate)
    k_left, kept = k_each * left[..., -1, :, None], begun[..., -1:, :]
    return walked(ChunkTransition(*corrections, q_each * begun, reads, k_left, kept), active)


def corrected(meets: Tensor, v: Tensor, k_begun: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """Of all tokens of a chunk at once, each after those before it: what they would write, were the
    state before the chunk zero [..., C, V], and what they read of it [..., C, K].

    Args:
        meets: what of each earlier token's key is met, times the rate; above the diagonal unused.
        v: values.
        k_begun: keys, times what is left of the state before the chunk.
        rate: how far each token corrects.
    """
    asked = torch.cat((v, k_begun), dim=-1) * rate[..., None]
    solved = torch.linalg.solve_triangular(meets, asked, upper=False, unitriangular=True)
    fresh, stale = solved.split([v.shape[-1], k_begun.shape[-1]], dim=-1)
    return fresh, stale


class ChunkTransition(NamedTuple):
    """How chunks read and change the states that reach them.

    Attributes:
        fresh, stale: as `corrected` gives them.
        q_read: queries, times what is left of the state before the chunk.
        reads: what queries read of what is written within the chunk [..., C, C].
        k_left: keys, times what is left at the chunk's end of what they have written.
        kept: what is left of the state itself then, [..., 1 or K, 1].
    """

    fresh: Tensor
    stale: Tensor
    q_read: Tensor
    reads: Tensor
    k_left: Tensor
    kept: Tensor


def walked(chunks: ChunkTransition, active: Sequence[int]) -> Tensor:
    """What queries read, one chunk after another of each document; see `StateRule.walk`."""
    first, key = chunks.fresh, chunks.stale.shape[-1]
    state = first.new_zeros(active[0], *first.shape[1:3], key, first.shape[-1])
    outs = []
    for step in zip(*(x.split(list(active)) for x in chunks), strict=True):
        fresh, stale, q_read, reads, k_left, kept = step
        state = state[: len(fresh)]
        written = fresh - stale @ state
        outs.append(q_read @ state + reads @ written)
        state = state * kept + k_left.mT @ written
    return torch.cat(outs)


DELTA_RULE = StateRule(_chunks, _walk)
"""States that are corrected by what their keys read."""
