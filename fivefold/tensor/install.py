"""Installs tensor and sequence parallelism in the seams of a plain stage."""

from collections.abc import Mapping
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fivefold.mesh.collectives import all_reduce
from fivefold.mesh.groups import Groups
from fivefold.mesh.slices import distributed
from fivefold.model.attention.grouped_query import Attention
from fivefold.model.transformer import Stage
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.exchange import Exchange
from fivefold.tensor.joint_norm import JointHeadNorm
from fivefold.tensor.linear import ColumnParallel, GatherFeatures, RowParallel, WholeRows
from fivefold.tensor.one_rank import LocalColumn, LocalRow
from fivefold.tensor.vocabulary import VocabularyCrossEntropy, VocabularyLookup


def install_deferral(stage: Stage, deferred: DeferredWeights, *, recomputes: bool) -> None:
    """Make dW deferrable in a stage without tensor parallelism.

    Args:
        stage: stage.
        deferred: receives deferred weight gradients.
        recomputes: whether blocks run again, which need not repeat the products that end them.
    """
    column = LocalColumn(deferred)
    row = RowParallel(Exchange(None), deferred) if recomputes else LocalRow(deferred)
    install_ends(stage, deferred)
    for block in stage.blocks:
        block.column, block.row, block.whole = column, row, column
    for prediction in stage.predictions:
        prediction.column = column


def install_ends(stage: Stage, deferred: DeferredWeights) -> None:
    """Make dW of the embeddings and of the output layer deferrable, and accumulate it in place."""
    stage.column = LocalColumn(deferred)
    for embedding in (*stage.embeddings, stage.embed_positions):
        if embedding is not None:
            embedding.lookup = VocabularyLookup(None, False, deferred)


def install_tensor_parallel(
    stage: Stage,
    groups: Groups,
    exchange: Exchange,
    deferred: DeferredWeights,
    dims: Mapping[str, int | None],
) -> None:
    """Shard a stage (still on the meta device) over the tp axis and install the collectives.

    Every parameter becomes a DTensor on the tp mesh.

    Args:
        stage: stage without parallelism installed.
        groups: process groups of this rank.
        exchange: how linears gather tokens and sum products over the tp axis; if it splits tokens,
            norms and residuals process only this rank's.
        deferred: receives deferred weight gradients.
        dims: parameter name -> the dim that ranks split; None: each rank holds the whole
            parameter. Parameters that are missing stay unchanged.
    """
    group, sequence_parallel = groups.tp, exchange.splits_tokens
    assert group is not None, "one rank needs no tensor parallelism"
    column, row = ColumnParallel(exchange, deferred), RowParallel(exchange, deferred)
    whole = LocalColumn(deferred)
    spread = GatherFeatures(group, sequence_parallel)
    rank, size = group.rank(), group.size()
    for block in stage.blocks:
        block.column, block.row = column, row
        block.whole, block.spread = whole, spread
        block.summed, block.place = partial(all_reduce, group=group), rank
        block.split(rank, size)
        if isinstance(block, Attention):
            block.norm_together = JointHeadNorm(group, block.model)
    for prediction in stage.predictions:
        prediction.column, prediction.joined = column, WholeRows(group, sequence_parallel)
    _install_vocabulary(stage, group, column)
    if sequence_parallel:
        stage.shard_tokens = lambda values_T: values_T.chunk(size)[rank]
    _distribute(stage, groups, dims)


def _install_vocabulary(stage: Stage, group: dist.ProcessGroup, column: ColumnParallel) -> None:
    for embedding in stage.embeddings:
        sequence_parallel = column.exchange.splits_tokens
        embedding.lookup = VocabularyLookup(group, sequence_parallel, column.deferred)
    if stage.embed_positions is not None:
        stage.embed_positions.lookup = VocabularyLookup(None, False, column.deferred)
    if stage.lm_head is not None:
        stage.column = column
        stage.cross_entropy = VocabularyCrossEntropy(group)


def _distribute(stage: Stage, groups: Groups, dims: Mapping[str, int | None]) -> None:
    """Replace every named parameter by a DTensor of the same global shape; keep ties."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    names = {parameter: name for name, parameter in stage.named_parameters()}
    mesh = groups.tp_mesh
    assert mesh is not None
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if names[parameter] not in dims:  # of experts, which have ranks of their own
                continue
            if parameter not in made:
                dim = dims[names[parameter]]
                placement = Replicate() if dim is None else Shard(dim)
                local = _meta_part(parameter, placement, mesh.size(), mesh.get_local_rank())
                made[parameter] = distributed(parameter, local, mesh, [placement])
            setattr(module, name, made[parameter])


def _meta_part(parameter: Tensor, placement: Placement, size: int, rank: int) -> Tensor:
    if not isinstance(placement, Shard):
        return parameter.detach()
    return parameter.detach().chunk(size, placement.dim)[rank].contiguous()
