"""The delta rule of Kimi Delta Attention: a state forgets each feature of its keys by itself.

As `delta_rule`, but the decay of a token is a vector of K (Kimi Team, "Kimi Linear", 2025). So what
is left between two tokens of a chunk is a vector, too, and products of their keys are no longer
products of matrices times it. They are once a chunk is halved: what the later half meets of the
earlier one has faded to the end of the earlier and from the beginning of the later one, each less
than all of it. Halves are halved in turn, all at once, down to single tokens.

Shapes are those of `delta_rule`, of one value head for each key head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.linear_attention.chunks import DocumentChunks
from fivefold.model.linear_attention.delta_rule import (
    ChunkTransition,
    DeltaChunks,
    corrected,
    learning,
    mixed_chunks,
    walked,
)
from fivefold.model.linear_attention.recurrence import StateGroup, StateRule, by_chunk


def _chunks(
    mixed_BLGF: Tensor,
    rates_BLGR: Tensor,
    parameters: Sequence[Tensor],
    group: StateGroup,
    of: DocumentChunks,
) -> DeltaChunks:
    """See `StateRule.chunks`.

    Parameters are the taps of the convolution; of each head the logarithm of how fast it forgets;
    and of each feature of its keys what is added to what tokens say of it. Mixed are a query, a key
    and a value; rates are that of learning, then K numbers for decays.
    """
    wide = torch.promote_types(mixed_BLGF.dtype, torch.float32)
    taps, decay, bias = (parameter.to(wide) for parameter in parameters)
    rate, slow = rates_BLGR.flatten(0, 1).to(wide).split([1, group.key], dim=-1)
    fade_TGK = -decay.exp()[:, None] * F.softplus(slow + bias.view(-1, group.key))
    mixed = mixed_chunks(mixed_BLGF, taps, group, of)
    return DeltaChunks(*mixed, learning(rate, of), by_chunk(fade_TGK, of, 2))


def _walk(chunks: Sequence[Tensor], active: Sequence[int]) -> Tensor:
    """See `StateRule.walk`."""
    q, k, v, rate, fade = chunks
    begun = fade.cumsum(-2).exp()
    meets, reads = _met(torch.stack((k, q)), k, fade)[:, :, :, None]
    corrections = corrected(meets * rate[..., None], v, (k * begun)[:, :, None], rate)
    k_left = k * _after(fade).exp()
    each = (x[:, :, None] for x in (q * begun, k_left, begun[..., -1, :, None]))
    q_read, k_left, kept = each
    return walked(ChunkTransition(*corrections, q_read, reads, k_left, kept), active)


def _met(x: Tensor, y: Tensor, fade: Tensor) -> Tensor:
    """What each x meets of each y that is not after it, 0 of others: [2, ..., C, C].

    Args:
        x: [2, ..., C, K].
        y: [..., C, K], each of which has faded since.
        fade: [..., C, K].
    """
    size = y.shape[-2]
    if size == 1:
        return (x * y).sum(-1, keepdim=True)
    halves = [each.unflatten(-2, (2, size // 2)) for each in (x, y, fade)]
    first, last = _met(*halves).unbind(-3)
    (_, x_last), (y_first, _), (fade_first, fade_last) = (each.unbind(-3) for each in halves)
    across = (x_last * fade_last.cumsum(-2).exp()) @ (y_first * _after(fade_first).exp()).mT
    above = torch.cat((first, torch.zeros_like(across)), dim=-1)
    return torch.cat((above, torch.cat((across, last), dim=-1)), dim=-2)


def _after(fade: Tensor) -> Tensor:
    """Sums over all tokens after each."""
    return F.pad(fade[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


KIMI_DELTA_RULE = StateRule(_chunks, _walk)
"""States that forget features one by one, and are corrected by what their keys read."""
