"""The memory of one microbatch in a stage: what it keeps, and what its actions need temporarily.

All sizes are bytes on one device; what is kept between forward and backward is counted in
`model.activations`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
from fivefold.model.shape import StageParts
from fivefold.pipeline.ir import Kind
from fivefold.predict.backward_memory import ActPoint, buffers, points_of_step


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
    kinds = Counter(layer_kind(model, layer) for layer in _numbers(model, stage))
    read = tokens * sum(n * waiting_bytes(model, running, kind) for kind, n in kinds.items())
    waiting = read + tokens * deferred_by_ends(model, stage, running)
    moving = 2 * tokens * max((saved.offloaded for saved in layers), default=0.0)
    kept = tokens * (whole.kept + total(ends).kept)
    messages, inside = buffers(layout, stage, running)
    forward = ActPoint("forward", working=moving, communication=inside)
    forwards = [replace(forward, loss=-tokens * loss.kept)]
    if stage.head:
        working = tokens * loss.remade + moving
        forwards.append(ActPoint("the loss", working=working, communication=messages))
    hidden = running.element_bytes * model.hidden_size / running.token_parts
    largest = max((layer.kept for layer in layers), default=0.0)
    end = ActPoint("the end", -kept, -tokens * loss.kept, waiting=waiting, communication=messages)

    # Weight gradients need no weights: ZeRO-3 has freed what the backward gathered.
    ungathered = gathered_bytes(layout, stage, policy) if _reshards(layout, policy) else 0.0
    points: dict[tuple[Kind, bool, bool], tuple[ActPoint, ...]] = {}
    for of_step, backwards in points_of_step(layout, stage, running, policy, layers):
        moved = [replace(point, working=point.working + moving) for point in backwards]
        only_dx = [replace(point, gradients=0.0, made=0.0) for point in moved]
        deferred = [
            replace(
                _of_weights(stage, policy, point),
                waiting=-_run(stage, point, waiting, read, len(layers)),
                communication=messages,
                resharded=point.resharded - ungathered,
            )
            for point in backwards
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
        replace(forward, working=moving + tokens * largest),
        *(replace(p, working=p.working + tokens * loss.kept) for p in forwards[1:]),
    )
    return StageBytes(
        kept=kept,
        loss=tokens * loss.kept,
        entry=0.0 if stage.embedding else tokens * hidden,
        waiting=waiting,
        moved=tokens * whole.offloaded,
        gradients=stage_gradients(layout, stage, policy) if policy.remade else 0.0,
        points=points,
        passing=passing,
    )


def _of_weights(stage: StageParts, policy: StatePolicy, point: ActPoint) -> ActPoint:
    """What there is of a point of a backward where only weight gradients are computed.

    Those of an output layer come first and are reduced before there are others.
    """
    alone = point.done and policy.splits_gradient and not stage.embedding
    made, reduces, done = 0.0 if alone else point.made, point.reduces, point.done
    return ActPoint(
        "weight gradients", gradients=point.gradients, made=made, reduces=reduces, done=done
    )


def _reshards(layout: Layout, policy: StatePolicy) -> bool:
    """Whether hooks free gathered weights after each backward; programs may say when instead."""
    by_program = layout.config.parallel.pipeline_max_unsharded_stages is not None
    return policy.splits_copy and not (by_program or layout.alternates_within_stages)


def _run(stage: StageParts, point: ActPoint, waiting: float, read: float, layers: int) -> float:
    """Bytes that deferred weight gradients have read and freed at a point of W: at the embedding
    all, at the output layer its own, and before a layer's gradients are reduced those of one."""
    if point.done:
        return waiting if stage.embedding else waiting - read
    return read / max(layers, 1) if point.reduces else 0.0


def _saved_by_layer(layout: Layout, stage: StageParts, running: Running) -> list[Saved]:
    """Bytes per token of each layer of a stage, multi-token prediction layers last."""
    model = layout.config.model
    memory = running.memory
    by_place = memory.recompute_granularity == "full" or memory.recomputes_first_layers
    known: dict[tuple[LayerKind, int], Saved] = {}
    result = []
    for place, layer in enumerate(_numbers(model, stage)):
        kind = layer_kind(model, layer), place if by_place else 0
        if kind not in known:
            # Full recomputation makes each further prediction again by itself.
            position = place if layer < model.num_layers else 0
            known[kind] = total(saved_activations(model, layer, running, position=position))
        result.append(known[kind])
    return result


def _numbers(model: ModelConfig, stage: StageParts) -> tuple[int, ...]:
    """The layers of a stage, multi-token prediction layers last."""
    return *stage.layers, *range(model.num_layers, model.num_layers + stage.mtp)


def waiting_bytes(model: ModelConfig, running: Running, kind: LayerKind) -> float:
    """Bytes per token that the weight gradients of a layer need: x and dY of its linear layers."""
    operations = describe(model, kind).operations
    waiting = (op for op in operations if not (op.frozen or running.tiles(op.rerun_by)))
    return sum(each.deferred(running) for each in waiting)
