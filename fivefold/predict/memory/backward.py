"""The points of a stage's backward at which memory may peak; sizes are bytes on one device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from fivefold.config.training import ELEMENT_BYTES
from fivefold.counts.blocks import GatheredBlock
from fivefold.description.activations import loss_bytes, loss_gradient_bytes, total
from fivefold.predict.memory.points import ActPoint, gathers
from fivefold.predict.memory.route import Route
from fivefold.predict.memory.sizes import recomputed_at_once
from fivefold.predict.memory.stage_backward import Change, StageBackward


def backward_points(
    route: Route, *, first: bool, last: bool, deferred: bool
) -> tuple[ActPoint, ...]:
    """The points of a backward at which memory may peak.

    `first`, `last`: whether it is the first or the last of a step that makes the stage's weight
    gradients; the last reduces them, if not each does. `deferred`: those at which weight gradients
    are made that were deferred.
    """
    layout, policy = route.layout, route.policy
    hidden = policy.splits_gradient or layout.config.parallel.overlap_grad_reduce
    reduces = policy.reduces and (policy.splits_gradient or last)
    passage = StageBackward(layout, policy, reduces and hidden, first, last, deferred)
    points = list(_Walk(route, passage).points())
    if reduces and not hidden:
        points += _Walk(route, replace(passage, reduces=True)).at_end()
    return tuple(points) or (ActPoint("backward"),)


@dataclass(frozen=True)
class _NewGradients:
    """Bytes of new gradients of a stage's weights, some of which wait for others.

    Attributes:
        route: what a backward meets in the stage.
        passage: what becomes of gradients.
    """

    route: Route
    passage: StageBackward

    @cached_property
    def of_head(self) -> float:
        """Bytes of the output layer's new gradient."""
        route = self.route
        if self.passage.deferred and route.head_with_loss[0]:
            return 0.0  # it exists already
        fused = route.running.memory.recomputes_logits
        fresh = route.policy.fresh if fused else self.passage.fresh
        return route.stage.head * route.vocabulary * fresh

    @property
    def fresh(self) -> float:
        """Bytes of a new gradient of a linear layer within a stage."""
        return 0.0 if self.route.policy.placeholder else self.passage.fresh

    @property
    def waiting(self) -> float:
        """Bytes of this gradient that are kept whole until the ends of the stage are reduced; that
        of a tied embedding until its other gradient exists."""
        if self.passage.deferred:
            return 0.0
        if self.route.policy.reduces:
            return self.of_head
        return self.route.vocabulary * self.passage.tied(self.route.stage)

    @property
    def of_embedding(self) -> float:
        """Bytes of the embedding's new gradient. To a sum, or to the gradient of an output layer
        that is the same weight, rows are added as they are if it is as wide as fp32."""
        route, policy, fresh = self.route, self.route.policy, self.passage.fresh
        split = route.layout.grid.tp if policy.whole_embedding else 1
        summed = self.passage.tied(route.stage) if fresh else policy.gradient
        if summed:
            fresh = summed * (summed < ELEMENT_BYTES["fp32"])
        return route.vocabulary * split * fresh

    def looked_up(self, place: int) -> float:
        """Bytes of the embedding's that predictions behind a layer of the stage have made: it
        waits, whole, until the ends are reduced. That of a tied table is added to the head's."""
        route, passage = self.route, self.passage
        model = route.layout.config.model
        apart = model.untie_embeddings_and_output_weights and not passage.deferred
        if not (apart and route.policy.reduces and place < max(route.predictions, default=-1)):
            return 0.0
        return route.vocabulary * passage.fresh


