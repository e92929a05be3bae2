"""The place of each layer in its stage, on which settings of recomputation depend."""

from fivefold.model.layer import TransformerLayer
from fivefold.model.transformer import Stage


def placed_layers(stage: Stage) -> list[tuple[int, TransformerLayer]]:
    """All layers of a stage, each with its place; 0 of multi-token prediction layers."""
    count = len(stage.layers)
    return [(i if i < count else 0, layer) for i, layer in enumerate(stage.transformer_layers)]
