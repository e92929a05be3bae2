"""The parameters of a stage by blocks, which are gathered and reduced together."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from fivefold.config.model import ModelConfig
from fivefold.counts.policy import StatePolicy
from fivefold.description.kinds import layer_kinds
from fivefold.description.shape import (
    EMBEDDING,
    ModelParts,
    StageParts,
    kinds_of,
    sets_of_predictions,
    stage_weights,
)
from fivefold.layout import Layout
from fivefold.model.eight_bit.rules import in_eight_bits


@dataclass(frozen=True)
class GatheredBlock:
    """Parameters that are gathered together; a layer's experts may be a separate block.

    A block is a layer, an MTP module (its layers with norms and projection; all modules
    if they have the same weights), or the ends of the model in a stage.

    Attributes:
        dense: local shapes of parameters on the attention mesh, after tensor parallelism.
        experts: local shapes of parameters on the expert mesh, after expert and tensor parallelism.
        narrow: elements of `dense` and of `experts` that 8-bit linear layers multiply with.
        linears: number of these layers, each expert's counted.
        count: number of such blocks in the stage.
        ends: whether they are the ends of the model.
    """

    dense: tuple[tuple[int, ...], ...]
    experts: tuple[tuple[int, ...], ...]
    narrow: tuple[int, int]
    linears: int
    count: int = 1
    ends: bool = False

    @cached_property
    def matrices(self) -> "GatheredBlock":
        """The block's matrices of layers; none if it is of the ends."""
        dense = [shape for shape in self.dense if len(shape) == 2 and not self.ends]
        experts = [shape for shape in self.experts if len(shape) == 3]
        return replace(self, dense=tuple(dense), experts=tuple(experts))

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Elements of `dense` and of `experts`."""
        return sum(map(prod, self.dense)), sum(map(prod, self.experts))

    @cached_property
    def size(self) -> int:
        """Elements of one block."""
        return sum(self.sizes)

    @property
    def last(self) -> int:
        """Elements of the block's last parameter."""
        return prod([*self.dense, *self.experts][-1]) if self.size else 0

    def converted(self, narrow: float, wide: float) -> float:
        """Most bytes of the block's gradients while they are converted one by one from `narrow` to
        `wide` bytes."""
        most, before = 0.0, 0
        for each in map(prod, (*self.dense, *self.experts)):
            held = wide * (before + each) + narrow * (self.size - before) * (narrow != wide)
            most, before = max(most, held), before + each
        return max(most, narrow * self.size)

    def parts(self, policy: StatePolicy) -> tuple["GatheredBlock", "GatheredBlock"]:
        """The parts of the block that are gathered together, in the order of a backward: experts,
        then the rest."""
        return self._apart if policy.experts_apart else self._together

    @cached_property
    def _apart(self) -> tuple["GatheredBlock", "GatheredBlock"]:
        dense, experts = self.narrow
        apart = replace(self, dense=(), narrow=(0, experts))
        return apart, replace(self, experts=(), narrow=(dense, 0))

    @cached_property
    def _together(self) -> tuple["GatheredBlock", "GatheredBlock"]:
        return replace(self, dense=(), experts=(), narrow=(0, 0)), self

    def made_anew(self, policy: StatePolicy) -> int:
        """Elements of one block whose gradients are freed after each step."""
        if policy.frees_gradients:
            return self.size
        return policy.frees_experts * self.sizes[1]

    def copied(self, policy: StatePolicy) -> float:
        """Bytes of a gathered copy of one block."""
        return self.size * policy.copy - sum(self.narrow) * (policy.copy - policy.narrow_copy)


def stage_blocks(
    layout: Layout, stage: StageParts, *, trained: bool = False, whole_embedding: bool = False
) -> tuple[GatheredBlock, ...]:
    """The blocks of a stage: its ends, then MTP modules, then each kind of layer.

    `trained`: only the parameters that are trained; `whole_embedding`: the token embedding is not
    split by tensor parallelism, unless it is the output layer, too.
    """
    parts = ModelParts(stage.layers, embedding=stage.embedding, head=stage.head, mtp=stage.mtp)
    degrees = (layout.grid.tp, layout.grid.ep, layout.grid.etp)
    return _blocks(layout.config.model, degrees, parts, trained, whole_embedding)


def layer_block(layout: Layout, layer: int, *, trained: bool = False) -> GatheredBlock:
    """The block of one layer; all layers of an MTP module (or of several with shared
    weights) belong to the block of its first layer."""
    model = layout.config.model
    degrees = (layout.grid.tp, layout.grid.ep, layout.grid.etp)
    if layer < model.num_layers:
        return _block(model, degrees, ModelParts((layer,)), trained)
    again = layer - model.num_layers >= model.prediction_sets * model.prediction_size
    if again or not model.starts_prediction(layer):
        return GatheredBlock((), (), (0, 0), 0)
    return _block(model, degrees, ModelParts(mtp=1), trained, only="mtp.0.")


@lru_cache(maxsize=4096)
def _blocks(
    model: ModelConfig,
    degrees: tuple[int, int, int],
    parts: ModelParts,
    trained: bool,
    whole_embedding: bool,
) -> tuple[GatheredBlock, ...]:
    """`stage_blocks`, cached by the few properties of a layout on which they depend."""
    around = replace(parts, layers=())
    whole = EMBEDDING if whole_embedding and model.untie_embeddings_and_output_weights else ""
    ends = _block(model, degrees, around, trained, leaves_out="mtp.", whole=whole)
    predicts = _block(model, degrees, around, trained, only="mtp.0.")
    further = [replace(predicts, count=sets_of_predictions(model, parts))] if parts.mtp else []
    layers = []
    for kind, count in kinds_of(model, parts.layers).items():
        one = ModelParts((layer_kinds(model)[kind],))
        layers.append(replace(_block(model, degrees, one, trained), count=count))
    return (ends, *further, *layers)


@lru_cache(maxsize=1024)
def _block(
    model: ModelConfig,
    degrees: tuple[int, int, int],
    parts: ModelParts,
    trained: bool,
    *,
    only: str = "",
    leaves_out: str | None = None,
    whole: str = "",
) -> GatheredBlock:
    """The block of parameters whose names start with `only` and not with `leaves_out`; `trained`:
    only of those that are trained; `whole`: name of one that no ranks split."""
    tp, ep, etp = degrees
    dense: list[tuple[int, ...]] = []
    experts: list[tuple[int, ...]] = []
    narrow, linears = [0, 0], 0
    for name, weight in stage_weights(model, parts).items():
        if not name.startswith(only) or (leaves_out and name.startswith(leaves_out)):
            continue
        if weight.trained < trained:
            continue
        place = experts if weight.of_experts else dense
        place.append(weight.shape if name == whole else weight.local(tp, ep, etp))
        if in_eight_bits(name, weight):
            narrow[weight.of_experts] += prod(place[-1])
            linears += place[-1][0] if weight.of_experts else 1
    ends = leaves_out is not None
    return GatheredBlock(tuple(dense), tuple(experts), (narrow[0], narrow[1]), linears, ends=ends)