@dataclass(frozen=True)
class _Reductions:
    """The points at which gradients of a stage's blocks are all there, and are reduced.

    Attributes:
        route: what a backward meets in the stage.
        passage: what becomes of gradients and of copies of weights; where it only makes weight
            gradients, those of an output layer come first.
    """

    route: Route
    passage: StageBackward

    @cached_property
    def _new(self) -> _NewGradients:
        return _NewGradients(self.route, self.passage)

    def at_end(self) -> Iterator[ActPoint]:
        """The point at which the last layer is reduced, when all backwards have ended."""
        route = self.route
        if route.numbers:
            point = ActPoint("the reductions", -sum(route.kept), route.gone, done=True)
            own = next(part for parts in reversed(route.parts) for part in parts if part.size)
            yield self._ended(point, self.passage.end_of(own), route.copies.but(), -1)

    def _end_of(self, place: int, point: ActPoint) -> Iterator[ActPoint]:
        """The end of a layer's experts, and its own, after that of all behind it.

        `point`: that within the last layer.
        """
        route = self.route
        copies, behind = route.copies_at(place), sum(route.kept[place + 1 :])
        over, read = len(route.numbers) - place - 1, sum(route.read[place + 1 :])
        name = ("the last layer", "the layer before the last", "the largest layer")[min(over, 2)]
        experts, rest = route.parts[place]
        done = route.behind(place)
        if experts.size and (inner := route.in_experts(place)):
            inside = inner._replace(
                where=f"the experts of {name}",
                activations=inner.activations - behind,
                over=over,
                read=read + inner.read,
            )
            gathered, rows = copies.but("ends", "rest"), route.with_rows(place, inside)
            yield from self._reducing(inside, place, experts, done, gathered, rows)
            done = (*done, experts)
        end = point._replace(
            where=f"the end of {name}",
            recomputed=0.0,
            working=0.0,
            activations=-behind - route.kept[place],
            over=over + 1,
            read=read + route.read[place],
        )
        yield from self._reducing(end, place, rest, done, copies.but("ends"))

    def _reducing(
        self,
        point: ActPoint,
        place: int,
        block: GatheredBlock,
        done: tuple[GatheredBlock, ...],
        gathered: float,
        *before: ActPoint,
    ) -> Iterator[ActPoint]:
        """Where all gradients of a block of a layer are there, after those of `done`, whose last
        one's message is not yet free, nor are its own copies; and where they are reduced.

        `gathered`: what is gathered besides both that and what is beside the layer; `before`: other
        points at which they are there and not yet reduced.
        """
        passage, copies = self.passage, self.route.copies_at(place)
        gathered += copies.beside
        if passage.reduces and done:
            change = passage.after(done[-1], *done)
            change = change._replace(gradients=change.gradients + block.size * passage.fresh)
            own = block.copied(passage.policy) if copies.most else 0.0
            for each in (point, *before):
                yield self._ended(each, change, gathered + own, place)
        yield self._ended(point, passage.end_of(block, *done), gathered, place)

    def _ends(self) -> Iterator[ActPoint]:
        """The points at the embedding, beside the last message of the layers, and at the ends of
        the stage."""
        route = self.route
        ends, *blocks = route.blocks
        over = ActPoint("the embedding", -sum(route.kept), route.gone, done=True)
        over = over._replace(communication=route.messages[0], read=sum(route.read))
        if route.stage.embedding:
            table = self._new.of_embedding
            after = Change(0.0, 0.0, 0.0)
            if blocks:
                after = self.passage.after(route.parts[0][1], *blocks)
            made = after._replace(gradients=after.gradients + table)
            yield self._ended(over, made, route.copies.but("ends"), -1)
        if route.policy.sent and self.passage.last:
            sent = sum(block.count * block.size for block in route.blocks) * route.policy.sent
            yield over._replace(where="the messages", gradients=sent)
        if route.policy.reduces and ends.size:
            alone = self.passage.deferred and not route.stage.embedding
            end = self.passage.end_of(ends, *(() if alone else blocks))
            own = over._replace(where="the ends of the stage", **end._asdict())
            yield own._replace(resharded=end.resharded + route.copies.but())

    def _ended(self, point: ActPoint, change: Change, gathered: float, place: int) -> ActPoint:
        """The point after a change, with this many gathered bytes fewer, in the layer at a place
        of the stage; -1: before all layers."""
        gradients, made, resharded = change
        gradients += self._new.waiting + self._new.looked_up(place)
        resharded += gathered
        return point._replace(gradients=gradients, made=made, resharded=resharded)


