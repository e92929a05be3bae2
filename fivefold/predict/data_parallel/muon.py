"""Predicts the time in which Muon orthogonalises the matrices of the layers."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod

from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.counts.matrices import Matrix, parts_and_shards
from fivefold.description.kinds import layer_kinds
from fivefold.description.shape import (
    ModelParts,
    StageParts,
    is_layer_matrix,
    kinds_of,
    sets_of_predictions,
    stage_weights,
)
from fivefold.description.weights import Weight
from fivefold.hardware import Gpu
from fivefold.layout import Layout
from fivefold.predict.cluster import Cluster
from fivefold.predict.times.communication import all_to_all, span
from fivefold.predict.times.compute import ELEMENT, elementwise, matmul

TOUCHED = 10.0
"""Bytes read and written for each element besides the products: for its norm, and its division,
which writes 16 bits."""


def orthogonalising_seconds(
    layout: Layout, cluster: Cluster, stages: Iterable[StageParts]
) -> float:
    """Seconds for Muon to orthogonalise the matrices of some stages, on the busiest of the ranks
    that share them.

    Work is divided evenly, but no matrix to several ranks; parts come and go in one round.
    """
    if layout.config.optimizer.optimizer != "muon":
        return 0.0
    grid, steps = layout.grid, layout.config.optimizer.muon_num_ns_steps
    wide, precision = layout.config.master_bytes, layout.config.training.muon_precision
    ways = zip(parts_and_shards(layout), (1, grid.ep), strict=True)
    groups = [span(cluster, parts * shards, stride) for (parts, shards), stride in ways]
    found, held = 0.0, [*_held(layout, stages)]
    for experts, group in enumerate(groups):
        assigned = longest = elements = 0.0
        for matrix, whole, theirs, count in held:
            if theirs != experts:
                continue
            seconds = _seconds(cluster.gpu, whole, precision, steps)
            if matrix.is_split:
                assigned, longest = assigned + count * seconds, max(longest, seconds)
                elements += count * prod(whole)
            else:
                found += count * seconds
        found += max(assigned / group.size, longest)
        sent = elements * (wide + ELEMENT[precision]) / group.size**2
        inside, across = sent * (group.inner - 1), sent * (group.size - group.inner)
        found += all_to_all(cluster, group, inside, across) if elements else 0.0
    return found


def least_orthogonalising(config: Config, gpu: Gpu, ep: int) -> tuple[float, float]:
    """Seconds for all dense matrices of the model, and for a rank's experts in each layer: a lower
    bound on the total of the ranks that share them."""
    if config.optimizer.optimizer != "muon":
        return 0.0, 0.0
    model, steps = config.model, config.optimizer.muon_num_ns_steps
    layers, found = tuple(range(model.num_layers)), [0.0, 0.0]
    whole = ModelParts(layers, mtp=model.mtp_num_layers)
    for weight, count in _matrices(model, whole):
        shape = weight.shape
        if weight.of_experts:
            shape = (shape[0] // ep, *shape[1:])
        found[weight.of_experts] += count * _seconds(
            gpu, shape, config.training.muon_precision, steps
        )
    return found[0], found[1]


def orthogonalising_bytes(layout: Layout, stages: Iterable[StageParts]) -> float:
    """Bytes that a rank needs temporarily, in addition to its state.

    A matrix as it is put together, before and after an iteration, and two squares of its short
    side; or, before, the parts that it sends, their message, and the one that it gets; or, of a
    matrix that no ranks share, the orthogonal one and the new weight.
    """
    if layout.config.optimizer.optimizer != "muon":
        return 0.0
    wide, most = layout.config.master_bytes, 0.0
    narrow, ahead = (
        ELEMENT[layout.config.training.muon_precision],
        layout.config.optimizer.muon_nesterov,
    )
    for matrix, shape, _, _ in _held(layout, stages):
        size, short = prod(shape), min(shape[-2:])
        squares = prod(shape[:-2]) * short * short
        whole = wide * size * (matrix.is_split or ahead)
        messages = (2 + ahead) * wide * size * matrix.is_split
        moved = (narrow + wide) * size * (not matrix.is_split)
        most = max(most, messages, moved, whole + 2 * narrow * (size + squares))
    return most


def _held(
    layout: Layout, stages: Iterable[StageParts]
) -> Iterator[tuple[Matrix, tuple[int, ...], bool, int]]:
    """The matrices of some stages' layers, what of each a rank orthogonalises at once, whether they
    are of experts, and how many are equal."""
    grid, ways = layout.grid, parts_and_shards(layout)
    for stage in stages:
        layers = ModelParts(stage.layers, mtp=stage.mtp)
        for weight, count in _matrices(layout.config.model, layers):
            parts, shards = ways[weight.of_experts]
            local = weight.local(grid.tp, grid.ep, grid.etp)
            matrix = Matrix(weight.name, local, weight.placed(parts), parts, shards)
            own = tuple(part.stop - part.start for part in matrix.box(0))
            whole = matrix.shape if matrix.is_split else own
            yield matrix, whole, weight.of_experts, count


@lru_cache(maxsize=4096)
def _matrices(model: ModelConfig, stage: ModelParts) -> tuple[tuple[Weight, int], ...]:
    """The trained matrices of a stage's layers, and how many of each it has."""
    kinds = kinds_of(model, stage.layers).items()
    parts = [(ModelParts((layer_kinds(model)[kind],)), count) for kind, count in kinds]
    if stage.mtp:
        parts.append((ModelParts(mtp=1), sets_of_predictions(model, stage)))
    return tuple(
        (weight, count)
        for part, count in parts
        for name, weight in stage_weights(model, part).items()
        if weight.trained and is_layer_matrix(name, weight)
    )


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
