"""The memory of one microbatch in a stage: what it keeps, and what its actions need temporarily.

All sizes are bytes on one device; what is kept between forward and backward is counted in
`model.activations`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from fivefold.config.model import ModelConfig
from fivefold.counts.state import StatePolicy, stage_blocks
from fivefold.layout import Layout
from fivefold.model.activations import (
    Saved,
    embedding_bytes,
    loss_bytes,
    prediction_bytes,
    saved_activations,
    total,
)
from fivefold.model.description import Layer, LayerKind, describe, layer_kind
from fivefold.model.running import Running
from fivefold.model.shape import StageParts
from fivefold.pipeline.ir import Kind


@dataclass(frozen=True)
class ActPoint:
    """A point of time within a pipeline action, in bytes relative to the action's start.

    Attributes:
        where: description of the point.
        activations: kept activations freed by then (negative).
        loss: memory of the loss freed by then (negative).
        remade: recomputed activations.
        working: gradients of activations, and intermediate results of the loss.
        gradients: weight gradients that are not yet accumulated.
        waiting: memory kept for deferred weight gradients.
    """

    where: str
    activations: float = 0.0
    loss: float = 0.0
    remade: float = 0.0
    working: float = 0.0
    gradients: float = 0.0
    waiting: float = 0.0

    @cached_property
    def size(self) -> float:
        """The sum of all parts, in bytes."""
        freed = self.activations + self.loss
        return freed + self.remade + self.working + self.gradients + self.waiting


@dataclass(frozen=True)
class StageBytes:
    """The memory of one microbatch in a stage, in bytes.

    Attributes:
        kept: activations kept between forward and backward, without those of the loss.
        loss: logits and other activations of the loss kept between forward and backward.
        entry: input of the stage alone.
        waiting: memory kept between B and W.
        buffers: communication buffers while an action runs.
        moved: activations offloaded to host memory between forward and backward.
        points: candidates for the point of highest memory, for each kind of action.
        passing: the point of highest memory in a forward that keeps only its input.
    """

    kept: float
    loss: float
    entry: float
    waiting: float
    buffers: float
    moved: float
    points: Mapping[Kind, tuple[ActPoint, ...]]
    passing: ActPoint


def stage_bytes(
    layout: Layout, stage: StageParts, running: Running, policy: StatePolicy
) -> StageBytes:
    """The memory of one microbatch in a stage."""
    model, training = layout.config.model, layout.config.training
    tokens = training.micro_batch_size * training.seq_length / layout.grid.cp
    layers = _saved_by_layer(layout, stage, running)
    ends: list[Saved] = list(embedding_bytes(model, running).values()) if stage.embedding else []
    ends += prediction_bytes(model, stage, running).values()
    loss = total(loss_bytes(model, running)) if stage.head else Saved()
    whole = total(layers)
    waiting = tokens * sum(
        waiting_bytes(model, running, layer_kind(model, layer))
        for layer in (*stage.layers, *[model.num_layers] * stage.mtp)
    )
    moving = 2 * tokens * max((saved.offloaded for saved in layers), default=0.0)
    kept = tokens * (whole.kept + total(ends).kept)
    points = _backward_points(layout, stage, running, policy)
    forward = ActPoint("forward", working=tokens * loss.remade + moving)
    hidden = running.element_bytes * model.hidden_size / running.token_parts
    largest = max((layer.kept for layer in layers), default=0.0)
    fresh = max((point.gradients for point in points), default=0.0)
    end = ActPoint("the end", -kept, -tokens * loss.kept, waiting=waiting)
    return StageBytes(
        kept=kept,
        loss=tokens * loss.kept,
        entry=0.0 if stage.embedding else tokens * hidden,
        waiting=waiting,
        buffers=tokens * _buffer_bytes(layout, stage, running),
        moved=tokens * whole.offloaded,
        points={
            Kind.F: (forward,),
            Kind.R: (ActPoint("recomputation"),),
            Kind.BW: tuple(replace(p, working=p.working + moving) for p in points),
            Kind.B: (*(replace(p, working=p.working + moving, gradients=0.0) for p in points), end),
            Kind.W: (ActPoint("weight gradients", gradients=fresh),),
        },
        passing=replace(forward, working=forward.working + tokens * (loss.kept + largest)),
    )


def _backward_points(
    layout: Layout, stage: StageParts, running: Running, policy: StatePolicy
) -> list[ActPoint]:
    """The points in the backward of a stage at which memory may peak.

    At the output layer, whose weight gradient is large while nothing is freed yet; in the last
    layer, where a gated MLP's gradients and weight gradient meet; in the layer before, while the
    gradients of the last are reduced; and at the embedding, when everything else is gone.
    """
    model, training = layout.config.model, layout.config.training
    tokens = training.micro_batch_size * training.seq_length / layout.grid.cp
    loss = total(loss_bytes(model, running)) if stage.head else Saved()
    vocabulary = model.padded_vocab_size / layout.grid.tp * model.hidden_size
    layers = _saved_by_layer(layout, stage, running)
    kept = tokens * sum(layer.kept for layer in layers)
    gone, remade = -tokens * loss.kept, tokens * _remade_at_once(layout, layers)
    points = []
    if stage.head:
        dx = running.element_bytes * model.hidden_size * (2 if running.sequence_parallel else 1)
        working = tokens * (loss.remade + dx)
        points.append(
            ActPoint("the output layer", working=working, gradients=vocabulary * policy.fresh)
        )
    if stage.layers:
        last = stage.layers[-1]
        layer = describe(model, layer_kind(model, last))
        saved = saved_activations(model, last, running, position=len(stage.layers) - 1)
        # Activations that are no longer needed when the backward reaches the MLP's first weight.
        done = {item.name for op in layer.after_mlp_input for item in op.kept(running)}
        freed = sum(item.kept + item.remade for name, item in saved.items() if name in done)
        point = ActPoint(
            "the last layer",
            activations=-tokens * freed,
            loss=gone,
            remade=remade,
            working=tokens * layer.mlp_input.working(running),
            gradients=0.0 if policy.placeholder else _first_linear(layout, layer) * policy.fresh,
        )
        points.append(point)
        *_, block = stage_blocks(layout, stage)
        if policy.reducing and len(layers) > 1:
            points.append(
                replace(
                    point,
                    where="the layer before the last",
                    activations=point.activations - tokens * layers[-1].kept,
                    gradients=point.gradients + block.size * policy.reducing,
                )
            )
    if stage.embedding:
        points.append(ActPoint("the embedding", -kept, gone, gradients=vocabulary * policy.fresh))
    return points or [ActPoint("backward")]


def _first_linear(layout: Layout, layer: Layer) -> float:
    """Parameters of an MLP's projections into its inner features, on one rank."""
    grid = layout.grid
    sizes = (
        sum(prod(weight.local(grid.tp, grid.ep, grid.etp)) for weight in linear.multiplied)
        for linear in layer.mlp_inputs
    )
    return max(sizes)