@dataclass(frozen=True)
class _Walk(_Reductions):
    """The points of a backward at which memory may peak, in order."""

    def points(self) -> Iterator[ActPoint]:
        """The points at which memory may peak.

        At the loss and the output layer, whose weight gradient is large while nothing is freed yet;
        in the layers; and at the embedding and the ends of the stage, when all else is gone.
        """
        route = self.route
        if route.stage.head:
            yield from _at_head(route, self._new.of_head)
        if route.policy.splits_copy and not self.passage.deferred:
            yield from self._gathers(len(route.numbers) - 1, ActPoint(""))
        if route.numbers:
            yield from self._in_layers()
        yield from self._ends()
        if route.policy.fresh_at_once:
            own = sum(block.count * block.size for block in route.blocks)
            # The loss's part stands for the logits and their gradient, which others refer to.
            fresh = own * route.policy.fresh
            yield ActPoint("the end of one graph", -sum(route.kept), gradients=fresh)

    def _in_layers(self) -> Iterator[ActPoint]:
        """In the last layer, where a gated MLP's gradients and weight gradient meet; at the end of
        its experts and at its own, where all their weight gradients are there; in the layer before,
        beside their message; and at the end of the largest, when all others are done."""
        route, passage = self.route, self.passage
        last = len(route.numbers) - 1
        sizes = (route.inward, route.outward)
        point, activated = (
            each._replace(gradients=self._new.waiting + size * self._new.fresh)
            for each, size in zip(route.last_layer, sizes, strict=True)
        )
        yield from (point, activated)
        if route.reruns_experts(-1):
            again = ActPoint("the experts of the last layer, run again", loss=point.loss)
            recomputed = route.tokens * recomputed_at_once(route.running, route.layers)
            again = again._replace(recomputed=recomputed, communication=route.messages[3])
            yield again._replace(gradients=self._new.waiting, resharded=point.resharded)
        for place, inside in route.states:
            own, experts = route.own_until_states(place), route.parts[place][0]
            apart = (experts,) if experts.size else ()
            change = _behind(route, passage, place, inside, own, *apart)
            gathered = route.copies_at(place).but("ends", "rest", "beside")
            yield self._ended(inside, change, gathered, place)
        for place, inside in route.other_mixers:
            change = _behind(route, passage, place, inside, sum(p.size for p in route.parts[place]))
            yield self._ended(inside, change, inside.resharded, place)
        for place, inside in route.other_tiles:
            change = _behind(route, passage, place, inside, 0.0)
            yield self._ended(inside, change, inside.resharded, place)
        if last:
            inside, size = route.first_layer
            fresh = self._new.waiting + size * self._new.fresh
            yield self._in_first(inside._replace(gradients=fresh))
            if route.policy.splits_copy:
                yield from self._at_first()
        if not route.policy.reduces:
            anew = passage.first and route.policy.frees_experts
            for place in route.largest if anew else ():
                yield from self._end_of(place, point)
            return
        yield from self._end_of(last, point)
        if passage.reduces and last:
            # What was copied into the message is free.
            *_, sent = done = route.parts[last]
            after = passage.after(sent, *done)
            for each in (point, activated):
                activations = each.activations - route.kept[last]
                where = "the layer before the last"
                read = each.read + route.read[last]
                beside = each._replace(where=where, activations=activations, over=1, read=read)
                gradients = after.gradients + each.gradients - self._new.waiting
                change = after._replace(gradients=gradients)
                gathered = route.copies_at(last - 1).but("ends", "experts", "rest", "beside")
                yield self._ended(beside, change, gathered, last - 1)
        if passage.reduces or passage.anew:
            for place in route.largest - {last}:
                yield from self._end_of(place, point)

    def _in_first(self, point: ActPoint) -> ActPoint:
        """Such a point of the last layer in the first one, which is taken to be like it, but that
        no other is gathered beside it."""
        change = self._of_others
        change = change._replace(gradients=change.gradients + point.gradients - self._new.waiting)
        gathered = self.route.copies_at(0).but("ends", "experts", "rest")
        return self._ended(self._moved(point), change, gathered, 0)

    def _at_first(self) -> Iterator[ActPoint]:
        """Where the first layer is gathered again, when all others are done."""
        for point in self._gathers(0, ActPoint("", loss=self.route.gone)):
            yield self._ended(self._moved(point), self._of_others, point.resharded, 0)

    @cached_property
    def _of_others(self) -> Change:
        """The change when all layers but the first are done."""
        return self.passage.after(self.route.parts[1][1], *self.route.other_than(0))

    def _moved(self, point: ActPoint) -> ActPoint:
        """A point of the last layer in the first one, when all others are done."""
        route = self.route
        return point._replace(
            where=point.where.replace("last", "first"),
            activations=point.activations - sum(route.kept[1:]),
            over=len(route.numbers) - 1,
            read=point.read + sum(route.read[1:]),
        )

    def _gathers(self, place: int, start: ActPoint) -> Iterator[ActPoint]:
        """Where a layer is gathered, its experts when they are about to run again."""
        route = self.route
        again = route.before_experts(place) if route.numbers else 0.0
        start = start._replace(communication=route.messages[0], recomputed=again)
        return gathers(route.copies_at(place), start)


