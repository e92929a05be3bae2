"""torch.compile of transformer layers."""

from typing import Any

import torch

from fivefold.model.layers import plain_column, plain_row, plain_spread
from fivefold.model.transformer import Stage


def compile_layers(stage: Stage, backend: str) -> None:
    """Compile each layer of a stage; call it after all seams are filled.

    Excluded are side effects that a graph cannot represent (collectives, deferred weight
    gradients) and attention, whose document boundaries change with every batch.

    Args:
        stage: the stage whose layers are compiled; hooks of data parallelism and the names of
            layers stay outside.
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
        layer.run = torch.compile(layer.run, backend=backend)  # type: ignore[method-assign]
