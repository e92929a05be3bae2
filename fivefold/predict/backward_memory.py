"""The points of a stage's backward at which memory may peak; sizes are bytes on one device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import prod

from fivefold.config.model import ModelConfig
from fivefold.counts.blocks import GatheredBlock, stage_blocks
from fivefold.counts.policy import StatePolicy
from fivefold.counts.state import num_shards, stage_gradients
from fivefold.layout import Layout
from fivefold.model.activations import (
    Saved,
    loss_bytes,
    saved_activations,
    total,
)
from fivefold.model.description import Layer, describe, layer_kind
from fivefold.model.operations import Operation
from fivefold.model.running import Running
from fivefold.model.shape import StageParts


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
        made: accumulated ones of a stage that had none before.
        waiting: memory kept for deferred weight gradients.
        communication: buffers of messages.
        reduces: whether gradients of a layer are being reduced.
        done: whether all gradients of the stage have been made.
        resharded: copies of weights that a step with one backward has freed (negative).
    """

    where: str
    activations: float = 0.0
    loss: float = 0.0
    remade: float = 0.0
    working: float = 0.0
    gradients: float = 0.0
    made: float = 0.0
    waiting: float = 0.0
    communication: float = 0.0
    reduces: bool = False
    done: bool = False
    resharded: float = 0.0

    @cached_property
    def size(self) -> float:
        """The sum of all parts, in bytes."""
        freed = self.activations + self.loss + self.resharded
        needed = self.remade + self.working + self.gradients + self.made + self.waiting
        return freed + needed + self.communication


def points_of_step(
    layout: Layout,
    stage: StageParts,
    running: Running,
    policy: StatePolicy,
    layers: list[Saved],
) -> Iterator[tuple[tuple[bool, bool], list[ActPoint]]]:
    """The points of a backward at which memory may peak, for each place that it has in a step.

    That is whether it is the first and whether it is the last that makes the stage's weight
    gradients; the last reduces them, if not each does.
    """
    each = partial(_backward_points, layout, stage, running, policy, layers)
    inner = each(reduces=policy.splits_gradient)
    reduces_once = policy.reducing_whole or (policy.reducing and not policy.splits_gradient)
    at_end = each(reduces=True) if reduces_once else inner
    for first, last in product((False, True), repeat=2):
        found = at_end if last else inner
        if policy.once:
            found = [_in_only_backward(layout, stage, policy, point) for point in found]
        if first and policy.remade:
            found = [_in_first_backward(layout, stage, policy, point) for point in found]
        else:
            found = [replace(point, made=0.0) for point in found]
        yield (first, last), found


def _in_first_backward(
    layout: Layout, stage: StageParts, policy: StatePolicy, point: ActPoint
) -> ActPoint:
    """A point of the first backward that makes gradients of a stage, with those it has made."""
    if point.done:
        return replace(point, made=stage_gradients(layout, stage, policy))
    if policy.splits_gradient or not point.reduces:
        return point  # whose message may have left a shard
    _, *blocks = _trained(layout, stage, policy)
    return replace(point, made=blocks[-1].size * policy.gradient if blocks else 0.0)


