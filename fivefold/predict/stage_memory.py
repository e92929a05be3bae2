"""The memory of one microbatch in a stage: what it keeps, and what its actions need temporarily.

All sizes are bytes on one device; what is kept between forward and backward is counted in
`model.activations`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from fivefold.config.model import ModelConfig
from fivefold.counts.policy import StatePolicy
from fivefold.counts.state import gathered_bytes, stage_gradients
from fivefold.layout import Layout
from fivefold.model.activations import (
    Saved,
    deferred_by_ends,
    embedding_bytes,
    entry_bytes,
    loss_bytes,
    prediction_bytes,
    saved_activations,
    total,
)
from fivefold.model.description import LayerKind, describe, layer_kind
from fivefold.model.running import Running
from fivefold.model.shape import StageParts, WholeModel
from fivefold.pipeline.ir import Kind
from fivefold.predict.backward_memory import points_of_step
from fivefold.predict.passage import Copies, all_layers
from fivefold.predict.points import ActPoint, buffers, deferred_bytes, gathers


@dataclass(frozen=True)
class StageBytes:
    """The memory of one microbatch in a stage, in bytes.

    Attributes:
        kept: activations kept between forward and backward, without those of the loss.
        loss: logits and other activations of the loss kept between forward and backward.
        entry: input of the stage alone.
        waiting: memory kept between B and W.
        moved: activations offloaded to host memory between forward and backward.
        gradients: weight gradients, which each step makes anew; 0 if it does not.
        gathered: copies of weights that are gathered to compute, at most.
        points: candidates for the point of highest memory, for each kind of action, and whether
            it is the first and the last that computes weight gradients, which are then reduced.
        passing: the same of a forward that keeps only its input.
    """

    kept: float
    loss: float
    entry: float
    waiting: float
    moved: float
    gradients: float
    gathered: float
    points: Mapping[tuple[Kind, bool, bool], tuple[ActPoint, ...]]
    passing: tuple[ActPoint, ...]


def stage_bytes(
    layout: Layout, stage: StageParts, running: Running, policy: StatePolicy
) -> StageBytes:
    """The memory of one microbatch in a stage, given how that stage runs."""
    model, training = layout.config.model, layout.config.training
    tokens = training.micro_batch_size * training.seq_length / layout.grid.cp
    layers = _saved_by_layer(layout, stage, running)
    ends: list[Saved] = list(embedding_bytes(model, running).values()) if stage.embedding else []
    ends += prediction_bytes(model, stage, running).values()
    ends += entry_bytes(model, stage, running).values()
    loss = total(loss_bytes(model, running)) if stage.head else Saved()
    whole = total(layers)
    kinds = Counter(layer_kind(model, layer) for layer in all_layers(layout, stage))
    read = tokens * sum(n * waiting_bytes(model, running, kind) for kind, n in kinds.items())
    waiting = read + tokens * deferred_by_ends(model, stage, running)
    of_head = tokens * deferred_by_ends(model, WholeModel((), False, stage.head), running)
    moving = 2 * tokens * max((saved.offloaded for saved in layers), default=0.0)
    kept = tokens * (whole.kept + total(ends).kept)
    messages, inside = buffers(layout, stage, running)
    copies = Copies.of(layout, stage, policy)
    largest = tokens * max((layer.kept for layer in layers), default=0.0)
    forward = ActPoint(
        "forward",
        working=moving,
        communication=inside,
        resharded=copies.but("ends", "rest", "experts", "beside", "message"),
    )
    busy = [ActPoint("the loss", working=tokens * loss.remade + moving)] if stage.head else []
    further = [replace(p, resharded=copies.but("ends", "message")) for p in busy]
    if policy.splits_copy:
        further += gathers(copies, ActPoint("", -largest, -tokens * loss.kept))
    further = [replace(point, communication=messages) for point in further]
    forwards = [replace(forward, loss=-tokens * loss.kept), *further]
    hidden = running.element_bytes * model.hidden_size / running.token_parts
    end = ActPoint("the end", -kept, -tokens * loss.kept, waiting=waiting, communication=messages)

    points: dict[tuple[Kind, bool, bool], tuple[ActPoint, ...]] = {}
    each = partial(points_of_step, layout, stage, running, policy, layers)
    for (of_step, backwards), (_, of_weights) in zip(each(), each(deferred=True), strict=True):
        moved = [
            replace(point, working=point.working + _coming_back(point, moving, len(layers)))
            for point in backwards
        ]
        put_aside = partial(_put_aside, of_head=of_head, read=read, layers=len(layers))
        only_dx = [
            replace(point, gradients=0.0, made=0.0, waiting=put_aside(point)) for point in moved
        ]
        deferred = [
            ActPoint(
                "weight gradients",
                gradients=point.gradients,
                made=point.made,
                waiting=-_run(stage, point, waiting, read, len(layers)),
                communication=messages,
                # Weight gradients need no weights: ZeRO-3 has freed what the backward gathered.
                resharded=copies.but() or point.resharded,
            )
            for point in of_weights
        ]
        for kind, found in (
            (Kind.F, forwards),
            (Kind.R, [ActPoint("recomputation", communication=inside)]),
            (Kind.BW, moved),
            (Kind.B, [*only_dx, end]),
            (Kind.W, deferred),
        ):
            points[kind, *of_step] = tuple(found)
    passing = (
        replace(forward, working=moving + largest),
        *(replace(point, working=point.working + tokens * loss.kept) for point in further),
    )
    return StageBytes(
        kept=kept,
        loss=tokens * loss.kept,
        entry=0.0 if stage.embedding else tokens * hidden,
        waiting=waiting,
        moved=tokens * whole.offloaded,
        gradients=stage_gradients(layout, stage, policy) if policy.remade else 0.0,
        gathered=gathered_bytes(layout, stage, policy) if policy.splits_copy else 0.0,
        points=points,
        passing=passing,
    )


def _coming_back(point: ActPoint, moving: float, layers: int) -> float:
    """Bytes of offloaded activations that are back at a point of a backward: those of the layer
    that runs and of the one before, half of `moving` each."""
    left = 0 if point.done else min(layers - point.over, 2)
    return moving * max(left, 0) / 2


def _put_aside(point: ActPoint, of_head: float, read: float, layers: int) -> float:
    """Bytes that weight gradients to come keep at a point of B: after the loss those of the output
    layer, then those of each layer that is over."""
    return of_head * (point.loss < 0) + read * point.over / max(layers, 1)


def _run(stage: StageParts, point: ActPoint, waiting: float, read: float, layers: int) -> float:
    """Bytes that deferred weight gradients have read and freed at a point of W: at the embedding
    all, at the output layer its own, and else those of layers that are over."""
    if point.done:
        return waiting if stage.embedding else waiting - read
    return read * point.over / max(layers, 1)


def _saved_by_layer(layout: Layout, stage: StageParts, running: Running) -> list[Saved]:
    """Bytes per token of each layer of a stage, multi-token prediction layers last."""
    model = layout.config.model
    memory = running.memory
    by_place = memory.recompute_granularity == "full" or memory.recomputes_first_layers
    known: dict[tuple[LayerKind, int], Saved] = {}
    result = []
    for place, layer in enumerate(all_layers(layout, stage)):
        kind = layer_kind(model, layer), place if by_place else 0
        if kind not in known:
            # Full recomputation makes each further prediction again by itself.
            position = place if layer < model.num_layers else 0
            known[kind] = total(saved_activations(model, layer, running, position=position))
        result.append(known[kind])
    return result


def waiting_bytes(model: ModelConfig, running: Running, kind: LayerKind) -> float:
    """Bytes per token that the weight gradients of a layer need: x and dY of its linear layers."""
    return deferred_bytes(describe(model, kind).operations, running)
