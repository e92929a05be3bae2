"""The memory of one microbatch in a stage: what it keeps, and what its actions need temporarily.

All sizes are bytes on one device; what is kept between forward and backward is counted in
`model.activations`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from fivefold.config.model import ModelConfig
from fivefold.counts.blocks import GatheredBlock, stage_blocks
from fivefold.counts.policy import StatePolicy
from fivefold.layout import Layout
from fivefold.model.activations import (
    Saved,
    embedding_bytes,
    entry_bytes,
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
        communication: buffers of messages.
        reduces: whether gradients of a layer are being reduced.
    """

    where: str
    activations: float = 0.0
    loss: float = 0.0
    remade: float = 0.0
    working: float = 0.0
    gradients: float = 0.0
    waiting: float = 0.0
    communication: float = 0.0
    reduces: bool = False

    @cached_property
    def size(self) -> float:
        """The sum of all parts, in bytes."""
        freed = self.activations + self.loss
        needed = self.remade + self.working + self.gradients + self.waiting
        return freed + needed + self.communication


@dataclass(frozen=True)
class StageBytes:
    """The memory of one microbatch in a stage, in bytes.

    Attributes:
        kept: activations kept between forward and backward, without those of the loss.
        loss: logits and other activations of the loss kept between forward and backward.
        entry: input of the stage alone.
        waiting: memory kept between B and W.
        moved: activations offloaded to host memory between forward and backward.
        points: candidates for the point of highest memory, for each kind of action, and whether
            it is the last that computes weight gradients, which are then reduced.
        passing: the same of a forward that keeps only its input.
    """

    kept: float
    loss: float
    entry: float
    waiting: float
    moved: float
    points: Mapping[tuple[Kind, bool], tuple[ActPoint, ...]]
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
    waiting = tokens * sum(n * waiting_bytes(model, running, kind) for kind, n in kinds.items())
    moving = 2 * tokens * max((saved.offloaded for saved in layers), default=0.0)
    kept = tokens * (whole.kept + total(ends).kept)
    messages, inside = _buffers(layout, stage, running)
    forward = ActPoint("forward", working=moving, communication=inside)
    forwards = [replace(forward, loss=-tokens * loss.kept)]
    if stage.head:
        working = tokens * loss.remade + moving
        forwards.append(ActPoint("the loss", working=working, communication=messages))
    hidden = running.element_bytes * model.hidden_size / running.token_parts
    largest = max((layer.kept for layer in layers), default=0.0)
    end = ActPoint("the end", -kept, -tokens * loss.kept, waiting=waiting, communication=messages)

    points: dict[tuple[Kind, bool], tuple[ActPoint, ...]] = {}
    for last in (False, True):
        once = policy.reducing_whole or (policy.reducing and not policy.splits_gradient)
        if not last or once:  # else as before
            reduces = last or policy.splits_gradient
            found = _backward_points(layout, stage, running, policy, layers, reduces=reduces)
        # Before a layer's gradients are reduced, what they were computed from is gone.
        gone = waiting / max(len(layers), 1)
        backwards = [replace(point, working=point.working + moving) for point in found]
        points[Kind.F, last] = tuple(forwards)
        points[Kind.R, last] = (ActPoint("recomputation", communication=inside),)
        points[Kind.BW, last] = tuple(backwards)
        points[Kind.B, last] = (*(replace(point, gradients=0.0) for point in backwards), end)
        points[Kind.W, last] = tuple(
            ActPoint(
                "weight gradients",
                gradients=point.gradients,
                waiting=-gone if point.reduces else 0.0,
                communication=messages,
            )
            for point in found
        )
    return StageBytes(
        kept=kept,
        loss=tokens * loss.kept,
        entry=0.0 if stage.embedding else tokens * hidden,
        waiting=waiting,
        moved=tokens * whole.offloaded,
        points=points,
        passing=(
            replace(forward, working=moving + tokens * largest),
            *(replace(p, working=p.working + tokens * loss.kept) for p in forwards[1:]),
        ),
    )


