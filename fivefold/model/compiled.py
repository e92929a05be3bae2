"""Transformer layers through torch.compile."""

from typing import Any

import torch

from fivefold.model.layers import plain_column, plain_row, plain_spread
from fivefold.model.transformer import Stage


def compile_layers(stage: Stage, backend: str) -> None:
    """Compile the layers of a stage, each for itself, once all their seams are filled.

    What has effects that a graph cannot show stays outside of it: collectives, weight gradients
    that are put aside, and attention, whose cut into documents is another one in every batch.

    Args:
        stage: its layers' forwards are replaced; hooks of data parallelism remain around them.
        backend: backend of torch.compile.
    """
    outside: Any = torch.compiler.disable
    for layer in stage.transformer_layers:
        layer.self_attn.wrap_kernel(outside)
        if not layer.mlp.compiles:
            layer.mlp.forward = outside(layer.mlp.forward)
        for module in (layer.self_attn, layer.mlp):
            if module.column is not plain_column:
                module.column = outside(module.column)
            if module.row is not plain_row:
                module.row = outside(module.row)
            if module.whole is not plain_column:
                module.whole = outside(module.whole)
            if module.spread is not plain_spread:
                module.spread = outside(module.spread)
        layer.forward = torch.compile(layer.forward, backend=backend)  # type: ignore[method-assign]
