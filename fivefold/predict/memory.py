"""How much memory each pipeline rank needs, when in the step, and for what.

A liveness sweep over the program: what is kept between forward and backward (counted in
`model.activations`), what waits for a deferred weight gradient, and what exists only while one act
runs, on top of the state that stays (`state.model_state`). All sizes are bytes on one device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.config.model import ModelConfig
from fivefold.layout import Layout
from fivefold.model.activations import (
    Running,
    Saved,
    embedding_bytes,
    loss_bytes,
    saved_activations,
    total,
)
from fivefold.model.shape import StageParts
from fivefold.pipeline.ir import Kind
from fivefold.predict.cluster import Cluster
from fivefold.predict.liveness import Acts, Moments, moments
from fivefold.state import (
    ModelState,
    StatePolicy,
    engine_policy,
    model_state,
    stage_blocks,
    stages_held,
)

OPTIMIZER = "optimizer step"


@dataclass(frozen=True)
class RankMemory:
    """The peak of one pipeline rank.

    Attributes:
        pp_rank: which one.
        phase: of the step in which the peak falls.
        act: that runs then, in words.
        parts: what the peak is made of; they add up to it.
        phases: peak of each phase of the step.
        host: bytes in host memory, at most: optimizer state and activations that are offloaded.
    """

    pp_rank: int
    phase: str
    act: str
    parts: Mapping[str, float]
    phases: Mapping[str, float]
    host: float = 0.0

    @cached_property
    def peak(self) -> float:
        """Bytes that are allocated at the same time, at most: torch's `max_memory_allocated`."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPrediction:
    """The peaks of all pipeline ranks.

    Attributes:
        ranks: in order.
        reserved: of the device, by the driver, NCCL and fragmentation.
        capacity: of the device.
    """

    ranks: tuple[RankMemory, ...]
    reserved: float
    capacity: float

    @cached_property
    def worst(self) -> RankMemory:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def max_allocated(self) -> float:
        """The highest peak, as torch's allocator counts."""
        return self.worst.peak

    @property
    def device_total(self) -> float:
        """The highest peak with what the allocator does not count, as `nvidia-smi` does."""
        return self.max_allocated + self.reserved

    @cached_property
    def host(self) -> float:
        """Bytes in host memory of the rank that has most there."""
        return max(rank.host for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether no device runs out of memory."""
        return self.device_total <= self.capacity


@dataclass(frozen=True)
class _Point:
    """A point of time in an act, by what is there beyond, or no longer, at the act's start.

    Attributes:
        where: in words.
        activations: that are freed by then (negative), of those kept or made anew.
        loss: that is freed by then (negative).
        remade: activations made anew.
        working: gradients of activations, and what the loss computes.
        gradients: of weights, on their way to the accumulated ones.
        waiting: for their weight gradients, where these are computed later.
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
        """All of it."""
        freed = self.activations + self.loss
        return freed + self.remade + self.working + self.gradients + self.waiting


@dataclass(frozen=True)
class _StageBytes:
    """What one microbatch of a stage holds, and what only exists while an act of the stage runs.

    Attributes:
        kept: between forward and backward, the loss apart.
        loss: the same, of logits and what else the loss keeps.
        remade: what R makes anew.
        waiting: between B and W.
        buffers: of communication, while an act runs.
        moved: to host memory, between forward and backward.
        points: of each kind of act.
    """

    kept: float
    loss: float
    remade: float
    waiting: float
    buffers: float
    moved: float
    points: Mapping[Kind, tuple[_Point, ...]]


def peak_memory(
    layout: Layout,
    cluster: Cluster,
    *,
    policy: StatePolicy | None = None,
    imbalance: float = 1.0,
) -> MemoryPrediction:
    """The memory that each pipeline rank needs.

    Args:
        layout: of the run.
        cluster: whose devices hold it.
        policy: of the framework that runs it; None: Fivefold, which also sends dX before it
            computes dW where it can.
        imbalance: tokens of the fullest rank's experts, over their even share.
    """
    running = Running.of(layout.config, imbalance=imbalance)
    splits = policy is None and layout.defers_weights
    policy = policy or engine_policy(layout.config)
    kinds, known = [], {}
    for stage in layout.split.stages:
        ends = (stage.embedding, stage.head, stage.mtp)
        kinds.append((*ends, *map(layout.config.model.is_moe, stage.layers)))
        if kinds[-1] not in known:
            known[kinds[-1]] = _stage_bytes(layout, stage, running, policy)
    sizes = [known[kind] for kind in kinds]
    states: dict[tuple[object, ...], ModelState] = {}
    ranks = []
    for pp_rank, found in enumerate(moments(layout, splits_backward=splits)):
        held = tuple(kinds[stage] for stage in stages_held(layout, pp_rank))
        if held not in states:
            states[held] = model_state(layout, pp_rank, policy=policy)
        ranks.append(_rank_peak(layout, pp_rank, found, states[held], sizes))
    return MemoryPrediction(tuple(ranks), cluster.reserved_bytes, cluster.gpu.memory_bytes)


def _stage_bytes(
    layout: Layout, stage: StageParts, running: Running, policy: StatePolicy
) -> _StageBytes:
    """Sizes of one microbatch of a stage, and of what its acts need while they run."""
    model, training = layout.config.model, layout.config.training
    tokens = training.micro_batch_size * training.seq_length / layout.grid.cp
    layers = _saved_by_layer(layout, stage, running)
    ends: list[Saved] = list(embedding_bytes(model, running).values()) if stage.embedding else []
    loss = total(loss_bytes(model, running)) if stage.head else Saved()
    whole = total(layers)
    waiting = tokens * sum(waiting_bytes(model, running, model.is_moe(i)) for i in stage.layers)
    moving = 2 * tokens * max((saved.offloaded for saved in layers), default=0.0)
    kept = tokens * (whole.kept + total(ends).kept)
    points = _backward_points(layout, stage, running, policy)
    forward = _Point("forward", working=tokens * loss.remade + moving)
    fresh = max((point.gradients for point in points), default=0.0)
    end = _Point("the end", -kept, -tokens * loss.kept, waiting=waiting)
    return _StageBytes(
        kept=kept,
        loss=tokens * loss.kept,
        remade=tokens * whole.remade,
        waiting=waiting,
        buffers=tokens * _buffer_bytes(layout, stage, running),
        moved=tokens * whole.offloaded,
        points={
            Kind.F: (forward,),
            Kind.R: (_Point("recomputation"),),
            Kind.BW: tuple(replace(p, working=p.working + moving) for p in points),
            Kind.B: (*(replace(p, working=p.working + moving, gradients=0.0) for p in points), end),
            Kind.W: (_Point("weight gradients", gradients=fresh),),
        },
    )


def _backward_points(
    layout: Layout, stage: StageParts, running: Running, policy: StatePolicy
) -> list[_Point]:
    """Where in the backward of a stage memory may peak.

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
            _Point("the output layer", working=working, gradients=vocabulary * policy.fresh)
        )
    if stage.layers:
        last = stage.layers[-1]
        is_moe = model.is_moe(last)
        saved = saved_activations(model, last, running, position=len(stage.layers) - 1)
        freed = sum(
            item.kept + item.remade for name, item in saved.items() if name in _FREED_BEFORE_FC1
        )
        point = _Point(
            "the last layer",
            activations=-tokens * freed,
            loss=gone,
            remade=remade,
            working=tokens * _backward_bytes(model, running, is_moe),
            gradients=0.0 if policy.placeholder else _first_linear(layout, is_moe) * policy.fresh,
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
        points.append(_Point("the embedding", -kept, gone, gradients=vocabulary * policy.fresh))
    return points or [_Point("backward")]


_FREED_BEFORE_FC1 = frozenset(
    {"mlp_act", "fc2", "mlp_dropout", "moe_act", "expert_fc2", "combine", "shared_experts"}
)
"""What the backward of an MLP is done with when it comes to the gradient of its first weight."""


def _first_linear(layout: Layout, is_moe: bool) -> float:
    """Parameters of an MLP's projections into its inner features, on one rank."""
    model, grid = layout.config.model, layout.grid
    wide = model.hidden_size * (2 if model.gated_linear_unit else 1)
    if not is_moe:
        return wide * model.ffn_size / grid.tp
    assert model.num_experts is not None
    experts = wide * model.expert_ffn_size * model.num_experts / grid.ep / grid.etp
    return max(experts, wide * model.shared_ffn_size / grid.tp)


def _saved_by_layer(layout: Layout, stage: StageParts, running: Running) -> list[Saved]:
    """Bytes per token of each layer of a stage, layers of further prediction last."""
    model = layout.config.model
    numbers = [*stage.layers, *range(model.num_layers, model.num_layers + stage.mtp)]
    by_place = running.memory.recompute_granularity == "full"
    known: dict[tuple[bool, bool, int], Saved] = {}
    result = []
    for place, layer in enumerate(numbers):
        kind = (model.is_moe(layer), layer >= model.num_layers, place if by_place else 0)
        if kind not in known:
            known[kind] = total(saved_activations(model, layer, running, position=place))
        result.append(known[kind])
    return result


def _remade_at_once(layout: Layout, layers: list[Saved]) -> float:
    """The most that is made anew at a time: a group of layers, or parts of one."""
    memory = layout.config.memory
    full = memory.recompute_granularity == "full" and memory.recompute_method == "uniform"
    group = memory.recompute_num_layers if full else 1
    sums = [
        sum(layer.remade for layer in layers[start : start + group])
        for start in range(0, len(layers), group)
    ]
    return max(sums, default=0.0)


def waiting_bytes(model: ModelConfig, running: Running, is_moe: bool) -> float:
    """Per token, what the weight gradients of a layer need: x and dY of each linear layer."""
    narrow, element = running.input_bytes, running.element_bytes
    h, tp, tokens = model.hidden_size, running.tensor_parallel, running.token_parts
    heads = model.q_size + model.k_size + model.v_size
    x = narrow * (h / tokens + model.attention_size / tp)
    grad = element * (heads / tp + h)
    gates = 2 if model.gated_linear_unit else 1
    if not is_moe:
        inner = model.ffn_size / tp
        return x + narrow * (h / tokens + inner) + grad + element * (gates * inner + h)
    rows = model.moe_router_topk * running.imbalance / tokens
    inner = rows * model.expert_ffn_size + model.shared_ffn_size / tp
    x += narrow * (h / tokens + rows * h * running.expert_tensor_parallel + inner)
    return x + grad + element * (gates * inner + h * (1 + rows))


def _backward_bytes(model: ModelConfig, running: Running, is_moe: bool) -> float:
    """Per token, gradients that are there when an MLP computes that of its first weight.

    dY of the residual stream, those of its inner features, dX, and the input if it is gathered.
    """
    element, h, tp = running.element_bytes, model.hidden_size, running.tensor_parallel
    gates = 2 if model.gated_linear_unit else 1
    around = h / running.token_parts + (2 * h if running.sequence_parallel else h)
    if not is_moe:
        return element * (around + gates * model.ffn_size / tp)
    rows = model.moe_router_topk * running.imbalance / running.token_parts
    inner = rows * (gates * model.expert_ffn_size / running.expert_tensor_parallel + h)
    return element * (h / running.token_parts + inner)


def _buffer_bytes(layout: Layout, stage: StageParts, running: Running) -> float:
    """Per token, what messages, gathered keys and values and dispatched tokens occupy."""
    model, grid = layout.config.model, layout.grid
    element, size = running.element_bytes, 0.0
    if grid.pp > 1:
        size += 2 * element * model.hidden_size / running.token_parts
    if grid.cp > 1 and stage.layers:
        keys = element * (model.k_size + model.v_size) / running.tensor_parallel
        gathers = "all_gather" in layout.config.parallel.cp_comm_type
        # A ring holds the block that it works on and the one that arrives, and their gradients.
        size += keys * (2 * grid.cp if gathers else 4)
    if grid.ep > 1 and any(map(model.is_moe, stage.layers)):
        rows = model.moe_router_topk * running.imbalance / running.token_parts
        size += 2 * element * model.hidden_size * rows
    return size


def _rank_peak(
    layout: Layout,
    pp_rank: int,
    found: Moments,
    state: ModelState,
    sizes: list[_StageBytes],
) -> RankMemory:
    own = [sizes[stage] for stage in stages_held(layout, pp_rank)]
    always = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
    }
    start = sum(always.values())
    points = [_worst_points(running, sizes) for running in found.running]
    buffers = [sum(sizes[s % len(sizes)].buffers for _, s in acts) for acts, _ in found.running]
    worst = [
        buffer + sum(point.size for point in each)
        for buffer, each in zip(buffers, points, strict=True)
    ]
    held = _held(found, own)
    host = state.host + float((found.kept @ np.array([size.moved for size in own])).max())
    peaks = start + state.gathered + sum(held.values()) + np.array(worst)[found.which]
    phases = {OPTIMIZER: start}
    phases |= {phase: float(peaks[at].max()) for phase, at in found.phases()}
    moment = int(peaks.argmax())
    if peaks[moment] < start:
        return RankMemory(pp_rank, OPTIMIZER, "the optimizer updates", always, phases, host)
    number = int(found.which[moment])
    parts = always | {"gathered weights": state.gathered}
    parts |= {name: float(size[moment]) for name, size in held.items()}
    parts["activations"] += sum(point.activations for point in points[number])
    parts["recomputed"] = sum(point.remade for point in points[number])
    parts["loss"] += sum(point.loss for point in points[number])
    parts["deferred weight gradients"] += sum(point.waiting for point in points[number])
    parts["working set"] = sum(point.working for point in points[number])
    parts["arriving gradients"] = sum(point.gradients for point in points[number])
    parts["communication"] = buffers[number]
    kept = {name: part for name, part in parts.items() if part}
    words = _in_words(found.running[number], points[number])
    return RankMemory(pp_rank, found.phase(moment), words, kept, phases, host)


def _worst_points(running: Acts, sizes: list[_StageBytes]) -> list[_Point]:
    """Of each act that runs the point that needs most, a second copy of the model included."""
    acts, remade = running
    found = [
        max(sizes[stage % len(sizes)].points[kind], key=lambda point: point.size)
        for kind, stage in acts
    ]
    if remade:  # an R has made it anew already
        return [replace(point, remade=0.0) for point in found]
    return found


def _held(found: Moments, own: list[_StageBytes]) -> dict[str, NDArray[np.float64]]:
    """What was there before the act that runs, of every moment."""
    kept, remade, loss, waiting = np.array(
        [(size.kept, size.remade, size.loss, size.waiting) for size in own]
    ).T
    return {
        "activations": found.kept @ kept + found.remade @ remade,
        "loss": found.kept @ loss,
        "deferred weight gradients": found.waiting @ waiting,
    }


def _in_words(running: Acts, points: list[_Point]) -> str:
    words = []
    for (kind, stage), point in zip(running[0], points, strict=True):
        backward = kind in (Kind.B, Kind.BW)
        what = f"backward at {point.where}" if backward else point.where
        words.append(f"{what} of stage {stage}")
    return " and ".join(words)