def _at_head(route: Route, of_head: float) -> Iterator[ActPoint]:
    """The loss, and the output layer, whose new gradient has `of_head` bytes.

    A loss in the compute dtype is done with its log-softmax and that one's gradient before the
    output layer makes any, and Fivefold's with all but the gradient of the logits.
    """
    model, running, tokens = route.layout.config.model, route.running, route.tokens
    loss = loss_bytes(model, running)
    fused = running.memory.recomputes_logits
    dx = running.element_bytes * model.hidden_size * (2 if running.sequence_parallel else 1)
    if fused:  # the gradient summed over slices of the vocabulary
        dx += max(running.element_bytes, 4) * model.hidden_size
    busy, dx = tokens * total(loss).recomputed, tokens * dx
    gathered, messages = route.copies.but("ends", "rest"), route.messages[0]
    alone = ActPoint("the loss", working=busy, communication=messages, resharded=gathered)
    head = alone._replace(where="the output layer", gradients=of_head)
    if running.narrow_loss:
        half = tokens * loss["logits"].recomputed / 2
        yield alone
        yield head._replace(working=busy + dx - half, loss=-half)
    elif running.others or fused:
        yield head._replace(working=busy + dx)
    else:
        yield alone._replace(working=tokens * loss_gradient_bytes(model, running))
        yield head._replace(working=dx)


def _behind(
    route: Route,
    passage: StageBackward,
    place: int,
    point: ActPoint,
    own: float,
    *done: GatheredBlock,
) -> Change:
    """The change when all layers behind this one are done, and of this one the blocks `done` and
    `own` further elements.

    FSDP2 keeps new gradients until it has all of a block's; others are added up one by one.
    """
    done = (*route.behind(place), *done)
    change = passage.after(done[-1], *done) if done else Change(0.0, 0.0, 0.0)
    policy, fresh, made = route.policy, 0.0, change.made
    if not policy.splits_optimizer:
        made += own * (policy.gradient * passage.anew + passage.sent)
    elif not policy.placeholder:
        fresh = own * passage.fresh
    return change._replace(gradients=point.gradients + change.gradients + fresh, made=made)
