"""The memory of one microbatch in a stage: what it keeps, and what its actions need temporarily.

All sizes are bytes on one device; what is kept between forward and backward is counted in
`description.activations`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from fivefold.counts.policy import StatePolicy
from fivefold.counts.state import gathered_bytes, stage_gradients, stage_narrow
from fivefold.description.activations import (
    Saved,
    deferred_by_ends,
    embedding_bytes,
    entry_bytes,
    loss_bytes,
    prediction_bytes,
    saved_activations,
    total,
)
from fivefold.description.kinds import LayerKind, layer_kind
from fivefold.description.running import Running
from fivefold.description.shape import (
    ModelParts,
    StageParts,
    placed_layers,
)
from fivefold.layout import Layout
from fivefold.pipeline.ir import Kind
from fivefold.predict.memory.backward import backward_points
from fivefold.predict.memory.points import ActPoint, gathers
from fivefold.predict.memory.route import Route


@dataclass(frozen=True)
class StageBytes:
    """The memory of one microbatch in a stage, in bytes.

    Attributes:
        kept: activations kept between forward and backward, without those of the loss.
        loss: logits and other activations of the loss kept between forward and backward.
        entry: input of the stage alone.
        waiting: memory kept between B and W.
        with_dx: the sums in which weight gradients that Bs make wait for the next W, and what this
            needs more of several Bs than of one.
        moved: activations offloaded to host memory between forward and backward.
        gradients: weight gradients on the device that each step makes anew.
        narrow: weights in 8 bits that microbatches share, for one of the two products.
        gathered: copies of weights that are gathered to compute, at most.
        worst: the point of highest memory of an action of a kind, in the order of `RunningAct`:
            whether it is a forward that keeps only its input, and whether it is the first and the
            last that computes weight gradients, which are then reduced.
    """

    kept: float
    loss: float
    entry: float
    waiting: float
    with_dx: tuple[float, float]
    moved: float
    gradients: float
    narrow: float
    gathered: float
    worst: Callable[[Kind, bool, bool, bool], ActPoint]


def stage_bytes(
    layout: Layout, stage: StageParts, running: Running, policy: StatePolicy
) -> StageBytes:
    """The memory of one microbatch in a stage, given how that stage runs."""
    model = layout.config.model
    layers = _saved_by_layer(layout, stage, running)
    ends: list[Saved] = list(embedding_bytes(model, running).values()) if stage.embedding else []
    ends += prediction_bytes(model, stage, running).values()
    ends += entry_bytes(model, stage, running).values()
    whole = total(layers)
    route = Route(layout, stage, running, policy, tuple(layers))
    tokens = route.tokens
    waiting = sum(route.read) + tokens * deferred_by_ends(model, stage, running)
    kept = tokens * (whole.kept + total(ends).kept)
    hidden = running.element_bytes * model.hidden_size / running.token_parts
    made, added = route.head_with_loss
    return StageBytes(
        kept=kept,
        loss=-route.gone,
        entry=0.0 if stage.embedding else tokens * hidden,
        waiting=waiting,
        with_dx=(added + policy.gradient * sum(route.tiles_with_dx), added - made),
        moved=tokens * whole.offloaded,
        gradients=stage_gradients(layout, stage, policy),
        narrow=stage_narrow(layout, stage, policy),
        gathered=gathered_bytes(layout, stage, policy) if policy.splits_copy else 0.0,
        worst=_Actions(route, kept, waiting).worst,
    )


@dataclass(frozen=True)
class _Actions:
    """The points at which memory may peak within the actions of a stage.

    Attributes:
        route: what they meet there.
        kept: bytes of activations kept between forward and backward, without those of the loss.
        waiting: bytes that all deferred weight gradients need.
    """

    route: Route
    kept: float
    waiting: float

    def worst(self, kind: Kind, light: bool, first: bool, last: bool) -> ActPoint:
        """As `StageBytes` has it."""
        policy = self.route.policy
        makes, backward = kind in (Kind.BW, Kind.W), kind not in (Kind.F, Kind.R)
        alike = policy.splits_gradient and policy.splits_copy  # the last one, with all others
        copies = first and kind in (Kind.B, Kind.BW) and policy.step_weight > 0
        first = makes and first
        last = backward and last and bool(policy.reduces or policy.sent) and not alike
        return self._known(kind, light, first, last, copies)

    @cached_property
    def _known(self) -> Callable[[Kind, bool, bool, bool, bool], ActPoint]:
        return cache(self._found)

    def _found(self, kind: Kind, light: bool, first: bool, last: bool, copies: bool) -> ActPoint:
        if kind is Kind.F:
            points = self._passing if light else self._forwards
        elif kind is Kind.R:
            points = [ActPoint("recomputation", communication=max(self.route.messages))]
        else:
            of_kind = {Kind.BW: self._whole, Kind.B: self._only_dx, Kind.W: self._only_dw}
            points = of_kind[kind](first, last)
        if copies:
            points = [point._replace(narrow=self._copied(point)) for point in points]
        return max(points, key=lambda point: point.size)

    @cached_property
    def _moving(self) -> float:
        """Bytes of the activations of two layers that are being copied to or from the host."""
        route = self.route
        return 2 * route.tokens * max((each.offloaded for each in route.layers), default=0.0)

    @cached_property
    def _largest(self) -> float:
        """Bytes of activations of the layer that keeps most."""
        return max(self.route.kept, default=0.0)

    @cached_property
    def _forward(self) -> ActPoint:
        """The layers of a forward."""
        copies = self.route.copies
        return ActPoint(
            "forward",
            working=self._moving,
            communication=max(self.route.messages),
            resharded=copies.but("ends", "rest", "experts", "beside", "message"),
        )

    @cached_property
    def _further(self) -> list[ActPoint]:
        """The points at the loss, and after a forward's gathers."""
        route, points = self.route, []
        if route.stage.head:
            loss = total(loss_bytes(route.layout.config.model, route.running))
            working = route.tokens * loss.recomputed + self._moving
            stays = () if route.policy.frees_message else ("message",)
            gathered = route.copies.but("ends", *stays)
            points.append(ActPoint("the loss", working=working, resharded=gathered))
        if route.policy.splits_copy:
            points += gathers(route.copies, ActPoint("", -self._largest, route.gone), "passed")
        return [point._replace(communication=route.messages[0]) for point in points]

    @property
    def _forwards(self) -> list[ActPoint]:
        return [self._forward._replace(loss=self.route.gone), *self._further]

    @property
    def _passing(self) -> list[ActPoint]:
        """The points of a forward that keeps only its input."""
        loss = -self.route.gone
        further = [point._replace(working=point.working + loss) for point in self._further]
        return [self._forward._replace(working=self._moving + self._largest), *further]

    def _whole(self, first: bool, last: bool) -> list[ActPoint]:
        return [
            point._replace(working=point.working + self._coming_back(point))
            for point in backward_points(self.route, first=first, last=last, deferred=False)
        ]

    def _copied(self, point: ActPoint) -> float:
        """Bytes of the 8-bit copies of weights that the step's first backward has made, for
        gradients of inputs, in the layers behind a point."""
        parts = self.route.parts
        over = parts if point.done else parts[len(parts) - point.over :]
        elements = sum(sum(part.narrow) for parts in over for part in parts)
        return self.route.policy.step_weight * elements

    def _only_dx(self, first: bool, last: bool) -> list[ActPoint]:
        route = self.route
        made, fresh = route.head_with_loss[0], route.policy.fresh
        end = ActPoint("the end", -self.kept, route.gone, waiting=self.waiting, done=True)
        end = end._replace(gradients=made + fresh * self._tiles_over(end))
        return [
            *(
                point._replace(
                    gradients=made * (point.loss < 0 or point.gradients > 0)
                    + fresh * self._tiles_over(point),
                    made=0.0,
                    waiting=self._put_aside(point),
                )
                for point in self._whole(first, last)
            ),
            end._replace(communication=route.messages[0]),
        ]

    def _only_dw(self, first: bool, last: bool) -> list[ActPoint]:
        return [
            ActPoint(
                "weight gradients",
                gradients=point.gradients,
                made=point.made,
                waiting=-self._run(point) - self._taken(point),
                communication=self.route.messages[0],
                # Weight gradients need no weights: ZeRO-3 has freed what the backward gathered.
                resharded=self.route.copies.but() or point.resharded,
            )
            for point in backward_points(self.route, first=first, last=last, deferred=True)
        ]

    def _tiles_over(self, point: ActPoint) -> int:
        """Elements of the MLPs in tiles of the layers that are over at a point."""
        tiles = self.route.tiles_with_dx
        return sum(tiles if point.done else tiles[len(tiles) - point.over :])

    def _taken(self, point: ActPoint) -> float:
        """Bytes of the sums made by Bs that a W has reduced at a point."""
        return self.route.head_with_loss[1] + self.route.policy.gradient * self._tiles_over(point)

    def _coming_back(self, point: ActPoint) -> float:
        """Bytes of offloaded activations on the device at a point of a backward: those of the
        running layer and of the previous one, half of the bytes in transit each."""
        left = 0 if point.done else min(len(self.route.layers) - point.over, 2)
        return self._moving * max(left, 0) / 2

    def _put_aside(self, point: ActPoint) -> float:
        """Bytes kept for deferred weight gradients at a point of B: those of the output layer after
        the loss, then those of each layer, or part of one, that is done."""
        return self._of_head * (point.loss < 0) + point.read

    @cached_property
    def _of_head(self) -> float:
        """Bytes that the deferred weight gradient of the output layer needs."""
        route, head = self.route, ModelParts(head=self.route.stage.head)
        return route.tokens * deferred_by_ends(route.layout.config.model, head, route.running)

    def _run(self, point: ActPoint) -> float:
        """Bytes that deferred weight gradients have freed at a point of W: at the output layer,
        which is first, its own; then also those of finished layers; at the embedding all."""
        if point.done:
            layers = 0.0 if self.route.stage.embedding else sum(self.route.read)
            return self.waiting - layers
        return self._put_aside(point)


def _saved_by_layer(layout: Layout, stage: StageParts, running: Running) -> list[Saved]:
    """Bytes per token of each layer of a stage, multi-token prediction layers last."""
    model = layout.config.model
    memory = running.memory
    by_place = memory.recompute_granularity == "full" or memory.recomputes_first_layers
    known: dict[tuple[LayerKind, int], Saved] = {}
    result = []
    for place, layer in placed_layers(model, stage):
        kind = layer_kind(model, layer), place if by_place else 0
        if kind not in known:
            known[kind] = total(saved_activations(model, layer, running, position=place))
        result.append(known[kind])
    return result