def _backward_points(
    layout: Layout,
    stage: StageParts,
    running: Running,
    policy: StatePolicy,
    layers: list[Saved],
    *,
    reduces: bool,
) -> list[ActPoint]:
    """The points in the backward of a stage at which memory may peak.

    At the output layer, whose weight gradient is large while nothing is freed yet; in the last
    layer, where a gated MLP's gradients and weight gradient meet; at its end, where all of its
    weight gradients wait to be accumulated, or in the layer before, while they are reduced; where
    whole ones are copied to be reduced; and at the embedding, when everything else is gone.
    """
    model, training = layout.config.model, layout.config.training
    tokens = training.micro_batch_size * training.seq_length / layout.grid.cp
    loss = total(loss_bytes(model, running)) if stage.head else Saved()
    vocabulary = model.trains_all * model.padded_vocab_size / layout.grid.tp * model.hidden_size
    kept = tokens * sum(layer.kept for layer in layers)
    gone, remade = -tokens * loss.kept, tokens * _remade_at_once(running, layers)
    messages, inside = _buffers(layout, stage, running)
    points = []
    if stage.head:
        fresh = vocabulary * policy.fresh
        heads = _head_points(model, running, tokens, fresh)
        points += [replace(point, communication=messages) for point in heads]
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
            working=tokens
            * layer.mlp_input.working(running)
            * running.share_at_once(layer.mlp_input.rerun_by)
            + _tiled_sums(layout, layer, running),
            gradients=0.0 if policy.placeholder else _first_linear(layout, layer) * policy.fresh,
            communication=inside,
        )
        points.append(point)
        *_, block = stage_blocks(layout, stage, trained=True)
        if policy.reducing and reduces and len(layers) > 1:
            points.append(
                replace(
                    point,
                    where="the layer before the last",
                    activations=point.activations - tokens * layers[-1].kept,
                    gradients=point.gradients + block.size * policy.reducing,
                    reduces=True,
                )
            )
        elif policy.reducing:
            end = ActPoint("the end of the last layer", -tokens * layers[-1].kept, gone)
            points.append(replace(end, gradients=block.size * policy.fresh, communication=inside))
    if policy.reducing_whole and reduces:
        reduced = ActPoint("the reduction", loss=gone, communication=inside, reduces=True)
        each = [tokens * layer.kept for layer in layers]
        points += _reductions(_trained(layout, stage, policy), policy, reduced, each)
    if stage.embedding:
        table = vocabulary * (layout.grid.tp if policy.whole_embedding else 1)
        first = ActPoint("the embedding", -kept, gone, gradients=table * policy.fresh)
        points.append(replace(first, communication=messages))
    if policy.fresh_at_once:
        own = sum(block.count * block.size for block in _trained(layout, stage, policy))
        # The loss's part stands for the logits and their gradient, which others still refer to.
        points.append(ActPoint("the end of one graph", -kept, gradients=own * policy.fresh))
    return points or [ActPoint("backward")]


def _reductions(
    blocks: tuple[GatheredBlock, ...],
    policy: StatePolicy,
    point: ActPoint,
    kept: list[float],
) -> Iterator[ActPoint]:
    """The points at which ranks that share nothing reduce the last layer, and at last the ends.

    `kept`: bytes of activations of each layer.
    """
    ends, *others = blocks
    if kept:
        beside = others[-1].size * (policy.reducing_whole - policy.copy)
        yield replace(point, activations=-kept[-1], gradients=beside)
    copies = policy.copy * sum(block.count * block.size for block in blocks)
    beside = ends.size * policy.reducing_whole - copies
    yield replace(point, activations=-sum(kept), gradients=beside)


