"""What one microbatch of a stage holds, and what its acts need beside that while they run.

All sizes are bytes on one device; what is kept between forward and backward is counted in
`model.activations`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

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
from fivefold.state import StatePolicy, stage_blocks


@dataclass(frozen=True)
class ActPoint:
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
class StageBytes:
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
    points: Mapping[Kind, tuple[ActPoint, ...]]


def stage_bytes(
    layout: Layout, stage: StageParts, running: Running, policy: StatePolicy
) -> StageBytes:
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
    forward = ActPoint("forward", working=tokens * loss.remade + moving)
    fresh = max((point.gradients for point in points), default=0.0)
    end = ActPoint("the end", -kept, -tokens * loss.kept, waiting=waiting)
    return StageBytes(
        kept=kept,
        loss=tokens * loss.kept,
        remade=tokens * whole.remade,
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
    )


def _backward_points(
    layout: Layout, stage: StageParts, running: Running, policy: StatePolicy
) -> list[ActPoint]:
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
            ActPoint("the output layer", working=working, gradients=vocabulary * policy.fresh)
        )
    if stage.layers:
        last = stage.layers[-1]
        is_moe = model.is_moe(last)
        saved = saved_activations(model, last, running, position=len(stage.layers) - 1)
        freed = sum(
            item.kept + item.remade for name, item in saved.items() if name in _FREED_BEFORE_FC1
        )
        point = ActPoint(
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
        points.append(ActPoint("the embedding", -kept, gone, gradients=vocabulary * policy.fresh))
    return points or [ActPoint("backward")]


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
