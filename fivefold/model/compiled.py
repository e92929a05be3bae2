"""torch.compile of transformer layers."""

from typing import Any

import torch

from fivefold.model.attention.grouped_query import Attention, attention, in_one_call, plain_together
from fivefold.model.dora import plain_sum
from fivefold.model.layers import LayerBlock, plain_column, plain_row, plain_spread
from fivefold.model.transformer import Stage

VARIANTS = 32
"""Most graphs of a layer before torch gives up: kinds of layers x rows with or without documents,
first for one length, then for any, training or not."""

_outside: Any = torch.compiler.disable
_PLAIN = (plain_column, plain_row, plain_spread, plain_sum)


def compile_layers(stage: Stage, backend: str) -> None:
    """Compile each layer of a stage; call it after all seams are filled.

    Excluded are side effects that a graph cannot represent (collectives, deferred weight
    gradients) and attention that is not one operation: by documents, whose number and lengths
    change with every batch, or between ranks.

    Args:
        stage: the stage whose layers are compiled; hooks of data parallelism and the names of
            layers stay outside.
        backend: backend of torch.compile.
    """
    torch._dynamo.config.recompile_limit = VARIANTS
    for layer in stage.transformer_layers:
        heads = layer.self_attn
        if heads is not None:
            heads.wrap_kernel(_kernel_within)
        for block in (each for each in layer.modules() if isinstance(each, LayerBlock)):
            if not block.compiles:
                block.forward = _outside(block.forward)
        if isinstance(heads, Attention) and heads.norm_together is not plain_together:
            heads.norm_together = _outside(heads.norm_together)
        for module in layer.mixers:
            for seam in ("column", "row", "whole", "spread", "summed"):
                if (filled := getattr(module, seam)) not in _PLAIN:
                    setattr(module, seam, _outside(filled))
        layer.run = torch.compile(layer.run, backend=backend)  # type: ignore[method-assign]


def _kernel_within(kernel: Any) -> Any:
    """The attention kernel; part of the layer's graph if it is one operation.

    A break in the graph costs the host more time than launching attention does: layers of a 1B
    model that broke there left an H100 idle for a third of their time.
    """
    apart = _outside(kernel)
    if kernel is not attention:
        return apart

    def chosen(*arguments: Any) -> Any:
        return (attention if in_one_call(*arguments) else apart)(*arguments)

    return chosen
