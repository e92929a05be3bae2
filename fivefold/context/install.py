"""Installs context parallelism in the attention of a plain stage, and splits microbatches."""

from collections.abc import Sequence

import torch.distributed as dist

from fivefold.config.parallel import CpCommType
from fivefold.context.attention import KVExchangeAttention, UlyssesAttention
from fivefold.context.balance import split
from fivefold.context.latent import GatheredLatents
from fivefold.context.sparse import SparseLatents
from fivefold.context.states import StatesOfHeads
from fivefold.context.transport import Gather, PeerToPeer
from fivefold.mesh.groups import Groups
from fivefold.model.attention.blocks import DocumentMask
from fivefold.model.attention.grouped_query import AttentionBlock, Kernel
from fivefold.model.batch import Batch
from fivefold.model.linear_attention.state_layer import StateLayer
from fivefold.model.shards import MicrobatchShare, Shards
from fivefold.model.transformer import Stage


def install_context_parallel(stage: Stage, kinds: Sequence[CpCommType], groups: Groups) -> None:
    """Make every layer attend to the tokens of all ranks.

    Args:
        stage: stage whose input is one rank's part of each sequence.
        kinds: communication (cp_comm_type): one for all layers, or one per layer of the model.
        groups: process groups of this rank.
    """
    for layer in stage.transformer_layers:
        attention = layer.self_attn
        if attention is None:
            continue
        if isinstance(attention, StateLayer):
            assert groups.cp is not None, "one rank needs no context parallelism"
            attention.kernel = StatesOfHeads(groups.cp)
            continue
        kind = kinds[attention.layer % len(kinds)]
        attention.kernel = make_kernel(kind, groups)
        if kind == "all_gather" and attention.has_latents:
            assert groups.cp is not None, "one rank needs no context parallelism"
            attention.latent_kernel = GatheredLatents(groups.cp)


def install_chosen(stage: Stage, groups: Groups, *, alone: bool) -> None:
    """Make attention to chosen tokens read the latents of all ranks' tokens.

    Args:
        stage: stage of a model with an indexer.
        groups: process groups of this rank.
        alone: whether queries read the latents of chosen tokens alone.
    """
    for layer in stage.transformer_layers:
        if isinstance(layer.self_attn, AttentionBlock):
            layer.self_attn.latent_kernel = SparseLatents(groups.cp, alone)


def make_kernel(kind: CpCommType, groups: Groups) -> Kernel:
    """The attention kernel for one cp_comm_type."""
    assert groups.cp is not None, "one rank needs no context parallelism"
    match kind:
        case "p2p":
            return KVExchangeAttention(PeerToPeer(groups.cp))
        case "all_gather":
            return KVExchangeAttention(Gather(groups.cp))
        case "a2a":
            return UlyssesAttention(groups.cp)
    inner, outer = groups.cp_inner, groups.cp_outer
    if outer is None:
        return UlyssesAttention(groups.cp)
    across = KVExchangeAttention(PeerToPeer(outer))
    return across if inner is None else UlyssesAttention(inner, across, outer.rank())


def divide(batch: Batch, window: int | None, group: dist.ProcessGroup) -> Batch:
    """This rank's part of a microbatch on the CPU; packed rows are concatenated first.

    Args:
        batch: whole microbatch.
        window: how many tokens before itself a token attends to; None: all.
        group: context-parallel group.
    """
    return batch.divided(MicrobatchShare(shards_of(batch, window, group.size()), group.rank()))


def shards_of(batch: Batch, window: int | None, ranks: int) -> Shards:
    """How a whole microbatch is split over `ranks` ranks."""
    rows, length = batch.tokens.shape
    if batch.packing is None:
        mask = DocumentMask((0, length), window)
    else:
        rows, mask = 1, DocumentMask(batch.packing.starts, window)
    return split(rows, mask, ranks)
