"""How much memory each pipeline rank needs, when in the step, and for what.

A liveness sweep over the program: what is kept between forward and backward (counted in
`model.activations`), what waits for a deferred weight gradient, and what exists only while one act
runs, on top of the state that stays (`state.model_state`). All sizes are bytes on one device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fivefold.check import Layout
from fivefold.config.model import ModelConfig
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
from fivefold.plan.cluster import Cluster
from fivefold.plan.in_flight import Moment, moments
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
    """

    pp_rank: int
    phase: str
    act: str
    parts: Mapping[str, float]
    phases: Mapping[str, float]

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

    @property
    def fits(self) -> bool:
        """Whether no device runs out of memory."""
        return self.device_total <= self.capacity


@dataclass(frozen=True)
class _StageBytes:
    """What one microbatch of a stage holds, and what only exists while an act of the stage runs.

    Attributes:
        kept: between forward and backward.
        whole: what R makes anew of it.
        remade: what a backward without R makes anew at a time.
        waiting: between B and W.
        loss: of `kept`, logits and what else the loss keeps.
        forward: that a forward needs while it runs.
        backward: that a backward needs while it runs.
        buffers: of communication, while either runs.
        gradients: of weights, on their way to the accumulated ones.
    """

    kept: float
    whole: float
    remade: float
    waiting: float
    loss: float
    forward: float
    backward: float
    buffers: float
    gradients: float


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
    parallel, precision = layout.config.parallel, layout.config.training.precision
    policy = policy or engine_policy(parallel, precision)
    sizes = [_stage_bytes(layout, stage, running, policy) for stage in layout.split.stages]
    ranks = tuple(
        _rank_peak(layout, pp_rank, found, model_state(layout, pp_rank, policy=policy), sizes)
        for pp_rank, found in enumerate(moments(layout, splits_backward=splits))
    )
    return MemoryPrediction(ranks, cluster.reserved_bytes, cluster.gpu.memory_bytes)


def _stage_bytes(
    layout: Layout, stage: StageParts, running: Running, policy: StatePolicy
) -> _StageBytes:
    """Sizes of one microbatch of a stage, and of what its acts need while they run."""
    model, training = layout.config.model, layout.config.training
    tokens = training.micro_batch_size * training.seq_length / layout.grid.cp
    layers = _saved_by_layer(layout, stage, running)
    whole = total(layers)
    ends: list[Saved] = list(embedding_bytes(model, running).values()) if stage.embedding else []
    loss = total(loss_bytes(model, running)) if stage.head else Saved()
    first, *blocks = stage_blocks(layout, stage)
    width = policy.copy or policy.master
    largest = max((block.size for block in blocks), default=0)
    needed = [_backward_bytes(model, running, model.is_moe(i)) for i in stage.layers]
    moving = 2 * max((saved.offloaded for saved in layers), default=0.0)
    return _StageBytes(
        kept=tokens * (whole.kept + total(ends).kept + loss.kept),
        whole=tokens * whole.remade,
        remade=tokens * _remade_at_once(layout, layers),
        waiting=tokens * sum(_waiting_bytes(model, running, model.is_moe(i)) for i in stage.layers),
        loss=tokens * loss.kept,
        forward=tokens * (loss.remade + moving),
        backward=tokens * (max(loss.remade, max(needed, default=0.0)) + moving),
        buffers=tokens * _buffer_bytes(layout, stage, running),
        gradients=first.size * width + largest * policy.arriving,
    )


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


def _waiting_bytes(model: ModelConfig, running: Running, is_moe: bool) -> float:
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
    """Per token, the gradients that the backward of a layer holds at a time, at most.

    In the MLP dY, the gradient of its inner activation, those of gate and up, and the whole input
    and its gradient, which sequence parallelism gathers and scatters; in attention the same with
    heads in the place of inner features.
    """
    element, h, tp = running.element_bytes, model.hidden_size, running.tensor_parallel
    gates = 3 if model.gated_linear_unit else 2
    whole = (3 if running.sequence_parallel else 2) * h
    heads = (model.q_size + model.k_size + model.v_size + 2 * model.attention_size) / tp
    if not is_moe:
        return element * (whole + max(gates * model.ffn_size / tp, heads))
    rows = model.moe_router_topk * running.imbalance / running.token_parts
    inner = rows * (gates * model.expert_ffn_size + 2 * h)
    return element * (whole + max(inner + gates * model.shared_ffn_size / tp, heads))


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
    found: tuple[Moment, ...],
    state: ModelState,
    sizes: list[_StageBytes],
) -> RankMemory:
    own = [sizes[stage] for stage in stages_held(layout, pp_rank)]
    always = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
    }
    candidates = [(OPTIMIZER, "the optimizer updates", dict(always))]
    for moment in found:
        parts = always | {"gathered weights": state.gathered}
        running = [(kind, sizes[stage % len(sizes)]) for kind, stage in moment.acts]
        parts |= _held(moment, own) | _while_running(running)
        candidates.append((moment.phase, _in_words(moment), parts))
    phases: dict[str, float] = {}
    for phase, _, parts in candidates:
        phases[phase] = max(phases.get(phase, 0.0), sum(parts.values()))
    phase, act, parts = max(candidates, key=lambda found: sum(found[2].values()))
    return RankMemory(pp_rank, phase, act, {n: p for n, p in parts.items() if p}, phases)


def _held(moment: Moment, own: list[_StageBytes]) -> dict[str, float]:
    """What was there before the act that runs, and stays."""
    kept = list(zip(moment.kept, own, strict=True))
    return {
        "activations": sum(n * (s.kept - s.loss) for n, s in kept)
        + sum(n * s.whole for n, s in zip(moment.remade, own, strict=True)),
        "deferred weight gradients": sum(
            n * s.waiting for n, s in zip(moment.waiting, own, strict=True)
        ),
        "loss": sum(n * s.loss for n, s in kept),
    }


def _while_running(running: list[tuple[Kind, _StageBytes]]) -> dict[str, float]:
    parts = dict.fromkeys(("recomputed", "working set", "communication", "arriving gradients"), 0.0)
    for kind, size in running:
        parts["communication"] += size.buffers
        if kind is Kind.F or kind is Kind.R:
            parts["working set"] += size.forward
        elif kind is Kind.W:
            parts["arriving gradients"] += size.gradients
        else:
            parts["recomputed"] += size.remade
            parts["working set"] += size.backward
            parts["arriving gradients"] += size.gradients
    return parts


def _in_words(moment: Moment) -> str:
    words = {Kind.F: "forward", Kind.R: "recomputation", Kind.W: "weight gradients"}
    return " and ".join(f"{words.get(kind, 'backward')} of stage {s}" for kind, s in moment.acts)
