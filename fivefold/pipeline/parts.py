"""What the pieces of a model take: time and memory, modelled or stated."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fivefold.config.model import ModelConfig
from fivefold.errors import Mistakes, did_you_mean
from fivefold.model.activations import (
    Saved,
    embedding_bytes,
    loss_bytes,
    saved_activations,
    total,
)
from fivefold.model.description import layer_kind, layer_kinds
from fivefold.model.running import Running
from fivefold.model.shape import count_parameters, forward_flops
from fivefold.pipeline.costs import times_problem
from fivefold.pipeline.stages import StageSpec

# Names of the kinds of pieces that a cost can be stated of, and their cost unless it is.
KINDS: Mapping[str, float] = {"embedding": 0.0, "dense": 1.0, "moe": 1.0, "mtp": 1.0, "head": 0.0}


@dataclass(frozen=True)
class ModelPart:
    """A piece of the model that is never cut: the embedding, a layer, the head.

    Attributes:
        f: time of its forward for a microbatch, in any unit.
        b: time of its dX.
        w: time of its dW.
        state: memory it takes whatever runs.
        held: memory that each microbatch in flight takes.
    """

    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    state: float = 0.0
    held: float = 0.0

    @property
    def time(self) -> float:
        """Of a microbatch, there and back."""
        return self.f + self.b + self.w


def joined(parts: Iterable[ModelPart]) -> ModelPart:
    """What pieces take together."""
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
    """A model in pieces.

    Attributes:
        embedding: goes to the first stage.
        layers: layers in order.
        prediction: each layer of multi-token prediction; they stay together, after the layers.
        head: final norm, output layer and loss; goes to the last stage.
    """

    embedding: ModelPart
    layers: tuple[ModelPart, ...]
    prediction: tuple[ModelPart, ...]
    head: ModelPart

    @cached_property
    def items(self) -> tuple[ModelPart, ...]:
        """What can be handed from stage to stage: the layers, and all of prediction as one."""
        return (*self.layers, *([joined(self.prediction)] if self.prediction else ()))

    def of(self, stage: StageSpec) -> ModelPart:
        """What a stage takes."""
        return joined(
            [
                *([self.embedding] if stage.embedding else ()),
                *(self.layers[layer] for layer in stage.layers),
                *(self.prediction if stage.mtp else ()),
                *([self.head] if stage.head else ()),
            ]
        )

    def stages(self, cuts: Sequence[int]) -> tuple[StageSpec, ...]:
        """The stages that begin at the first item and at each of `cuts`, which ascend."""
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


def modelled_parts(model: ModelConfig, seq_length: int, *, parameter_bytes: float = 18.0) -> Parts:
    """Pieces by the model's arithmetic: times in FLOPs a token, memory in bytes a sequence.

    dX multiplies each linear once and attention twice, dW each linear once.

    Args:
        model: the architecture.
        seq_length: tokens of a microbatch.
        parameter_bytes: weights, gradients and optimizer state of each parameter.
    """
    running = Running(seq_length)
    last = model.num_layers

    def part(stage: StageSpec, saved: Mapping[str, Saved]) -> ModelPart:
        flops = forward_flops(model, seq_length, stage)
        return ModelPart(
            flops.total,
            flops.matmul + 2 * flops.attention,
            flops.matmul,
            count_parameters(model, stage).total * parameter_bytes,
            total(saved).kept * seq_length,
        )

    kinds = {
        kind: part(StageSpec(False, (layer,), False), saved_activations(model, layer, running))
        for kind, layer in layer_kinds(model).items()
        if not kind.predicts
    }
    return Parts(
        part(StageSpec(True, (), False), embedding_bytes(model, running)),
        tuple(kinds[layer_kind(model, layer)] for layer in range(last)),
        tuple(
            part(StageSpec(False, (), False, 1), saved_activations(model, last + i, running))
            for i in range(model.mtp_num_layers)
        ),
        part(StageSpec(False, (), True), loss_bytes(model, running)),
    )


def stated_parts(
    kinds: Sequence[str],
    num_predictions: int,
    costs: Mapping[str, float],
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Parts:
    """Pieces whose costs are stated by kind; memory is the number of layers.

    Args:
        kinds: "dense" or "moe", of each layer.
        num_predictions: layers of multi-token prediction.
        costs: costs of `KINDS`, those that differ from one layer (nothing for embedding and head).
        times: F, dX and dW of a piece whose cost is 1.
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
    """Pieces of which those of a kind are alike.

    Args:
        kinds: "dense" or "moe", of each layer.
        num_predictions: layers of multi-token prediction.
        pieces: one of each of `KINDS` that there are.
    """
    return Parts(
        pieces["embedding"],
        tuple(pieces[kind] for kind in kinds),
        (pieces["mtp"],) * num_predictions if num_predictions else (),
        pieces["head"],
    )


def read_costs(text: str) -> dict[str, float]:
    """'dense=0.55,mtp=1.8' as a mapping.

    Raises:
        ConfigError: every piece of it that is not such a cost.
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
