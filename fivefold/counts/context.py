"""Context-parallel communication of keys, values and latents; torch-free."""

from fivefold.config.reach import Reach
from fivefold.context.balance import split
from fivefold.layout import Layout
from fivefold.model.attention.blocks import DocumentMask, num_tokens


def seen_shares(layout: Layout, cp_rank: int, reach: Reach, inner: int = 1) -> tuple[float, float]:
    """How much a rank sends and receives of visible keys, in multiples of its own tokens.

    Args:
        layout: layout of the run.
        cp_rank: context-parallel rank.
        reach: how far back the layer attends; without limits everything is sent.
        inner: number of ranks per group that counts as one rank.
    """
    cp, length = layout.grid.cp, layout.config.training.seq_length
    if DocumentMask.of((0, length), reach).whole:
        return cp // inner - 1, cp // inner - 1
    shards = split(1, DocumentMask((0, length)), cp).merged(inner).seeing(reach)
    own, others = cp_rank // inner, range(len(shards.chunks))
    sent = sum(num_tokens(shards.sent(own, other)) for other in others if other != own)
    got = sum(num_tokens(shards.sent(other, own)) for other in others if other != own)
    each = length / len(shards.chunks)
    return sent / each, got / each
