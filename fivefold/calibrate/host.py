"""Measures how long the host takes to issue a layer, on a GPU that has almost nothing to do."""

import torch
import torch.distributed as dist
from torch import nn

from fivefold.calibrate.measure import Sample, clock
from fivefold.config.presets import PRESETS
from fivefold.config.training import TrainingConfig
from fivefold.model.batch import Batch
from fivefold.model.fusions import install_fusions
from fivefold.model.transformer import Stage
from fivefold.pipeline.split.stages import StageSpec
from fivefold.predict.times.layer import DENSE_OPERATIONS
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.install import install_deferral

TOKENS = 64
SMALL = PRESETS["debug-llama"]
"""A Llama whose kernels end before the host has launched the next one."""
LAYERS = SMALL.num_layers


def layers(device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup) -> Sample:
    """Measure forward and backward of a few small layers with all ranks working."""
    stage = Stage(SMALL, StageSpec(False, tuple(range(LAYERS)), False)).to(device, dtype)
    install_deferral(stage, DeferredWeights(), recomputes=False)
    install_fusions(stage, TrainingConfig())
    for parameter in stage.parameters():
        nn.init.ones_(parameter)
    places = torch.arange(TOKENS, device=device)[None]
    batch = Batch(places, places, positions=places, documents=None, token_ids=places)
    x = torch.randn(TOKENS, SMALL.hidden_size, device=device).to(dtype).requires_grad_()
    grad = torch.ones_like(x)

    def both_ways() -> None:
        stage(x, batch).backward(grad)
        stage.zero_grad()

    operations = 3 * DENSE_OPERATIONS * LAYERS
    return Sample("operations of small layers", operations, clock(both_ways, device, group))
