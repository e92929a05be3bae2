"""Sizes of a pipeline stage: what it keeps, gathers and sends, in bytes on one device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from fivefold.counts.blocks import GatheredBlock, layer_block, stage_blocks
from fivefold.counts.policy import StatePolicy
from fivefold.description.activations import Saved, loss_bytes, total
from fivefold.description.kinds import LayerKind, layer_kind
from fivefold.description.layers import Layer, describe_layer
from fivefold.description.running import Running
from fivefold.description.shape import StageParts, all_layers, placed_layers
from fivefold.layout import Layout
from fivefold.predict.memory.sizes import (
    buffers,
    deferred_bytes,
    tiled_weights,
)
from fivefold.predict.memory.stage_backward import Copies


@dataclass(frozen=True)
class StageSizes:
    """Sizes that every point of a stage's backward needs.

    Attributes:
        layout: layout of the stage.
        stage: the stage.
        running: how its layers run.
        policy: the framework's policy for model state.
        layers: bytes per token of each of them.
    """

    layout: Layout
    stage: StageParts
    running: Running
    policy: StatePolicy
    layers: tuple[Saved, ...]

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Indices of the stage's layers."""
        return all_layers(self.layout.config.model, self.stage)

    @cached_property
    def _placed(self) -> list[tuple[int, int]]:
        """The stage's layers with their places."""
        return placed_layers(self.layout.config.model, self.stage)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch on this rank."""
        return self.layout.config.rank_tokens

    @cached_property
    def kept(self) -> tuple[float, ...]:
        """Bytes of activations of each layer."""
        return tuple(self.tokens * layer.kept for layer in self.layers)

    @cached_property
    def read(self) -> tuple[float, ...]:
        """Bytes that deferred weight gradients of each layer need."""
        kinds = [layer.kind for layer in self._described]
        each = {
            kind: self.tokens * deferred_bytes(self.described(n).operations, self.running_of(n))
            for kind, n in {kind: n for n, kind in enumerate(kinds)}.items()
        }
        return tuple(each[kind] for kind in kinds)

    @cached_property
    def gone(self) -> float:
        """Bytes (negative) of the loss, which is freed."""
        loss = loss_bytes(self.layout.config.model, self.running) if self.stage.head else {}
        return -self.tokens * total(loss).kept

    @cached_property
    def messages(self) -> tuple[float, ...]:
        """Bytes of messages, as `sizes.buffers` has them."""
        return buffers(self.layout, self.stage, self.running)

    @cached_property
    def vocabulary(self) -> float:
        """Trained elements of the output layer, or of an embedding that ranks split."""
        model = self.layout.config.model
        entries = model.padded_vocab_size / self.layout.grid.tp
        return model.trains_all * entries * model.hidden_size

    @cached_property
    def head_with_loss(self) -> tuple[float, float]:
        """Bytes of the output layer's new gradient, and of its sum, where the loss makes it with
        dX: it waits for the gradients that are deferred, with which it is reduced. Where several
        do, it is the sum that is copied into the message; a single one is narrowed before."""
        waits = self.policy.splits_gradient and self.running.memory.recomputes_logits
        elements = waits * self.stage.head * self.vocabulary
        return elements * self.policy.fresh, elements * self.policy.gradient

    @cached_property
    def tiles_with_dx(self) -> tuple[int, ...]:
        """Trained elements of each layer's MLP in tiles, which makes weight gradients with dX: they
        wait for the layer's deferred ones, with which they are reduced."""
        waits = self.policy.splits_gradient
        return tuple(
            waits * sum(tiled_weights(self.layout, self.described(place), self.running_of(place)))
            for place in range(len(self.numbers))
        )

    @cached_property
    def blocks(self) -> tuple[GatheredBlock, ...]:
        """Trained parameters: the ends of the stage, then each kind of layer with its count."""
        whole = self.policy.whole_embedding
        return stage_blocks(self.layout, self.stage, trained=True, whole_embedding=whole)

    @cached_property
    def copies_at(self) -> Callable[[int], Copies]:
        """Gathered weights in the layer at a place."""
        return cache(partial(Copies.of, self.layout, self.stage, self.policy))

    @property
    def copies(self) -> Copies:
        """Gathered weights in the last layer."""
        return self.copies_at(len(self.numbers) - 1)

    @cached_property
    def parts(self) -> tuple[tuple[GatheredBlock, GatheredBlock], ...]:
        """Trained parameters of each layer's experts, and of the rest of the layer."""
        model = self.layout.config.model
        known: dict[tuple[LayerKind, bool], tuple[GatheredBlock, GatheredBlock]] = {}
        kinds = [(layer_kind(model, n), n < model.num_layers) for n in self.numbers]
        for kind, number in zip(kinds, self.numbers, strict=True):
            if kind not in known:
                known[kind] = layer_block(self.layout, number, trained=True).parts(self.policy)
        return tuple(known[kind] for kind in kinds)

    @cached_property
    def predictions(self) -> tuple[int, ...]:
        """Places of the first layer of each MTP module."""
        model = self.layout.config.model
        starts = (i >= model.num_layers and model.starts_prediction(i) for i in self.numbers)
        return tuple(place for place, is_start in enumerate(starts) if is_start)

    @cached_property
    def largest(self) -> frozenset[int]:
        """Places of layers with the most trained parameters: the first such layer of all, and of
        those before any MTP module; the last such layer between two others; and that with the
        most together with the layer that is gathered beside it."""
        sizes = [max(part.size for part in parts) for parts in self.parts]
        before = sizes[: min(self.predictions, default=0)] or sizes
        first = {each.index(max(each)) for each in (sizes, before)}
        between = range(len(sizes) - 2, 0, -1)
        places = first | {max(between, key=sizes.__getitem__, default=0)}
        if self.policy.splits_copy and len(sizes) > 1:
            both = [
                size + rest.size for size, (_, rest) in zip(sizes[1:], self.parts, strict=False)
            ]
            places.add(1 + both.index(max(both)))
        return frozenset(places)

    @cached_property
    def behind(self) -> Callable[[int], tuple[GatheredBlock, ...]]:
        """Trained parameters of the layers behind one, in the order of a backward."""
        return cache(self._blocks_behind)

    def _blocks_behind(self, place: int) -> tuple[GatheredBlock, ...]:
        numbers = self.numbers[:place:-1]
        blocks = (layer_block(self.layout, number, trained=True) for number in numbers)
        return tuple(part for block in blocks for part in block.parts(self.policy) if part.size)

    def other_than(self, place: int) -> tuple[GatheredBlock, ...]:
        """Trained parameters of all layers but one."""
        own = layer_block(self.layout, self.numbers[place], trained=True)
        return *self.blocks[1:], replace(own, count=-1)

    def running_of(self, place: int) -> Running:
        """How a layer of the stage runs."""
        return self.running.of_kind(self.described(place).kind)

    def described(self, place: int) -> Layer:
        """The operations of a layer of the stage."""
        return self._described[place]

    @cached_property
    def _described(self) -> list[Layer]:
        model = self.layout.config.model
        return [describe_layer(model, number) for number in self.numbers]
