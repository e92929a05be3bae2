"""The points of a stage's backward at which memory may peak; sizes are bytes on one device."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from fivefold.counts.blocks import GatheredBlock, layer_block, stage_blocks
from fivefold.counts.policy import StatePolicy
from fivefold.layout import Layout
from fivefold.model.activations import (
    Saved,
    loss_bytes,
    loss_gradient_bytes,
    saved_activations,
    total,
)
from fivefold.model.description import Layer, describe, layer_kind
from fivefold.model.expert_operations import ExpertsIn
from fivefold.model.operations import Activation, Operation
from fivefold.model.running import Running
from fivefold.model.shape import StageParts
from fivefold.predict.passage import Change, Copies, Passage, all_layers
from fivefold.predict.points import (
    ActPoint,
    buffers,
    deferred_bytes,
    first_linear,
    gathers,
    last_linears,
    remade_at_once,
    tiled_sums,
)


def points_of_step(
    layout: Layout,
    stage: StageParts,
    running: Running,
    policy: StatePolicy,
    layers: list[Saved],
    *,
    deferred: bool = False,
) -> Iterator[tuple[tuple[bool, bool], list[ActPoint]]]:
    """The points of a backward at which memory may peak, for each place that it has in a step.

    That is whether it is the first and whether it is the last that makes the stage's weight
    gradients; the last reduces them, if not each does. `deferred`: those at which weight gradients
    are made that were deferred.
    """
    hidden = policy.splits_gradient or layout.config.parallel.overlap_grad_reduce
    for first, last in product((False, True), repeat=2):
        reduces = policy.reduces and (policy.splits_gradient or last)
        passage = Passage(layout, policy, reduces and hidden, first and policy.remade, last)
        points = list(_Walk(passage, stage, running, tuple(layers), deferred).points())
        if reduces and not hidden:
            after = replace(passage, reduces=True)
            points += _Walk(after, stage, running, tuple(layers), deferred).at_end()
        yield (first, last), points or [ActPoint("backward")]


@dataclass(frozen=True)
class _Route:
    """What a backward meets in a stage.

    Attributes:
        passage: what becomes of gradients and of copies of weights.
        stage: the stage.
        running: how its layers run.
        layers: bytes per token of each of them.
        deferred: whether it only makes weight gradients, those of an output layer first.
    """

    passage: Passage
    stage: StageParts
    running: Running
    layers: tuple[Saved, ...]
    deferred: bool

    @property
    def _layout(self) -> Layout:
        return self.passage.layout

    @property
    def _policy(self) -> StatePolicy:
        return self.passage.policy

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        return all_layers(self._layout, self.stage)

    @cached_property
    def _tokens(self) -> float:
        """Tokens of a microbatch on this rank."""
        training = self._layout.config.training
        return training.micro_batch_size * training.seq_length / self._layout.grid.cp

    @cached_property
    def _kept(self) -> list[float]:
        """Bytes of activations of each layer."""
        return [self._tokens * layer.kept for layer in self.layers]

    @cached_property
    def _gone(self) -> float:
        """Bytes of the loss, negative."""
        loss = loss_bytes(self._layout.config.model, self.running) if self.stage.head else {}
        return -self._tokens * total(loss).kept

    @cached_property
    def _messages(self) -> tuple[float, float]:
        """Bytes of messages between stages, and the same with those of a layer."""
        return buffers(self._layout, self.stage, self.running)

    @cached_property
    def _vocabulary(self) -> float:
        """Trained elements of the output layer, or of an embedding that ranks split."""
        model = self._layout.config.model
        entries = model.padded_vocab_size / self._layout.grid.tp
        return model.trains_all * entries * model.hidden_size

    @cached_property
    def _of_head(self) -> float:
        """Bytes of the output layer's new gradient."""
        fused = self.running.memory.makes_logits_again
        fresh = self._policy.fresh if fused else self.passage.fresh
        return self.stage.head * self._vocabulary * fresh

    @property
    def _fresh(self) -> float:
        """Bytes of a new gradient of a linear layer within a stage."""
        return 0.0 if self._policy.placeholder else self.passage.fresh

    @property
    def _waiting(self) -> float:
        """Bytes of it that wait, whole, until the ends of the stage are reduced."""
        return 0.0 if self.deferred or not self._policy.reduces else self._of_head

    @cached_property
    def _blocks(self) -> tuple[GatheredBlock, ...]:
        """What is trained: the ends of the stage, then its layers, each kind with their number."""
        whole = self._policy.whole_embedding
        return stage_blocks(self._layout, self.stage, trained=True, whole_embedding=whole)

    @cached_property
    def _copies(self) -> Copies:
        return Copies.of(self._layout, self.stage, self._policy)

    def _parts(self, place: int) -> tuple[GatheredBlock, GatheredBlock]:
        """The experts of a layer of the stage, and the rest of it, as far as they are trained."""
        return layer_block(self._layout, self._numbers[place], trained=True).parts(self._policy)

    def _described(self, place: int) -> Layer:
        model = self._layout.config.model
        return describe(model, layer_kind(model, self._numbers[place]))

    def _freed(self, place: int, operations: Iterable[Operation]) -> float:
        """Bytes that a layer of the stage has kept, or has back, for these operations."""
        model, number = self._layout.config.model, self._numbers[place]
        position = place if number < model.num_layers else 0
        saved = saved_activations(model, number, self.running, position=position)
        names = {item.name for op in operations for item in op.kept(self.running)}
        items = (item for name, item in saved.items() if name in names)
        return self._tokens * sum(item.kept + item.remade + item.offloaded for item in items)


