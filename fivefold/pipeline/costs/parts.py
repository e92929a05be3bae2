"""Time and memory of the pieces of a model, modelled or stated by the user."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fivefold.config.model import ModelConfig
from fivefold.description.activations import (
    Saved,
    embedding_bytes,
    loss_bytes,
    saved_activations,
    total,
)
from fivefold.description.kinds import layer_kind, layer_kinds
from fivefold.description.running import Running
from fivefold.description.shape import count_parameters, forward_flops
from fivefold.errors import Mistakes, did_you_mean
from fivefold.pipeline.costs.costs import times_problem
from fivefold.pipeline.split.stages import StageSpec

# Kinds of pieces whose cost can be stated, and their default cost.
KINDS: Mapping[str, float] = {
    "embedding": 0.0,
    **dict.fromkeys(("dense", "moe", "linear_dense", "linear_moe", "mtp"), 1.0),
    "head": 0.0,
}
PARAMETER_BYTES = 18.0  # of weights, gradients and optimizer state, where nothing else is known


@dataclass(frozen=True)
class ModelPart:
    """Costs of an indivisible piece of the model: the embedding, a layer, or the head.

    Attributes:
        f: forward time per microbatch, in any unit.
        b: dX time per microbatch.
        w: dW time per microbatch.
        state: memory that does not depend on the microbatches in flight.
        held: memory per microbatch in flight.
    """

    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    state: float = 0.0
    held: float = 0.0

    @property
    def time(self) -> float:
        """Forward plus backward time per microbatch."""
        return self.f + self.b + self.w


def joined(parts: Iterable[ModelPart]) -> ModelPart:
    """The sum of several pieces."""
    parts = list(parts)
    return ModelPart(
        sum(part.f for part in parts),
        sum(part.b for part in parts),
        sum(part.w for part in parts),
        sum(part.state for part in parts),
        sum(part.held for part in parts),
    )


@dataclass(frozen=True)
class Parts:
    """A model as a sequence of pieces.

    Attributes:
        embedding: embedding, on the first stage.
        layers: decoder layers in order.
        prediction: multi-token prediction layers, which stay together after the decoder layers.
        head: final norm, output layer and loss, on the last stage.
    """

    embedding: ModelPart
    layers: tuple[ModelPart, ...]
    prediction: tuple[ModelPart, ...]
    head: ModelPart

    @cached_property
    def items(self) -> tuple[ModelPart, ...]:
        """The pieces that can move between stages: layers, and all of prediction as one."""
        return (*self.layers, *([joined(self.prediction)] if self.prediction else ()))

    def each(self, change: Callable[..., ModelPart], *others: "Parts") -> "Parts":
        """What `change` makes of each piece, and of the same piece of `others`."""
        models = (self, *others)
        return Parts(
            change(*(model.embedding for model in models)),
            tuple(map(change, *(model.layers for model in models))),
            tuple(map(change, *(model.prediction for model in models))),
            change(*(model.head for model in models)),
        )

    def of(self, stage: StageSpec) -> ModelPart:
        """Time and memory of a stage."""
        return joined(
            [
                *([self.embedding] if stage.embedding else ()),
                *(self.layers[layer] for layer in stage.layers),
                *(self.prediction if stage.mtp else ()),
                *([self.head] if stage.head else ()),
            ]
        )

    def stages(self, cuts: Sequence[int]) -> tuple[StageSpec, ...]:
        """The stages that start at the first item and at each of the ascending `cuts`."""
        edges, last = [0, *cuts, len(self.items)], len(self.layers)
        final = len(cuts)
        return tuple(
            StageSpec(
                stage == 0,
                tuple(range(min(edges[stage], last), min(edges[stage + 1], last))),
                stage == final,
                len(self.prediction) if edges[stage] <= last < edges[stage + 1] else 0,
            )
            for stage in range(final + 1)
        )


def modelled_parts(model: ModelConfig, seq_length: int) -> Parts:
    """Pieces with modelled costs: times in FLOPs per token, memory in bytes per sequence.

    dX takes the FLOPs of linear layers once and of attention twice, dW those of linear layers once.

    Args:
        model: the architecture.
        seq_length: tokens per microbatch.
    """
    running = Running(seq_length)
    size = model.prediction_size

    further = [
        total(saved_activations(model, layer, running)) for layer in model.prediction_layers[:size]
    ]

    def part(stage: StageSpec, saved: Mapping[str, Saved] | Iterable[Saved]) -> ModelPart:
        flops = forward_flops(model, seq_length, stage)
        return ModelPart(
            flops.total,
            flops.dx,
            flops.matmul,
            count_parameters(model, stage).total * PARAMETER_BYTES,
            total(saved).kept * seq_length,
        )

    kinds = {
        kind: part(StageSpec(False, (layer,), False), saved_activations(model, layer, running))
        for kind, layer in layer_kinds(model).items()
        if not kind.predicts
    }
    predicts = part(StageSpec(False, (), False, 1), further)
    return Parts(
        part(StageSpec(True, (), False), embedding_bytes(model, running)),
        tuple(kinds[layer_kind(model, layer)] for layer in range(model.num_layers)),
        tuple(
            replace(predicts, state=predicts.state * (depth < model.prediction_sets))
            for depth in range(model.mtp_num_layers)
        ),
        part(StageSpec(False, (), True), loss_bytes(model, running)),
    )


def stated_parts(
    kinds: Sequence[str],
    num_predictions: int,
    costs: Mapping[str, float],
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Parts:
    """Pieces with costs stated by kind; their memory is the number of layers.

    Args:
        kinds: "dense", "moe", "linear_dense" or "linear_moe" for each layer.
        num_predictions: number of multi-token prediction layers.
        costs: cost by kind where it differs from the default in `KINDS`.
        times: times F, dX and dW of a piece whose cost is 1.
    """

    def part(kind: str, held: float) -> ModelPart:
        cost = costs.get(kind, KINDS[kind])
        f, b, w = (cost * time for time in times)
        return ModelPart(f, b, w, held=held)

    held = {"embedding": 0.0, "head": 0.0}
    return parts_of_kinds(
        kinds, num_predictions, {kind: part(kind, held.get(kind, 1.0)) for kind in KINDS}
    )


def parts_of_kinds(
    kinds: Sequence[str], num_predictions: int, pieces: Mapping[str, ModelPart]
) -> Parts:
    """Pieces that are equal within each kind.

    Args:
        kinds: "dense", "moe", "linear_dense" or "linear_moe" for each layer.
        num_predictions: number of multi-token prediction layers.
        pieces: piece by kind, for the kinds that occur.
    """
    return Parts(
        pieces["embedding"],
        tuple(pieces[kind] for kind in kinds),
        (pieces["mtp"],) * num_predictions if num_predictions else (),
        pieces["head"],
    )


def read_costs(text: str) -> dict[str, float]:
    """Parse 'dense=0.55,mtp=1.8' into costs by kind.

    Raises:
        ConfigError: lists every item that is not a valid cost.
    """
    costs: dict[str, float] = {}
    mistakes = Mistakes()
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        try:
            costs[name] = float(value)
        except ValueError:
            equals = ""
        if name not in KINDS:
            mistakes.add(f"unknown kind {name!r}{did_you_mean(name, KINDS)}", works=KINDS)
        elif not equals or not costs[name] >= 0:
            mistakes.add(f"{word.strip()!r} states no cost", works=(f"{name}=1", f"{name}=0.55"))
    problem = None if mistakes.found else times_problem(costs.values())
    if problem:
        mistakes.add(f"--layer-costs {text!r}: {problem}")
    mistakes.raise_if_any()
    return costs
