"""The state space of Mamba-2 in chunks of tokens, after a short causal convolution.

Of each head there is a state S [K, V]. A token with x [V], B and C [K] and a step d > 0 makes
S <- exp(-A d) S + B (d x)^T, and reads S^T C + D x (Dao and Gu, "Transformers are SSMs", 2024).
Within chunks all tokens are multiplied at once; only the states between chunks come one after the
other. Heads of a group share B and C. Shapes are those of `recurrence`.
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


class SpaceChunks(NamedTuple):
    """The chunks in the form in which the walk reads them; padding follows all tokens of its
    document, so that no token reads what it writes.

    Attributes:
        x: [N, G, r, C, V].
        b: [N, G, C, K].
        c: the same.
        step: [N, G, r, C].
        fade: [N, G, r, C], the logarithm of the decay of each token.
        skip: [G, r], D.
    """

    x: Tensor
    b: Tensor
    c: Tensor
    step: Tensor
    fade: Tensor
    skip: Tensor


def _chunks(
    mixed_BLGF: Tensor,
    rates_BLGR: Tensor,
    parameters: Sequence[Tensor],
    group: StateGroup,
    of: DocumentChunks,
) -> SpaceChunks:
    """See `StateRule.chunks`.

    Parameters are the taps [G F, taps] of the convolution, the last of the token itself, and its
    bias; and of each head the logarithm of A, the bias of steps, and D. Mixed are r heads' x, a B
    and a C; rates are r steps, before their softplus.
    """
    groups = mixed_BLGF.shape[2]
    wide = torch.promote_types(mixed_BLGF.dtype, torch.float32)
    taps, tap_bias, decay, step_bias, skip = (parameter.to(wide) for parameter in parameters)
    mixed_TF = mixed_BLGF.flatten(2).flatten(0, 1).to(wide)
    mixed_TF = F.silu(convolved(mixed_TF, taps, of.position) + tap_bias)
    split = [group.shared * group.value, group.key, group.key]
    x, b, c = mixed_TF.unflatten(1, (groups, -1)).split(split, dim=-1)
    step_TGr = F.softplus(rates_BLGR.flatten(0, 1).to(wide) + step_bias.view(groups, -1))
    return SpaceChunks(
        by_chunk(x.unflatten(2, (group.shared, -1)), of, 3),
        by_chunk(b, of, 2),
        by_chunk(c, of, 2),
        by_chunk(step_TGr, of, 3),
        by_chunk(-decay.exp().view(groups, -1) * step_TGr, of, 3),
        skip.view(groups, -1),
    )


def _walk(chunks: Sequence[Tensor], active: Sequence[int]) -> Tensor:
    """See `StateRule.walk`."""
    x, b, c, step, fade, skip = chunks
    left, begun = faded(fade)
    fresh = x * step[..., None]
    out = ((c @ b.mT)[:, :, None] * left) @ fresh + x * skip[..., None, None]
    written = (b[:, :, None] * left[..., -1, :, None]).mT @ fresh
    state = x.new_zeros(active[0], *x.shape[1:3], b.shape[-1], x.shape[-1])
    states = []
    kept = begun[..., -1, None, None]
    for of_step, more in zip(kept.split(list(active)), written.split(list(active)), strict=True):
        state = state[: len(more)]
        states.append(state)
        state = state * of_step + more
    return out + (c[:, :, None] * begun[..., None]) @ torch.cat(states)


STATE_SPACE = StateRule(_chunks, _walk)
"""States that add what tokens write."""
