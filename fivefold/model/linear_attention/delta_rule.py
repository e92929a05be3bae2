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


def _chunks(
    mixed_BLGF: Tensor,
    rates_BLGR: Tensor,
    parameters: Sequence[Tensor],
    group: StateGroup,
    of: DocumentChunks,
) -> DeltaChunks:
    """See `StateRule.chunks`.

    Parameters are the taps [G F, taps] of the convolution, the last of the token itself; and of
    each value head the logarithm of how fast it forgets, and what is added to what tokens say of
    it. Mixed are a query, a key and r values; rates are r numbers for rates, then r for decays.
    """
    heads = mixed_BLGF.shape[2]
    wide = torch.promote_types(mixed_BLGF.dtype, torch.float32)
    taps, decay, bias = (parameter.to(wide) for parameter in parameters)
    mixed_TF, rates_TGR = mixed_BLGF.flatten(2).flatten(0, 1), rates_BLGR.flatten(0, 1).to(wide)
    mixed_TF = F.silu(convolved(mixed_TF.to(wide), taps, of.position))
    split = [group.key, group.key, group.shared * group.value]
    q, k, v = mixed_TF.unflatten(1, (heads, -1)).split(split, dim=-1)
    rate, slow = rates_TGR.chunk(2, dim=-1)
    fade_TGr = -decay.exp().view(heads, -1) * F.softplus(slow + bias.view(heads, -1))
    chunks = DeltaChunks(
        by_chunk(unit(q) * group.key**-0.5, of, 2),
        by_chunk(unit(k), of, 2),
        by_chunk(v.unflatten(2, (group.shared, -1)), of, 3),
        by_chunk(rate.sigmoid(), of, 3),
        by_chunk(fade_TGr, of, 3),
    )
    if of.real is None:
        return chunks
    return chunks._replace(rate=chunks.rate * of.real[:, None, None])


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


DELTA_RULE = StateRule(_chunks, _walk)
"""States that are corrected by what their keys read."""
