"""Puts context parallelism into the attention of a plain stage, and divides microbatches for it."""

from collections.abc import Sequence

import torch.distributed as dist

from fivefold.config.parallel import CpCommType
from fivefold.context.attention import Across, Heads
from fivefold.context.balance import split
from fivefold.context.latent import GatheredLatents
from fivefold.context.transport import Gather, PeerToPeer
from fivefold.mesh.groups import Groups
from fivefold.model.attention import Kernel
from fivefold.model.batch import Batch
from fivefold.model.blocks import Sight
from fivefold.model.shards import MicrobatchShare, Shards
from fivefold.model.transformer import Stage


def install_context_parallel(stage: Stage, kinds: Sequence[CpCommType], groups: Groups) -> None:
    """Let every layer attend to the tokens of all ranks.

    Args:
        stage: stage whose tokens are a part of each sequence.
        kinds: kinds of communication: one, or one per layer of the model.
        groups: groups of this rank.
    """
    for layer in stage.transformer_layers:
        attention = layer.self_attn
        kind = kinds[attention.layer % len(kinds)]
        attention.kernel = make_kernel(kind, groups)
        if kind == "all_gather" and attention.has_latents:
            assert groups.cp is not None, "one rank needs no context parallelism"
            attention.latent_kernel = GatheredLatents(groups.cp)


def make_kernel(kind: CpCommType, groups: Groups) -> Kernel:
    """The attention kernel of one kind of communication."""
    assert groups.cp is not None, "one rank needs no context parallelism"
    match kind:
        case "p2p":
            return Across(PeerToPeer(groups.cp))
        case "all_gather":
            return Across(Gather(groups.cp))
        case "a2a":
            return Heads(groups.cp)
    inner, outer = groups.cp_inner, groups.cp_outer
    if outer is None:
        return Heads(groups.cp)
    across = Across(PeerToPeer(outer))
    return across if inner is None else Heads(inner, across, outer.rank())


def divide(batch: Batch, window: int | None, group: dist.ProcessGroup) -> Batch:
    """This rank's part of a microbatch on the CPU: of every row, or of packed rows end to end.

    Args:
        batch: whole.
        window: tokens before itself that a token attends to; None: all.
        group: group of context parallelism.
    """
    return batch.divided(MicrobatchShare(shards_of(batch, window, group.size()), group.rank()))


def shards_of(batch: Batch, window: int | None, ranks: int) -> Shards:
    """How a whole microbatch is divided over so many ranks."""
    rows, length = batch.tokens.shape
    if batch.packing is None:
        sight = Sight((0, length), window)
    else:
        rows, sight = 1, Sight(batch.packing.starts, window)
    return split(rows, sight, ranks)
