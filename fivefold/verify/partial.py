"""Gradients of a part of a step's tokens: the result of a missing sum over ranks."""

from collections.abc import Collection

import torch

from fivefold.config.config import Config
from fivefold.mesh.grid import Grid
from fivefold.model.prediction import valid_by_depth
from fivefold.model.transformer import Stage
from fivefold.verify.batches import global_batch, microbatches
from fivefold.verify.diagnose_context import of_rank
from fivefold.verify.reference import (
    ReferenceStep,
    Tensors,
    batches_of,
    delayed_scaling,
    gradients,
    plain_model,
)


def plain_before(config: Config, reference: ReferenceStep) -> Stage:
    """The plain model with the weights and delayed scales from before the step."""
    model = plain_model(config, torch.float64)
    scales = delayed_scaling(model, config).stored(copies=True)
    for name, piece in scales.items():
        piece.local.copy_(reference.before[name])
    weights = {name: w for name, w in reference.before.items() if name not in scales}
    model.load_state_dict(weights)
    return model


def gradients_of_ranks(
    config: Config,
    grid: Grid,
    step: int,
    reference: ReferenceStep,
    ranks: Collection[tuple[int, int]],
) -> Tensors:
    """Gradients of the tokens that some (data-parallel, context-parallel) ranks read.

    Routers see all tokens, as in the run. With context parallelism this is exact near the loss;
    below the last attention, tokens of other ranks mix in.
    """
    batch = global_batch(config, step)
    (whole,) = batches_of(config, [batch], step)
    samples = microbatches(config, batch)
    every = batches_of(config, samples, step)
    each = len(every) // grid.dp
    total: Tensors = {}
    for cp in sorted({cp for _, cp in ranks}):
        batches = every if grid.cp == 1 else [of_rank(config, of_all, cp) for of_all in every]
        counted = [(number // each, cp) in ranks for number in range(len(every))]
        plain, tokens = plain_before(config, reference), valid_by_depth(whole)
        _, grads = gradients(plain, batches, tokens, counted=counted)
        total = {name: grad + total.get(name, 0) for name, grad in grads.items()}
    return total