def _saved_by_layer(layout: Layout, stage: StageParts, running: Running) -> list[Saved]:
    """Bytes per token of each layer of a stage, multi-token prediction layers last."""
    model = layout.config.model
    numbers = [*stage.layers, *range(model.num_layers, model.num_layers + stage.mtp)]
    by_place = running.memory.recompute_granularity == "full"
    known: dict[tuple[LayerKind, int], Saved] = {}
    result = []
    for place, layer in enumerate(numbers):
        kind = layer_kind(model, layer), place if by_place else 0
        if kind not in known:
            # Full recomputation makes each prediction anew by itself.
            position = place if layer < model.num_layers else 0
            known[kind] = total(saved_activations(model, layer, running, position=position))
        result.append(known[kind])
    return result


def _remade_at_once(layout: Layout, layers: list[Saved]) -> float:
    """Most bytes recomputed at a time: those of a group of layers, or of parts of a layer."""
    memory = layout.config.memory
    full = memory.recompute_granularity == "full" and memory.recompute_method == "uniform"
    group = memory.recompute_num_layers if full else 1
    sums = [
        sum(layer.remade for layer in layers[start : start + group])
        for start in range(0, len(layers), group)
    ]
    return max(sums, default=0.0)


def waiting_bytes(model: ModelConfig, running: Running, kind: LayerKind) -> float:
    """Bytes per token that the weight gradients of a layer need: x and dY of its linear layers."""
    return sum(operation.deferred(running) for operation in describe(model, kind).operations)


def _buffer_bytes(layout: Layout, stage: StageParts, running: Running) -> float:
    """Bytes per token of messages, gathered keys and values, and dispatched tokens."""
    model, grid = layout.config.model, layout.grid
    element, size = running.element_bytes, 0.0
    if grid.pp > 1:
        size += 2 * element * model.hidden_size / running.token_parts
    if grid.cp > 1 and stage.layers:
        keys = element * (model.k_size + model.v_size) / running.tensor_parallel
        gathers = "all_gather" in layout.config.parallel.cp_comm_type
        # A ring holds the current block and the arriving one, and the gradients of both.
        size += keys * (2 * grid.cp if gathers else 4)
    if grid.ep > 1 and any(layer_kind(model, layer).experts for layer in stage.layers):
        rows = running.rows_of_one(model.moe_router_topk)
        size += 2 * element * model.hidden_size * rows
    return size
