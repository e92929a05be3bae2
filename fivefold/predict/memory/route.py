"""The layers of a stage as a backward passes them; sizes are bytes on one device."""

from collections.abc import Callable
from functools import cache, cached_property

from fivefold.description.core_attention import CoreAttention
from fivefold.description.experts import ExpertsIn
from fivefold.description.linear_attention import Recurrence
from fivefold.description.operations import Activation
from fivefold.description.running import share_at_once
from fivefold.predict.memory.layer_points import LayerPoints
from fivefold.predict.memory.points import ActPoint
from fivefold.predict.memory.sizes import (
    deferred_bytes,
    first_linear,
    last_linears,
    tiled_weights,
)

_INSIDE = Activation | CoreAttention | Recurrence


class Route(LayerPoints):
    """Points within the layers of a stage that a backward passes."""

    @cached_property
    def last_layer(self) -> tuple[ActPoint, ActPoint]:
        """Within the last layer: where a gated MLP's gradients meet the first of its new weight
        gradients, and where its activation has made the gradients of its inputs.

        Both without new weight gradients, which are of `inward` and of `outward`. Where the layer
        has no MLP they are of its mixer: where it is projected into, and where its tokens meet.
        """
        return self._in_layer(len(self.numbers) - 1)

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
            communication=self._messages_in(layer.kind),
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

    def reruns_experts(self, place: int) -> bool:
        """Whether a backward runs a layer's experts again, with their messages."""
        memory = self.running.memory
        again = {"moe", "routed_experts"} & {*memory.recomputed_modules}
        again_as_whole = memory.recompute_granularity == "full"
        return self.described(place).kind.experts and bool(again or again_as_whole)

    def before_experts(self, place: int) -> float:
        """Bytes of a layer that are made again before its experts are gathered to run again."""
        layer = self.described(place)
        if not (self.reruns_experts(place) and isinstance(layer.last_input, ExpertsIn)):
            return 0.0
        point = ActPoint("", recomputed=self._recomputed(place))
        return self._without(point, place, layer.after_last_input).recomputed

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
        experts = layer.last_input
        if not isinstance(experts, ExpertsIn):
            return None
        point = self.last_layer[0]._replace(
            activations=0.0,
            recomputed=self._recomputed(place),
            working=self.tokens * experts.of_rows(running),
            communication=self.messages[0],
            read=0.0,
        )
        return self._without(point, place, (*layer.after_last_input, *layer.last_inputs))

    def with_rows(self, place: int, end: ActPoint) -> ActPoint:
        """The end of the experts of a layer before their rows and gradients of outputs are over,
        where the gradients of rows are added if several weights make some."""
        running, experts = self.running_of(place), self.described(place).last_input
        assert isinstance(experts, ExpertsIn)
        rows = sum(item.size for item in experts.kept(running))
        more = experts.of_outputs(running) + experts.has_several * experts.of_rows(running)
        return end._replace(
            recomputed=end.recomputed + self.tokens * rows,
            working=end.working + self.tokens * more,
            read=end.read - self.tokens * deferred_bytes((experts,), running),
        )
