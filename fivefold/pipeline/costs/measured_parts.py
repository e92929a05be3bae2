"""Derives the times of single model pieces from measured times of whole stages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fivefold.config.model import ModelConfig
from fivefold.description.kinds import layer_kind
from fivefold.description.shape import count_parameters
from fivefold.errors import ConfigError, Mistake
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.costs.parts import KINDS, ModelPart, joined
from fivefold.pipeline.split.stages import StageSpec
from fivefold.units import human_seconds

_NOISE = 1e-9  # relative to the largest: smaller singular values are rounding


@dataclass(frozen=True)
class MeasuredPieces:
    """Times of model pieces, derived from a run.

    Attributes:
        kinds: seconds per microbatch for those of `parts.KINDS` that the model has.
        hop: latency of a message between ranks, in seconds.
        unexplained: largest deviation of a stage's time from the sum of its pieces, as a share of
            the longest stage.
    """

    kinds: Mapping[str, ModelPart]
    hop: float
    unexplained: float

    def lines(self) -> list[str]:
        """The derived times as text."""
        rows = [
            f"{kind:<10}{human_seconds(part.f):>10}{human_seconds(part.b):>10}"
            f"{human_seconds(part.w):>10}"
            for kind, part in self.kinds.items()
        ]
        latency = f"a message {human_seconds(self.hop)}"
        return [
            f"{'measured':<10}{'F':>10}{'dX':>10}{'dW':>10}",
            *rows,
            f"{latency}; the stages that ran take these sums to within {self.unexplained:.1%}",
        ]


def measured_pieces(
    model: ModelConfig, stages: Sequence[StageSpec], costs: Costs
) -> MeasuredPieces:
    """Times of each kind of piece in a model, by least squares over its stages.

    F, dX and dW of a stage are each the sum of its pieces' times. Times are not negative: a piece
    that would be gets 0, and the others are fitted again.

    Args:
        model: the model that ran.
        stages: contents of each stage, of one copy of the model.
        costs: times of these stages.

    Raises:
        ConfigError: the stages do not determine the time of each kind.
    """
    counts = [_pieces(model, stage) for stage in stages]
    kinds = [kind for kind in KINDS if any(kind in count for count in counts)]
    rows = [[float(count.get(kind, 0)) for kind in kinds] for count in counts]
    _check_determined(kinds, rows)
    f, b, w = (_fit(rows, times[: len(stages)]) for times in (costs.f, costs.b, costs.w))
    pieces = {kind: ModelPart(*times) for kind, *times in zip(kinds, f, b, w, strict=True)}
    took = [sum(times) for times in zip(costs.f, costs.b, costs.w, strict=True)]
    sums = [joined([pieces[k] for k in c for _ in range(c[k])]).time for c in counts]
    missed = max(abs(total - t) for total, t in zip(sums, took[: len(stages)], strict=True))
    return MeasuredPieces(pieces, costs.hop, missed / max(took))


def check_same_pieces(ran: ModelConfig, model: ModelConfig) -> None:
    """Check that pieces measured with one model have the same size in another.

    The models may have different numbers of layers.

    Raises:
        ConfigError: a kind of piece is missing or has another size.
    """
    had, has = _sizes(ran), _sizes(model)
    for kind, size in has.items():
        if had.get(kind) != size:
            there = f"{had[kind]:,} parameters" if kind in had else "none"
            raise ConfigError(
                Mistake(
                    f"the run tells nothing about this model's {kind} pieces",
                    (f"here one has {size:,} parameters, in the run {there}",),
                )
            )


def _pieces(model: ModelConfig, stage: StageSpec) -> Mapping[str, int]:
    """The number of pieces of each kind in a stage."""
    counts = Counter(layer_kind(model, layer).name for layer in stage.layers)
    counts.update(embedding=int(stage.embedding), mtp=stage.mtp, head=int(stage.head))
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


def _sizes(model: ModelConfig) -> dict[str, int]:
    """Parameters of one piece of each kind."""
    pieces = [StageSpec(True, (), False), StageSpec(False, (), True)]
    pieces += [StageSpec(False, (layer,), False) for layer in range(model.num_layers)]
    pieces += [StageSpec(False, (), False, 1)] if model.mtp_num_layers else []
    return {
        kind: count_parameters(model, piece).total
        for piece in pieces
        for kind in _pieces(model, piece)
    }


def _check_determined(kinds: Sequence[str], rows: Sequence[Sequence[float]]) -> None:
    rank = int(np.linalg.matrix_rank(np.array(rows), _NOISE))
    if rank == len(kinds):
        return
    held = " | ".join(
        " + ".join(f"{n:g} {kind}" for kind, n in zip(kinds, row, strict=True) if n) or "nothing"
        for row in rows
    )
    raise ConfigError(
        Mistake(
            f"the stages that ran do not tell {', '.join(kinds)} apart",
            (f"{held}: {rank} independent sums for {len(kinds)} unknowns",),
            works=(
                "a profiled run in which some stages hold layers only, of each kind in other "
                "numbers",
            ),
        )
    )


def _fit(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Non-negative least squares: the time of each kind."""
    matrix, wanted = np.array(rows), np.array(times)
    left, found = list(range(matrix.shape[1])), np.zeros(matrix.shape[1])
    while left:
        fitted = np.linalg.lstsq(matrix[:, left], wanted, rcond=None)[0]
        if fitted.min() >= 0:
            found[left] = fitted
            break
        left.pop(int(fitted.argmin()))
    return [float(time) for time in found]
