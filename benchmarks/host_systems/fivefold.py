"""Fivefold's layers, with everything that `parallelize` installs in them."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.host_systems.common import (
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    NORM_EPSILON,
    ROPE_BASE,
    SEQ,
    Layers,
    Place,
    fused_norm,
    serve,
)
from fivefold.check import check
from fivefold.config.sources import read_config
from fivefold.mesh.groups import build_groups
from fivefold.mesh.slices import piece_of
from fivefold.model.batch import Batch
from fivefold.model.context import Context
from fivefold.model.leaves import local
from fivefold.model.norms import RMSNorm
from fivefold.model.transformer import plain_layers
from fivefold.parallelize import parallelize

VALUES = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_query_groups": KV_HEADS,
    "ffn_hidden_size": FFN,
    "norm_epsilon": NORM_EPSILON,
    "rotary_base": ROPE_BASE,
    "seq_length": SEQ,
}


def build(place: Place) -> Layers:
    tp, device, dtype = place
    config = read_config("debug", **VALUES, tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    layout = check(config, tp)
    groups = build_groups(layout.grid, 0, device.type, sharded=False)
    model = parallelize(layout, groups, device)
    model.initialise({name: piece_of(p) for name, p in model.parameters().items()})
    stage = model.stages[0].to(dtype)
    given: list[Any] = []

    def through(layers: Any, x_TH: Tensor, context: Context) -> Tensor:
        given[:] = layers, context
        return x_TH

    stage.through = through
    positions = torch.arange(SEQ, device=device)[None]
    batch = Batch(positions % 7, positions % 5, positions, None, positions)
    stage(None, batch)
    layers, context = given
    return Layers(lambda x: plain_layers(layers, x, context), (SEQ // tp, HIDDEN), layers)


RMSNorm.forward = lambda self, x: fused_norm(x, local(self.weight), NORM_EPSILON)  # type: ignore


if __name__ == "__main__":
    serve(build)