def _in_only_backward(
    layout: Layout, stage: StageParts, policy: StatePolicy, point: ActPoint
) -> ActPoint:
    """A point of a step's only backward, without the copies that are not there any longer."""
    if not point.done or policy.splits_copy or point.resharded:
        return point
    _, *blocks = _trained(layout, stage, policy)
    copies = sum(block.count * block.copied(policy) for block in blocks)
    return replace(point, resharded=-copies)


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
    weight gradients are there; in the layer before, while they are reduced; where whole ones
    are copied to be reduced; and at the embedding, when everything else is gone.
    """
    model, training = layout.config.model, layout.config.training
    tokens = training.micro_batch_size * training.seq_length / layout.grid.cp
    loss = total(loss_bytes(model, running)) if stage.head else Saved()
    vocabulary = model.trains_all * model.padded_vocab_size / layout.grid.tp * model.hidden_size
    kept = tokens * sum(layer.kept for layer in layers)
    gone, remade = -tokens * loss.kept, tokens * _remade_at_once(running, layers)
    messages, inside = buffers(layout, stage, running)
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
        if policy.reducing:
            kept_by_last = tokens * layers[-1].kept
            points += _after_last(layout, stage, policy, point, kept_by_last, reduces=reduces)
    if policy.reducing_whole and reduces:
        reduction = ActPoint("the reduction", loss=gone, communication=inside, reduces=True)
        each = [tokens * layer.kept for layer in layers]
        points += _reductions(layout, stage, policy, reduction, each)
    if stage.embedding:
        table = vocabulary * (layout.grid.tp if policy.whole_embedding else 1)
        first = ActPoint("the embedding", -kept, gone, gradients=table * policy.fresh, done=True)
        points.append(replace(first, communication=messages))
    ends, *_ = _trained(layout, stage, policy)
    if policy.reducing and reduces and ends.size:
        reduced = ends.size * _in_reduction(layout, policy)
        point = ActPoint("the ends of the stage", -kept, gone, gradients=reduced, done=True)
        points.append(replace(point, communication=messages))
    if policy.fresh_at_once:
        own = sum(block.count * block.size for block in _trained(layout, stage, policy))
        # The loss's part stands for the logits and their gradient, which others still refer to.
        points.append(ActPoint("the end of one graph", -kept, gradients=own * policy.fresh))
    return points or [ActPoint("backward")]


def _after_last(
    layout: Layout,
    stage: StageParts,
    policy: StatePolicy,
    point: ActPoint,
    kept: float,
    *,
    reduces: bool,
) -> Iterator[ActPoint]:
    """Where the last layer's gradients are all there, and beside the layer before in a message.

    `point`: the one within a layer; `kept`: bytes of activations of the last one.
    """
    *_, block = _trained(layout, stage, policy)
    layer = describe(layout.config.model, layer_kind(layout.config.model, stage.layers[-1]))
    each = _in_reduction(layout, policy) if reduces else policy.fresh
    end = replace(point, where="the end of the last layer", remade=0.0, working=0.0)
    yield replace(end, activations=-kept, gradients=block.size * each, reduces=reduces)
    if reduces and len(stage.layers) + stage.mtp > 1:
        # What was copied into the message is free; the MLP's outward linears come first.
        sent = block.size * (policy.reducing - policy.fresh)
        sent += _last_linears(layout, layer) * policy.fresh
        beside = replace(point, where="the layer before the last", reduces=True)
        activations, gradients = point.activations - kept, point.gradients + sent
        shard = block.size * _shard(layout, policy)
        leaving = policy.offloaded and num_shards(layout) > 1  # to the host; if alone, at once
        gradients, made = (gradients + shard, 0.0) if leaving else (gradients, shard)
        yield replace(beside, activations=activations, gradients=gradients, made=made)


def _in_reduction(layout: Layout, policy: StatePolicy) -> float:
    """Bytes of a parameter's gradient in reduction: as it comes, or as a shard anew, and sent."""
    return policy.reducing - policy.fresh + max(_shard(layout, policy), policy.fresh)


def _shard(layout: Layout, policy: StatePolicy) -> float:
    """Bytes of a parameter's gradient that a reduction makes anew on each of the ranks."""
    return policy.gradient / num_shards(layout) if policy.splits_gradient else 0.0


def _reductions(
    layout: Layout, stage: StageParts, policy: StatePolicy, point: ActPoint, kept: list[float]
) -> Iterator[ActPoint]:
    """The points at which ranks that share nothing reduce the last layer, and their last block.

    A rank that is alone divides no copy. `kept`: bytes of activations of each layer.
    """
    ends, *others = _trained(layout, stage, policy)
    alone = layout.grid.dp * layout.grid.cp == 1
    reducing = policy.reducing_whole / 2 if alone else policy.reducing_whole
    if kept:
        size = others[-1].size
        made = replace(point, gradients=size * reducing, resharded=-size * policy.copy)
        yield replace(made, activations=-kept[-1])
    copies = policy.copy * sum(block.count * block.size for block in (ends, *others))
    largest = max(block.size for block in (ends, *others))
    made = replace(point, gradients=largest * reducing, resharded=-copies, done=True)
    yield replace(made, activations=-sum(kept))


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
    return max((_trained_by(layout, linear) for linear in layer.mlp_inputs), default=0)


def _last_linears(layout: Layout, layer: Layer) -> float:
    """Parameters of an MLP's projections out of its inner features, on one rank."""
    inward = layer.mlp_inputs
    return sum(_trained_by(layout, op) for op in layer.after_mlp_input if op not in inward)


def _trained_by(layout: Layout, operation: Operation) -> int:
    """Parameters of the weights of a trained operation that it multiplies with, on one rank."""
    grid, weights = layout.grid, () if operation.frozen else operation.multiplied
    return sum(prod(weight.local(grid.tp, grid.ep, grid.etp)) for weight in weights)


def _tiled_sums(layout: Layout, layer: Layer, running: Running) -> float:
    """Bytes of the weight gradients that the tiles of an MLP add up, in at least fp32."""
    tiled = [op for op in layer.mlp if running.tiles(op.rerun_by) and not op.frozen]
    sizes = (prod(weight.local(layout.grid.tp)) for op in tiled for weight in op.multiplied)
    return max(running.element_bytes, 4) * sum(sizes)


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


def buffers(layout: Layout, stage: StageParts, running: Running) -> tuple[float, float]:
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
