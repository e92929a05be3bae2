"""Points within a layer of a stage, and where its attention or states need most; sizes are bytes on
one device."""

from collections.abc import Iterable
from functools import cached_property

from fivefold.description.activations import saved_activations, total
from fivefold.description.core_attention import CoreAttention
from fivefold.description.kinds import LayerKind
from fivefold.description.linear_attention import Recurrence
from fivefold.description.operations import Operation
from fivefold.description.sparse import SparseAttention
from fivefold.predict.memory.points import ActPoint
from fivefold.predict.memory.sizes import deferred_bytes, recomputed_at_once, trained_by
from fivefold.predict.memory.stage_sizes import StageSizes


class LayerPoints(StageSizes):
    """What a point within a layer is made of, and the points within mixers."""

    def _start(self, place: int) -> ActPoint:
        """The beginning of a layer's backward, as if the last, without what is recomputed."""
        gathered = self.copies_at(place).but("ends", "experts", "rest", "beside")
        return ActPoint("the last layer", loss=self.gone, resharded=gathered)

    def _messages_in(self, kind: LayerKind) -> float:
        """Bytes of messages in the backward of what comes last in a layer of a kind."""
        if kind.mixer is None or kind.experts:
            return self.messages[0]
        return self.messages[1 if kind.softmax else 0]

    def _recomputed(self, place: int) -> float:
        """Bytes recomputed at a time in a layer's backward: the maximum over layers, unless layers
        have one mixer each."""
        alike = self.described(place).kind.mixer is None
        return self.tokens * recomputed_at_once(self.running, self.layers, None if alike else place)

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

    @cached_property
    def states(self) -> tuple[tuple[int, ActPoint], ...]:
        """The places of the last layer with states, latents or an indexer, which keeps most, and of
        the first, where most gradients are made; and where their backward needs most."""
        places = [n for n in range(len(self.numbers)) if self._making_again(n)]
        first, last = places[:1], places[-1:]  # a single place counts as the last
        ends = dict.fromkeys(first, "first") | dict.fromkeys(last, "last")
        return tuple(
            (place, self._in_states(place, f"the {end} layer with {self._states_of(place)}"))
            for place, end in ends.items()
        )

    def _states_of(self, place: int) -> str:
        ((_, operation),) = self._making_again(place)
        if isinstance(operation, Recurrence):
            return "states"
        return "an indexer" if isinstance(operation, SparseAttention) else "latents"

    def _making_again(self, place: int) -> list[tuple[int, Recurrence | CoreAttention]]:
        """The operation of a layer whose backward recomputes most, or copies most (attention of
        latents), with its place; none if the layer has none."""
        operations = self.described(place).operations
        return [
            (n, op)
            for n, op in enumerate(operations)
            if isinstance(op, Recurrence | SparseAttention)
            or (isinstance(op, CoreAttention) and op.from_latents)
        ]

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
