"""Predicts the time in which Muon orthogonalises the matrices of the layers."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod

from fivefold.config.model import ModelConfig
from fivefold.counts.state import num_expert_shards, num_shards
from fivefold.hardware import Gpu
from fivefold.layout import Layout
from fivefold.model.description import layer_kind
from fivefold.model.operations import Weight
from fivefold.model.shape import StageParts, WholeModel, is_layer_matrix, stage_weights
from fivefold.predict.cluster import Cluster
from fivefold.predict.communication import all_to_all, span
from fivefold.predict.compute import ELEMENT, elementwise, matmul

TOUCHED = 32.0
"""Bytes read and written for each element besides the products: its norm, its division, to the type
of the products and back, its factor."""


def orthogonalising_seconds(
    layout: Layout, cluster: Cluster, stages: Iterable[StageParts]
) -> float:
    """Seconds on the rank with most work of those that share the matrices of some stages.

    Work is dealt out evenly, but no matrix to several ranks; parts come and go in one round.
    """
    config, grid = layout.config, layout.grid
    if config.optimizer.optimizer != "muon":
        return 0.0
    narrow, steps = config.training.in_16_bits, config.optimizer.muon_num_ns_steps
    precision = "bf16" if narrow else config.training.precision
    shards, of_experts = num_shards(layout), num_expert_shards(layout)
    holders = (
        (grid.tp, shards, span(cluster, grid.tp * shards, 1)),
        (grid.etp, of_experts, span(cluster, grid.etp * of_experts, grid.ep)),
    )
    held = [WholeModel(each.layers, False, False, each.mtp) for each in stages]
    found, every = 0.0, [_matrices(config.model, each) for each in held]
    for experts, (parts, shared, group) in enumerate(holders):
        alone = dealt = longest = elements = 0.0
        for matrix, count in (each for stage in every for each in stage):
            if matrix.of_experts != experts:
                continue
            shape = matrix.shape
            if experts:
                shape = (shape[0] // grid.ep, *shape[1:])
            between = len(shape) > 2 and shape[0] % shared == 0  # whole experts
            cut = parts > 1 and matrix.placed(parts) is not None
            if not cut and (shared == 1 or between):
                here = (shape[0] // shared, *shape[1:]) if between else shape
                alone += count * _seconds(cluster.gpu, here, precision, steps)
                continue
            seconds = _seconds(cluster.gpu, shape, precision, steps)
            dealt, longest = dealt + count * seconds, max(longest, seconds)
            elements += count * prod(shape)
        found += alone + max(dealt / group.size, longest)
        each = 2 * elements * ELEMENT["fp64" if precision == "fp64" else "fp32"] / group.size**2
        inside, across = each * (group.inner - 1), each * (group.size - group.inner)
        found += all_to_all(cluster, group, inside, across) if elements else 0.0
    return found


@lru_cache(maxsize=4096)
def _matrices(model: ModelConfig, stage: WholeModel) -> tuple[tuple[Weight, int], ...]:
    """The matrices of a stage's layers that are trained, and how often it has each."""
    return tuple(_each(model, stage))


def _each(model: ModelConfig, stage: WholeModel) -> Iterator[tuple[Weight, int]]:
    kinds = Counter(layer_kind(model, layer) for layer in stage.layers)
    first = {layer_kind(model, layer): layer for layer in reversed(stage.layers)}
    parts = [(WholeModel((first[kind],), False, False), count) for kind, count in kinds.items()]
    if stage.mtp:
        parts.append((WholeModel((), False, False, 1), stage.mtp))
    for part, count in parts:
        for name, weight in stage_weights(model, part).items():
            if weight.trained and is_layer_matrix(name, weight):
                yield weight, count


@lru_cache(maxsize=4096)
def _seconds(gpu: Gpu, shape: tuple[int, ...], precision: str, steps: int) -> float:
    batch, (short, long) = prod(shape[:-2]), sorted(shape[-2:])
    result = ELEMENT[precision]
    products = (
        matmul(gpu, short, short, long, precision, batch, result)
        + matmul(gpu, short, short, short, precision, batch, result)
        + matmul(gpu, short, long, short, precision, batch, result)
    )
    return steps * products + elementwise(gpu, TOUCHED * prod(shape))