def _trained(layout: Layout, stage: StageParts, policy: StatePolicy) -> tuple[GatheredBlock, ...]:
    whole = policy.whole_embedding
    return stage_blocks(layout, stage, trained=True, whole_embedding=whole)


def _head_points(
    model: ModelConfig, running: Running, tokens: float, fresh: float
) -> list[ActPoint]:
    """The points of the loss and of the output layer, whose weight gradient takes `fresh` bytes.

    A loss in the compute dtype is done with its log-softmax and that one's gradient before the
    output layer makes any.
    """
    loss = total(loss_bytes(model, running))
    dx = running.element_bytes * model.hidden_size * (2 if running.sequence_parallel else 1)
    if running.memory.makes_logits_again:  # its sum over slices of the vocabulary
        dx += max(running.element_bytes, 4) * model.hidden_size
    head = ActPoint("the output layer", working=tokens * (loss.remade + dx), gradients=fresh)
    if not running.narrow_loss:
        return [head]
    half = tokens * loss_bytes(model, running)["logits"].remade / 2
    done = replace(head, working=head.working - half, loss=-half)
    return [ActPoint("the loss", working=tokens * loss.remade), done]


def _first_linear(layout: Layout, layer: Layer) -> float:
    """Parameters of an MLP's projections into its inner features, on one rank."""
    grid = layout.grid
    sizes = (
        sum(prod(weight.local(grid.tp, grid.ep, grid.etp)) for weight in linear.multiplied)
        for linear in layer.mlp_inputs
        if not linear.frozen
    )
    return max(sizes, default=0)


def _tiled_sums(layout: Layout, layer: Layer, running: Running) -> float:
    """Bytes of the weight gradients that the tiles of an MLP add up, in at least fp32."""
    tiled = [op for op in layer.mlp if running.tiles(op.rerun_by) and not op.frozen]
    sizes = (prod(weight.local(layout.grid.tp)) for op in tiled for weight in op.multiplied)
    return max(running.element_bytes, 4) * sum(sizes)


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


def _remade_at_once(running: Running, layers: list[Saved]) -> float:
    """Most bytes recomputed at a time: those of a group of layers, or of parts of a layer."""
    memory = running.memory
    full = memory.recompute_granularity == "full" and memory.recompute_method == "uniform"
    group = memory.recompute_num_layers[0] if full else 1
    sums = [
        sum(layer.remade for layer in layers[start : start + group])
        for start in range(0, len(layers), group)
    ]
    return max(sums, default=0.0)


def waiting_bytes(model: ModelConfig, running: Running, kind: LayerKind) -> float:
    """Bytes per token that the weight gradients of a layer need: x and dY of its linear layers."""
    operations = describe(model, kind).operations
    waiting = (op for op in operations if not (op.frozen or running.tiles(op.rerun_by)))
    return sum(each.deferred(running) for each in waiting)


def _buffers(layout: Layout, stage: StageParts, running: Running) -> tuple[float, float]:
    """Bytes of messages between stages, and the same with those of a layer.

    The latter are gathered keys and values, and tokens sent to experts.
    """
    model, training, grid = layout.config.model, layout.config.training, layout.grid
    tokens = training.micro_batch_size * training.seq_length / grid.cp
    element, between, inside = running.element_bytes, 0.0, 0.0
    if grid.pp > 1:
        between = 2 * element * model.hidden_size / running.token_parts
    if grid.cp > 1 and stage.layers:
        keys = element * (model.k_size + model.v_size) / running.tensor_parallel
        gathers = "all_gather" in layout.config.parallel.cp_comm_type
        # A ring holds the current block and the arriving one, and the gradients of both.
        inside += keys * (2 * grid.cp if gathers else 4)
    if grid.ep > 1 and any(layer_kind(model, layer).experts for layer in stage.layers):
        rows = running.rows_of_one(model.moe_router_topk)
        inside += 2 * element * model.hidden_size * rows
    return tokens * between, tokens * (between + inside)
