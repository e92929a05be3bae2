"""Diagnoses errors of experts and routers: tokens counted twice, missing sums or losses."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fivefold.counts.shards import num_expert_shards
from fivefold.mesh.grid import EXPERT_AXES
from fivefold.model.prediction import valid_by_depth
from fivefold.train.engine import Engine
from fivefold.train.step_result import StepResult
from fivefold.verify.batches import global_batch, microbatches, rows_of
from fivefold.verify.diagnose_context import without_losses
from fivefold.verify.partial import gradients_of_ranks, plain_before
from fivefold.verify.reference import ReferenceStep, Tensors, batches_of, gradients


def routing_findings(engine: Engine, result: StepResult, reference: ReferenceStep) -> list[str]:
    """Sentences on layers whose tokens per expert differ from one device's."""
    found: dict[str, list[str]] = {}
    for here, true_ME in zip(result.routing, reference.loads, strict=True):
        own_E, true_E = torch.tensor(here.counts, dtype=true_ME.dtype), true_ME.sum(0)
        if torch.equal(own_E, true_E):
            continue
        text = "are not those of one device"
        for excess_E, known in _counted_again(engine, true_ME):
            if torch.equal(own_E - true_E, excess_E):
                text = known
        found.setdefault(text, []).append(str(here.layer))
    return [f"the experts' tokens in layers {', '.join(n)} {text}" for text, n in found.items()]


def _counted_again(engine: Engine, true_ME: Tensor) -> Iterator[tuple[Tensor, str]]:
    """(tokens of each expert that may be counted once too often, description)."""
    config, grid = engine.layout.config, engine.layout.grid
    yield true_ME.sum(0), "are all counted twice"
    each = config.training.micro_batch_size
    for dp_rank in range(grid.dp if grid.dp > 1 else 0):
        rows = rows_of(config, dp_rank, grid.dp)
        own_E = true_ME[rows.start // each : rows.stop // each].sum(0)
        yield own_E, f"are counted twice on data-parallel rank {dp_rank}"


def gradients_of_tokens(
    engine: Engine, step: int, reference: ReferenceStep
) -> Iterator[tuple[str, Tensors]]:
    """Gradients that result if a sum over experts, or the main loss, is missing.

    Args:
        engine: engine of the run.
        step: step from 0.
        reference: reference of the same step.
    """
    config, grid = engine.layout.config, engine.layout.grid
    if config.experts.aux_losses or config.experts.moe_z_loss_coeff:
        batch = global_batch(config, step)
        (whole,) = batches_of(config, [batch], step)
        samples = microbatches(config, batch)
        batches = batches_of(config, samples, step)
        without = [without_losses(each, torch.tensor(True)) for each in batches]
        text = "is that of the losses which balance experts: the main loss does not reach it"
        yield text, gradients(plain_before(config, reference), without, valid_by_depth(whole))[1]
    for missing, ranks in _ranks_without_sum(engine):
        parts = {(grid.dp_rank(rank), grid.coordinates(rank)["cp"]) for rank in ranks}
        if len(parts) * grid.tp == len(ranks):  # else tensor-parallel ranks hold parts of them
            part = "samples" if grid.cp == 1 else "tokens"
            text = f"is that of some {part}: the sum over {missing} is missing"
            yield text, gradients_of_ranks(config, grid, step, reference, parts)


def _ranks_without_sum(engine: Engine) -> Iterator[tuple[str, list[int]]]:
    """(missing sum, ranks whose tokens reach this rank's experts without it)."""
    grid, shards = engine.layout.grid, num_expert_shards(engine.layout)
    here = grid.coordinates(engine.groups.rank, EXPERT_AXES)
    at = [grid.coordinates(rank, EXPERT_AXES) for rank in range(grid.world_size)]
    for missing, apart in {
        "expert data parallelism": grid.edp,
        "shards of experts": shards,
    }.items():
        if apart > 1 and (missing, apart) != ("shards of experts", grid.edp):
            same = here["pp"], here["edp"] % apart
            yield missing, [n for n, of in enumerate(at) if (of["pp"], of["edp"] % apart) == same]
