"""The layers of a stage as a backward passes them; sizes are bytes on one device."""

from collections.abc import Callable, Iterable
from functools import cache, cached_property

from fivefold.description.activations import saved_activations, total
from fivefold.description.experts import ExpertsIn
from fivefold.description.kinds import LayerKind
from fivefold.description.linear_attention import Recurrence
from fivefold.description.operations import Activation, CoreAttention, Operation
from fivefold.description.running import share_at_once
from fivefold.description.sparse import SparseAttention
from fivefold.predict.memory.points import ActPoint
from fivefold.predict.memory.sizes import (
    deferred_bytes,
    first_linear,
    last_linears,
    recomputed_at_once,
    tiled_weights,
    trained_by,
)
from fivefold.predict.memory.stage_sizes import StageSizes

_INSIDE = Activation | CoreAttention | Recurrence


class Route(StageSizes):
    """Points within the layers of a stage that a backward passes."""

    @cached_property
    def last_layer(self) -> tuple[ActPoint, ActPoint]:
        """Within the last layer: where a gated MLP's gradients meet the first of its new weight
        gradients, and where its activation has made the gradients of its inputs.

        Both without new weight gradients, which are of `inward` and of `outward`. Where the layer
        has no MLP they are of its mixer: where it is projected into, and where its tokens meet.
        """
        return self._in_layer(len(self.numbers) - 1)

    def _start(self, place: int) -> ActPoint:
        """The beginning of a layer's backward, as if the last, without what is recomputed."""
        gathered = self.copies_at(place).but("ends", "experts", "rest", "beside")
        return ActPoint("the last layer", loss=self.gone, resharded=gathered)

    def _messages_of(self, kind: LayerKind) -> float:
        """Bytes of messages in the backward of a layer of a kind."""
        if kind.mixer is None or kind.experts:
            return self.messages[2]
        return self.messages[1 if kind.softmax else 0]

    def own_until_states(self, place: int) -> float:
        """Trained elements behind a layer's states whose gradients wait there for the others of
        their block: without those of experts that are reduced apart."""
        ((at, _),) = self._making_again(place)
        behind, apart = self.described(place).operations[at + 1 :], self.policy.experts_apart
        return sum(
            trained_by(self.layout, operation)
            for operation in behind
            if not (apart and any(weight.of_experts for weight in operation.weights))
        )

    def _recomputed(self, place: int) -> float:
        """Bytes recomputed at a time in a layer's backward: the maximum over layers, unless layers
        have one mixer each."""
        alike = self.described(place).kind.mixer is None
        return self.tokens * recomputed_at_once(self.running, self.layers, None if alike else place)

    def _in_layer(self, place: int) -> tuple[ActPoint, ActPoint]:
        """The same points in any layer, as if it were the last."""
        running, layer = self.running_of(place), self.described(place)
        inputs, after = layer.last_input, layer.after_last_input
        at, inside = next((n, op) for n, op in enumerate(after) if isinstance(op, _INSIDE))
        share = share_at_once(running, inputs.rerun_by)
        working = self.tokens * inputs.working(running) * share
        tiled = self._tiled(place)
        sums = max(running.element_bytes, 4) * sum(tiled)
        if tiled:  # gradients of a tile are added when all are made, and a whole sum is narrowed
            of_tile = running.element_bytes * sum(tiled)
            working = sums + of_tile + max(working, running.element_bytes * tiled[-1])
        start = self._start(place)._replace(
            working=working,
            recomputed=self._recomputed(place),
            communication=self._messages_of(layer.kind),
        )
        around = running.element_bytes * inputs.inputs / running.token_parts
        inner = start._replace(
            where="the activation of the last layer" if layer.kind.mlp else "the last mixer",
            working=sums + self.tokens * (around + inside.working(running) * share),
        )
        return self._without(start, place, after), self._without(inner, place, after[at + 1 :])

    @cached_property
    def first_layer(self) -> tuple[ActPoint, float]:
        """The latter point in the first layer, as if it were the last, and the trained elements
        behind it: as in the last one, unless layers have one mixer each."""
        layer = self.described(0)
        if layer.kind.mixer is None:
            return self.last_layer[1], self.outward
        return self._in_layer(0)[1], last_linears(self.layout, layer)

    @cached_property
    def other_mixers(self) -> tuple[tuple[int, ActPoint], ...]:
        """Where layers have one mixer each: the place of the last layer of each kind but that of
        the last layer, and the former point in it."""
        last = {self.described(n).kind: n for n in range(len(self.numbers))}
        del last[self.described(-1).kind]
        return tuple(
            (place, self._behind(place, self._in_layer(place)[0], f"the last layer of {kind.name}"))
            for kind, place in last.items()
            if kind.mixer is not None
        )

    def _tiled(self, place: int) -> list[int]:
        return tiled_weights(self.layout, self.described(place), self.running_of(place))

    @cached_property
    def other_tiles(self) -> tuple[tuple[int, ActPoint], ...]:
        """Where the last layer's MLP does not run in tiles: the place of the last layer of which
        one does, and the former point in it."""
        every = range(len(self.numbers) - 1, -1, -1)
        tiled = [n for n in every if self._tiled(n)][:1]
        where = "the last layer with tiles"
        return tuple(
            (n, self._behind(n, self._in_layer(n)[0], where)) for n in tiled if n < every[0]
        )

    @property
    def reruns_experts(self) -> bool:
        """Whether a backward runs the last layer's experts again, with their messages."""
        memory = self.running.memory
        again = {"moe", "routed_experts"} & {*memory.recomputed_modules}
        again_as_whole = memory.recompute_granularity == "full"
        return self.described(-1).kind.experts and bool(again or again_as_whole)

    @cached_property
    def inward(self) -> float:
        """Trained elements of a projection into the inner features of the last layer's MLP; those
        of tiles are counted with their sums."""
        return 0.0 if self._tiled(-1) else first_linear(self.layout, self.described(-1))

    @cached_property
    def outward(self) -> float:
        """Trained elements of the projections out of them."""
        return last_linears(self.layout, self.described(-1))

    @cached_property
    def in_experts(self) -> Callable[[int], ActPoint | None]:
        """Of a layer of the stage: the end of its experts, as if it were the last; None if it has
        none."""
        return cache(self._in_experts)

    def _in_experts(self, place: int) -> ActPoint | None:
        running, layer = self.running_of(place), self.described(place)
        if not isinstance(layer.last_input, ExpertsIn):
            return None
        point = self.last_layer[0]._replace(
            activations=0.0,
            recomputed=self._recomputed(place),
            working=self.tokens * layer.last_input.of_rows(running),
            communication=self._messages_of(layer.kind),
            read=0.0,
        )
        return self._without(point, place, (*layer.after_last_input, *layer.last_inputs))

    @cached_property
    def states(self) -> tuple[tuple[int, ActPoint], ...]:
        """The places of the last layer with states, or with an indexer, which keeps most, and of
        the first, where most gradients are made; and where their backward makes all again."""
        places = [n for n in range(len(self.numbers)) if self._making_again(n)]
        first, last = places[:1], places[-1:]  # a single place counts as the last
        ends = dict.fromkeys(first, "first") | dict.fromkeys(last, "last")
        what = "an indexer" if self.layout.config.model.is_sparse else "states"
        return tuple(
            (place, self._in_states(place, f"the {end} layer with {what}"))
            for place, end in ends.items()
        )

    def _making_again(self, place: int) -> list[tuple[int, Recurrence | SparseAttention]]:
        """The operation of a layer whose backward recomputes most, with its place; None if there is
        none."""
        operations = self.described(place).operations
        kinds = Recurrence | SparseAttention
        return [(n, op) for n, op in enumerate(operations) if isinstance(op, kinds)]

    def _in_states(self, place: int, where: str) -> ActPoint:
        running, operations = self.running_of(place), self.described(place).operations
        ((at, op),) = self._making_again(place)
        grads = running.element_bytes * self.layout.config.model.hidden_size / running.token_parts
        if isinstance(op, Recurrence):  # of heads and gates, besides the residual stream's
            grads += 2 * running.by_heads(op.sizes.size)
        working = self.tokens * (op.working(running) + grads)
        point = self._start(place)._replace(working=working, communication=self.messages[0])
        again = recomputed_at_once(running, self.layers, place)
        point = point._replace(recomputed=self.tokens * again)
        point = self._without(point, place, operations[at + 1 :])
        return self._behind(place, point, where)

    def _behind(self, place: int, point: ActPoint, where: str) -> ActPoint:
        """A point within a layer, corrected for the layers behind it, which its computation left
        out."""
        return point._replace(
            where=where,
            activations=point.activations - sum(self.kept[place + 1 :]),
            over=len(self.numbers) - place - 1,
            read=point.read + sum(self.read[place + 1 :]),
        )

    def _without(self, point: ActPoint, place: int, operations: Iterable[Operation]) -> ActPoint:
        """A point at which these operations of a layer of the stage are over: what it has kept for
        them, has made again or has back from the host is free, unless it is yet to be read."""
        operations = tuple(operations)
        model, running = self.layout.config.model, self.running_of(place)
        position, number = self._placed[place]
        saved = saved_activations(model, number, running, position=position)
        names = {item.name for op in operations for item in op.kept(running)}
        freed = total(item for name, item in saved.items() if name in names)
        return point._replace(
            activations=point.activations - self.tokens * freed.kept,
            recomputed=point.recomputed - self.tokens * freed.recomputed,
            working=point.working - self.tokens * freed.offloaded,
            read=point.read + self.tokens * deferred_bytes(operations, running),
        )
