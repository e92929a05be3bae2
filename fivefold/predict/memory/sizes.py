"""Memory of layers during their backward, and of message buffers."""

from collections.abc import Iterable, Sequence
from math import prod

from fivefold.description.activations import Saved
from fivefold.description.core_attention import CoreAttention
from fivefold.description.layers import Layer, describe_layer
from fivefold.description.operations import Operation
from fivefold.description.running import Running
from fivefold.description.shape import StageParts, all_layers
from fivefold.layout import Layout


def deferred_bytes(operations: Iterable[Operation], running: Running) -> float:
    """Bytes per token that deferred weight gradients need: x and dY of linear layers."""
    waiting = (op for op in operations if not (op.frozen or running.tiles(op.rerun_by)))
    return sum(each.deferred(running) for each in waiting)


def first_linear(layout: Layout, layer: Layer) -> float:
    """Parameters of an MLP's projections into its inner features, on one rank."""
    return max((trained_by(layout, linear) for linear in layer.last_inputs), default=0)


def last_linears(layout: Layout, layer: Layer) -> float:
    """Parameters of an MLP's projections out of its inner features, on one rank."""
    inward = layer.last_inputs
    return sum(trained_by(layout, op) for op in layer.after_last_input if op not in inward)


def trained_by(layout: Layout, operation: Operation) -> int:
    """Number of trained parameters that an operation multiplies with, on one rank."""
    grid, weights = layout.grid, () if operation.frozen else operation.multiplied
    return sum(prod(weight.local(grid.tp, grid.ep, grid.etp)) for weight in weights)


def tiled_weights(layout: Layout, layer: Layer, running: Running) -> list[int]:
    """Trained elements of each matrix of an MLP that runs in tiles, on one rank; else none."""
    # Its last product is not run again, but its gradients are those of tiles, too.
    if not any(running.tiles(op.rerun_by) for op in layer.mlp):
        return []
    tiled = (op for op in layer.mlp if not op.frozen)
    return [prod(weight.local(layout.grid.tp)) for op in tiled for weight in op.multiplied]


def recomputed_at_once(
    running: Running, layers: Sequence[Saved], place: int | None = None
) -> float:
    """Most bytes recomputed at a time: those of a group of layers, or of parts of a layer; with a
    place only of the group in which that layer is."""
    memory = running.memory
    full = memory.recompute_granularity == "full" and memory.recompute_method == "uniform"
    group = memory.recompute_num_layers[0] if full else 1
    sums = [
        sum(layer.recomputed for layer in layers[start : start + group])
        for start in range(0, len(layers), group)
    ]
    return max(sums, default=0.0) if place is None else sums[place // group]


def buffers(layout: Layout, stage: StageParts, running: Running) -> tuple[float, ...]:
    """Bytes of message buffers between stages; the same with those of attention, with those of
    experts in a backward, and in a forward.

    They are gathered keys and values, and rows of tokens on their way to and from experts; in a
    forward, results of the rows of all ranks that split each expert, and the same sorted by rank.
    """
    model, grid, tokens = layout.config.model, layout.grid, layout.config.rank_tokens
    element, between, attention, rows = running.element_bytes, 0.0, 0.0, 0.0
    layers = [describe_layer(model, layer) for layer in all_layers(model, stage)]
    if grid.pp > 1:
        between = 2 * element * model.hidden_size / running.token_parts
    softmax = [layer for layer in layers if layer.kind.softmax]
    if grid.cp > 1 and softmax:
        keys = element * max(op.one(CoreAttention).key_value_features(grid.tp) for op in softmax)
        whole = "all_gather" in layout.config.parallel.cp_comm_type
        # A ring holds the current block and the arriving one, and the gradients of both.
        attention = keys * (2 * grid.cp if whole else 4)
    if running.expert_ranks > 1 and any(layer.kind.experts for layer in layers):
        rows = 2 * element * model.expert_features * running.rows(model.moe_router_topk)
    own = rows / running.expert_tensor_parallel
    return tuple(tokens * (between + more) for more in (0.0, attention, own, rows))
