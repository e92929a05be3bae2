"""Cost of DoRA's row lengths: how often the rows of a weight with its adapter are measured."""

from collections.abc import Iterator

from fivefold.counts.recompute import RECOMPUTED_LINEARS, LayerRecompute
from fivefold.description.layers import describe_layer
from fivefold.description.lora import Rescaled
from fivefold.description.weights import Weight
from fivefold.layout import Layout


def length_products(layout: Layout, layer: int, recompute: LayerRecompute) -> tuple[float, float]:
    """Multiplications for row lengths per token, in a step and in one forward.

    These are of A with the rows of the weight, with itself and with B.

    Args:
        layout: layout of the run.
        layer: index of the layer.
        recompute: what its backward recomputes.
    """
    config, tp = layout.config, layout.grid.tp
    slices, rank = config.parallel.num_sequence_slices, config.model.lora_rank or 0
    every = alone = 0.0
    for weight in _measured(layout, layer):
        rows, columns = weight.local(tp)
        if weight.heads % tp:
            rows //= weight.heads
        each = rank * (rows * columns + rank * (rows + columns))
        products = each * slices / config.rank_tokens
        forward, again = _runs(layout, layer, weight, recompute)
        every, alone = every + (forward + again) * products, alone + forward * products
    return every, alone


def summed_lengths(layout: Layout, layer: int, recompute: LayerRecompute) -> tuple[int, int]:
    """Numbers that tensor-parallel ranks sum per microbatch or slice of it, forward and again.

    Arguments as of `length_products`.
    """
    every = again = 0
    for weight in _measured(layout, layer):
        if weight.split == 1:
            forward, repeated = _runs(layout, layer, weight, recompute)
            every, again = every + weight.shape[0] * forward, again + weight.shape[0] * repeated
    return every, again


def _measured(layout: Layout, layer: int) -> Iterator[Weight]:
    model = layout.config.model
    for op in describe_layer(model, layer).operations:
        if isinstance(op, Rescaled):
            yield from op.measured


def _runs(layout: Layout, layer: int, weight: Weight, recompute: LayerRecompute) -> tuple[int, int]:
    """How often a linear layer runs per microbatch or slice of it: forward, and in the backward."""
    config = layout.config
    memory = config.memory
    dense = weight.name.startswith(RECOMPUTED_LINEARS["mlp"])
    tiles = 1
    if (
        dense
        and memory.tiled_mlp_num_shards > 1
        and (recompute.whole or "mlp" in recompute.modules)
    ):
        tiles = memory.num_tiles(config.rank_tokens // config.parallel.token_parts)
    again = sum(
        weight.name.startswith(RECOMPUTED_LINEARS.get(each, ())) for each in recompute.modules
    )
    if recompute.whole:
        again += 1 + (tiles > 1)
    again *= tiles
    ends = recompute.ends_group and not describe_layer(config.model, layer).keeps_end
    if tiles > 1 and ends:
        again -= 1  # the last tile's input is the last that is saved
    return tiles, again
