"""Puts tensor and sequence parallelism into the seams of a plain stage."""

from collections.abc import Iterator
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fivefold.mesh.groups import Groups
from fivefold.model.attention import Attention
from fivefold.model.layers import Embedding, LayerNorm, Linear, RMSNorm
from fivefold.model.transformer import MLP, Stage
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.linear import ColumnParallel, RowParallel
from fivefold.tensor.vocabulary import VocabularyCrossEntropy, VocabularyLookup


def install_deferral(stage: Stage, deferred: DeferredWeights) -> None:
    """Let linears and embeddings of a stage without tensor parallelism leave dW for later."""
    column, row = ColumnParallel(None, False, deferred), RowParallel(None, False, deferred)
    for module in (stage, *_blocks(stage)):
        module.column = column
        if not isinstance(module, Stage):
            module.row = row
    for embedding in (stage.embed_tokens, stage.embed_positions):
        if embedding is not None:
            embedding.lookup = VocabularyLookup(None, False, deferred)


def install_tensor_parallel(
    stage: Stage, groups: Groups, sequence_parallel: bool, deferred: DeferredWeights
) -> set[str]:
    """Shard a stage (still on the meta device) over the tp axis and put the collectives in.

    Every parameter becomes a DTensor on the tp mesh: q, k, v, gate, up, fc1 and the vocabulary
    split by rows, o and down by columns, the rest replicated.

    Returns:
        The names of replicated parameters of which each rank computes only a part of the gradient,
        to be summed over tp at the end of the step: everything that works on this rank's tokens
        (under sequence parallelism) or this rank's heads (q/k norms, replicated k/v).
    """
    group = groups.tp
    assert group is not None, "one rank needs no tensor parallelism"
    column = ColumnParallel(group, sequence_parallel, deferred)
    row = RowParallel(group, sequence_parallel, deferred)
    rank, size = group.rank(), group.size()
    placements: dict[nn.Parameter, Placement] = {}
    partial: set[nn.Parameter] = set()
    for module in _blocks(stage):
        module.column, module.row = column, row
        if isinstance(module, Attention):
            columns = _install_heads(module, column, rank, size, partial)
            output = module.o_proj
        else:
            columns, output = [module.up_proj], module.down_proj
            columns += [] if module.gate_proj is None else [module.gate_proj]
        for linear in columns:
            placements.update((p, Shard(0)) for p in linear.parameters())
        placements[output.weight] = Shard(1)
        if output.bias is not None and sequence_parallel:
            partial.add(output.bias)
    _install_vocabulary(stage, group, column, placements)
    if sequence_parallel:
        stage.shard_tokens = lambda values_T: values_T.chunk(size)[rank]
        partial.update(_token_wise_parameters(stage))
    # Names with duplicates: a tied weight is known by both of its names.
    names = {name for name, p in stage.named_parameters(remove_duplicate=False) if p in partial}
    _distribute(stage, groups, placements)
    return names


def _install_heads(
    attention: Attention,
    column: ColumnParallel,
    rank: int,
    size: int,
    partial: set[nn.Parameter],
) -> list[Linear]:
    """Give the rank its query heads and the key/value heads that they attend with.

    Returns:
        The linears to be sharded.
    """
    model = attention.model
    attention.head_offset = rank * model.num_attention_heads // size
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            partial.add(norm.weight)
    if model.num_kv_heads % size == 0:
        return [attention.q_proj, attention.k_proj, attention.v_proj]
    # Fewer key/value heads than ranks: all hold all of them and use the one they need.
    head = rank * model.num_kv_heads // size
    rows = slice(head * model.head_dim, (head + 1) * model.head_dim)
    attention.column = replace(column, rows=(None, rows, rows))
    for linear in (attention.k_proj, attention.v_proj):
        partial.update(linear.parameters())
    return [attention.q_proj]


def _install_vocabulary(
    stage: Stage,
    group: dist.ProcessGroup,
    column: ColumnParallel,
    placements: dict[nn.Parameter, Placement],
) -> None:
    if stage.embed_tokens is not None:
        lookup = VocabularyLookup(group, column.sequence_parallel, column.deferred)
        stage.embed_tokens.lookup = lookup
        placements[stage.embed_tokens.weight] = Shard(0)
    if stage.embed_positions is not None:
        stage.embed_positions.lookup = VocabularyLookup(None, False, column.deferred)
    if stage.lm_head is not None:
        stage.column = column
        stage.cross_entropy = VocabularyCrossEntropy(group)
        placements[stage.lm_head.weight] = Shard(0)


def _token_wise_parameters(stage: Stage) -> Iterator[nn.Parameter]:
    """Parameters of the regions that sequence parallelism splits along the tokens."""
    norms = [stage.norm] + [
        norm
        for layer in stage.layers.values()
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]
    for norm in norms:
        if isinstance(norm, LayerNorm | RMSNorm):
            yield from norm.parameters()
    if isinstance(stage.embed_positions, Embedding):
        yield from stage.embed_positions.parameters()


def _blocks(stage: Stage) -> Iterator[Attention | MLP]:
    for module in stage.modules():
        if isinstance(module, Attention | MLP):
            yield module


def _distribute(stage: Stage, groups: Groups, placements: dict[nn.Parameter, Placement]) -> None:
    """Replace every parameter by a DTensor of the same global shape; tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    mesh = groups.tp_mesh
    assert mesh is not None
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                placement = placements.get(parameter, Replicate())
                local = _meta_part(parameter, placement, mesh.size(), mesh.get_local_rank())
                whole = DTensor.from_local(
                    local,
                    mesh,
                    [placement],
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                made[parameter] = nn.Parameter(whole)
            setattr(module, name, made[parameter])


def _meta_part(parameter: Tensor, placement: Placement, size: int, rank: int) -> Tensor:
    if not isinstance(placement, Shard):
        return parameter.detach()
    return parameter.detach().chunk(size, placement.dim)[rank].contiguous()