class _Walk(_Route):
    """The points on a backward's way at which memory may peak."""

    def points(self) -> Iterator[ActPoint]:
        """The points at which memory may peak.

        At the loss and the output layer, whose weight gradient is large while nothing is freed yet;
        in the layers; and at the embedding and the ends of the stage, when all else is gone.
        """
        if self.stage.head:
            yield from self._head()
        if self._policy.splits_copy and not self.deferred:
            yield from gathers(self._copies, ActPoint("", communication=self._messages[0]))
        if self._numbers:
            yield from self._in_layers()
        yield from self._ends()
        if self._policy.fresh_at_once:
            own = sum(block.count * block.size for block in self._blocks)
            # The loss's part stands for the logits and their gradient, which others refer to.
            fresh = own * self._policy.fresh
            yield ActPoint("the end of one graph", -sum(self._kept), gradients=fresh)

    def at_end(self) -> Iterator[ActPoint]:
        """The point at which the last layer is reduced, when all backwards have ended."""
        if self._numbers:
            point = ActPoint("the reductions", -sum(self._kept), self._gone, done=True)
            own = next(part for part in self._parts(-1) if part.size)
            yield self._ended(point, self.passage.end_of(own), self._copies.but())

    def _head(self) -> Iterator[ActPoint]:
        """The loss, and the output layer.

        A loss in the compute dtype is done with its log-softmax and that one's gradient before the
        output layer makes any, and Fivefold's with all but the gradient of the logits.
        """
        model, running, tokens = self._layout.config.model, self.running, self._tokens
        loss = loss_bytes(model, running)
        fused = running.memory.makes_logits_again
        dx = running.element_bytes * model.hidden_size * (2 if running.sequence_parallel else 1)
        if fused:  # its sum over slices of the vocabulary
            dx += max(running.element_bytes, 4) * model.hidden_size
        busy, dx = tokens * total(loss).remade, tokens * dx
        gathered, messages = self._copies.but("ends", "rest"), self._messages[0]
        alone = ActPoint("the loss", working=busy, communication=messages, resharded=gathered)
        head = replace(alone, where="the output layer", gradients=self._of_head)
        if running.narrow_loss:
            half = tokens * loss["logits"].remade / 2
            yield alone
            yield replace(head, working=busy + dx - half, loss=-half)
        elif running.others or fused:
            yield replace(head, working=busy + dx)
        else:
            yield replace(alone, working=tokens * loss_gradient_bytes(model, running))
            yield replace(head, working=dx)

    def _in_layers(self) -> Iterator[ActPoint]:
        """In the last layer, where a gated MLP's gradients and weight gradient meet; at the end of
        its experts and at its own, where all their weight gradients are there; in the layer before,
        beside their message; and at the end of the largest, when all others are done."""
        layout, passage, policy = self._layout, self.passage, self._policy
        running, last = self.running, len(self._numbers) - 1
        layer = self._described(last)
        working = self._tokens * layer.mlp_input.working(running)
        working *= running.share_at_once(layer.mlp_input.rerun_by)
        point = ActPoint(
            "the last layer",
            activations=-self._freed(last, layer.after_mlp_input),
            loss=self._gone,
            remade=self._tokens * remade_at_once(running, self.layers),
            working=working + tiled_sums(layout, layer, running),
            gradients=self._waiting + first_linear(layout, layer) * self._fresh,
            communication=self._messages[1],
            resharded=self._copies.but("ends", "experts", "rest", "beside"),
        )
        activated = self._activation(point, layer)
        yield from (point, activated)
        if last:
            yield self._in_first(activated)
        if not policy.reduces:
            return
        yield from self._end_of(last, point)
        if passage.reduces and last:
            # What was copied into the message is free.
            *_, sent = done = self._parts(last)
            after = passage.after(sent, *done)
            for each in (point, activated):
                activations = each.activations - self._kept[last]
                where = "the layer before the last"
                beside = replace(each, where=where, activations=activations, over=1)
                gradients = after.gradients + each.gradients - self._waiting
                yield self._ended(beside, after._replace(gradients=gradients), point.resharded)
        sizes = [max(part.size for part in self._parts(place)) for place in range(last + 1)]
        largest = sizes.index(max(sizes))
        if largest < last and (passage.reduces or passage.first):
            own = layer_block(layout, self._numbers[largest], trained=True)
            yield from self._end_of(largest, point, *self._blocks[1:], replace(own, count=-1))

    def _activation(self, point: ActPoint, layer: Layer) -> ActPoint:
        """Where the activation of the last layer has made the gradients of its inputs."""
        running = self.running
        after = layer.after_mlp_input
        place = next(n for n, each in enumerate(after) if isinstance(each, Activation))
        activation = after[place]
        assert isinstance(activation, Activation)
        around = running.element_bytes * layer.mlp_input.inputs / running.token_parts
        inner = activation.working(running) * running.share_at_once(layer.mlp_input.rerun_by)
        return replace(
            point,
            where="the activation of the last layer",
            activations=-self._freed(len(self._numbers) - 1, after[place + 1 :]),
            working=self._tokens * (around + inner),
            gradients=self._waiting + last_linears(self._layout, layer) * self._fresh,
        )

    def _in_first(self, point: ActPoint) -> ActPoint:
        """Such a point of the last layer in the first one, which is taken to be like it."""
        change = Change(point.gradients - self._waiting, 0.0, 0.0)
        if self._policy.reduces:
            own = replace(layer_block(self._layout, self._numbers[0], trained=True), count=-1)
            change = self.passage.after(self._parts(1)[1], *self._blocks[1:], own)
            change = change._replace(gradients=change.gradients + point.gradients - self._waiting)
        where = point.where.replace("last", "first")
        activations, over = point.activations - sum(self._kept[1:]), len(self._numbers) - 1
        first = replace(point, where=where, activations=activations, over=over)
        return self._ended(first, change, point.resharded)

    def _end_of(self, place: int, point: ActPoint, *done: GatheredBlock) -> Iterator[ActPoint]:
        """The end of a layer's experts, and its own, after that of all behind it and of `done`.

        `point`: that within the last layer.
        """
        passage, layer = self.passage, self._described(place)
        name = "the last layer" if place == len(self._numbers) - 1 else "the largest layer"
        before, behind = ("beside",) if place else (), sum(self._kept[place + 1 :])
        point = replace(point, working=0.0, over=len(self._numbers) - place - 1)
        experts, rest = self._parts(place)
        if experts.size and isinstance(layer.mlp_input, ExpertsIn):
            inner = self._freed(place, (*layer.after_mlp_input, *layer.mlp_inputs))
            activations = -behind - inner
            inside = replace(point, where=f"the experts of {name}", activations=activations)
            share = deferred_bytes(layer.mlp, self.running)
            share /= deferred_bytes(layer.operations, self.running) or 1.0
            rows = self._tokens * layer.mlp_input.of_rows(self.running)
            inside = replace(inside, working=rows, over=point.over + share)
            gathered = self._copies.but("ends", "rest", *before)
            yield self._ended(inside, passage.end_of(experts, *done), gathered)
            done = (*done, experts)
        activations = -behind - self._kept[place]
        over = replace(point, where=f"the end of {name}", remade=0.0, activations=activations)
        over = replace(over, over=point.over + 1)
        yield self._ended(over, passage.end_of(rest, *done), self._copies.but("ends", *before))

    def _ends(self) -> Iterator[ActPoint]:
        """The embedding, beside the last message of the layers, and the ends of the stage."""
        ends, *blocks = self._blocks
        over = ActPoint("the embedding", -sum(self._kept), self._gone, done=True)
        over = replace(over, communication=self._messages[0])
        if self.stage.embedding:
            split = self._layout.grid.tp if self._policy.whole_embedding else 1
            table = self._vocabulary * split * self._policy.fresh
            after = Change(0.0, 0.0, 0.0)
            if blocks and self._policy.reduces:
                after = self.passage.after(self._parts(0)[1], *blocks)
            made = after._replace(gradients=after.gradients + table)
            yield self._ended(over, made, self._copies.but("ends"))
        if self._policy.reduces and ends.size:
            alone = self.deferred and not self.stage.embedding
            end = self.passage.end_of(ends, *(() if alone else blocks))
            own = replace(over, where="the ends of the stage", **end._asdict())
            yield replace(own, resharded=end.resharded + self._copies.but())

    def _ended(self, point: ActPoint, change: Change, gathered: float) -> ActPoint:
        """A point with what has changed, and so much less gathered."""
        gradients, made, resharded = change
        gradients, resharded = gradients + self._waiting, resharded + gathered
        return replace(point, gradients=gradients, made=made, resharded=resharded)
