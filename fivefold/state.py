"""What a rank keeps from one microbatch to the next: weights, gradients, optimizer state.

How many bytes a parameter costs is a framework's policy; how many parameters a rank holds follows
from the layout alone. Planner, audit and the table of derived numbers all count here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType

from fivefold.check import Layout
from fivefold.config.model import ModelConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.model.shape import Shapes, StageParts, embedding_shapes, head_shapes, layer_shapes

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp32": 4, "fp64": 8})

KEY_VALUE = ("k_proj", "v_proj")
BY_ROWS = ("q_proj", *KEY_VALUE, "gate_proj", "up_proj", "embed_tokens", "lm_head")
BY_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class StatePolicy:
    """Bytes that a framework keeps per parameter, and which of them data-parallel ranks split.

    Attributes:
        copy: of a weight in the compute type beside its master; 0 if the master computes.
        gradient: of an accumulated gradient.
        master: of the weight that the optimizer updates.
        moments: of the optimizer's moments, all together.
        splits_copy: copies exist only while their block computes (ZeRO-3).
        splits_gradient: gradients are reduced to their shard in every microbatch (ZeRO-2, 3).
        splits_optimizer: master and moments are sharded (ZeRO-1, 2, 3).
        in_flight: layers whose copies are held at once where they are split: one that computes,
            and those that arrive. The ends of a stage are held as long as it runs.
    """

    copy: float
    gradient: float
    master: float
    moments: float
    splits_copy: bool = False
    splits_gradient: bool = False
    splits_optimizer: bool = False
    in_flight: int = 2


def engine_policy(parallel: ParallelConfig, precision: str) -> StatePolicy:
    """Fivefold's own: masters and gradients in at least fp32, copies in the compute type."""
    strategy = parallel.data_parallel_sharding_strategy
    compute, master = ELEMENT_BYTES[precision], max(4, ELEMENT_BYTES[precision])
    shared = strategy != "no_shard"
    return StatePolicy(
        copy=compute if shared or compute != master else 0,
        gradient=master,
        master=master,
        moments=2 * master,
        splits_copy=strategy == "optim_grads_params",
        splits_gradient=strategy in ("optim_grads", "optim_grads_params"),
        splits_optimizer=shared,
    )


@dataclass(frozen=True)
class ModelState:
    """Bytes that a rank keeps from one microbatch to the next, activations apart.

    Attributes:
        parameters: that the rank is responsible for, after tensor and pipeline parallelism.
        masters: weights that the optimizer updates.
        copies: of weights, in the compute type, that stay.
        gradients: that are accumulated.
        optimizer: the moments.
        gathered: copies of layers, and of a stage's ends, gathered to compute and freed after it.
    """

    parameters: int
    masters: float
    copies: float
    gradients: float
    optimizer: float
    gathered: float

    @property
    def weights(self) -> float:
        """Masters, and copies that stay."""
        return self.masters + self.copies

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.gathered


def local_shape(model: ModelConfig, tp: int, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The part of a parameter that one tensor-parallel rank holds.

    Splits as `tensor.install` does: q, k, v, gate, up and the vocabulary by rows, o and down by
    columns (a bias of theirs is whole), the rest whole; k and v whole where the key/value heads
    are fewer than the ranks.
    """
    *_, module, kind = name.split(".")
    if module in BY_ROWS and not (module in KEY_VALUE and model.num_kv_heads % tp):
        return (shape[0] // tp, *shape[1:])
    if module in BY_COLUMNS and kind == "weight":
        return (shape[0], shape[1] // tp)
    return shape


def stage_blocks(layout: Layout, stage: StageParts) -> Iterator[tuple[Shapes, int]]:
    """What a tensor-parallel rank holds of a stage: (local shapes of a block, how many of it).

    A block is a layer, or the ends of the model, which are one with their stage.
    """
    model, tp = layout.config.model, layout.grid.tp
    yield _ends(model, tp, stage.embedding, stage.head), 1
    if stage.layers:
        yield _layer(model, tp), len(stage.layers)


@cache
def _layer(model: ModelConfig, tp: int) -> Shapes:
    return {n: local_shape(model, tp, n, s) for n, s in layer_shapes(model).items()}


@cache
def _ends(model: ModelConfig, tp: int, embedding: bool, head: bool) -> Shapes:
    shapes = dict(embedding_shapes(model)) if embedding else {}
    if head:
        shapes |= head_shapes(model)
        if embedding and not model.untie_embeddings_and_output_weights:
            del shapes["lm_head.weight"]
    return {n: local_shape(model, tp, n, s) for n, s in shapes.items()}


def num_shards(layout: Layout) -> int:
    """Ranks that share the optimizer state of a dense parameter."""
    strategy = layout.config.parallel.data_parallel_sharding_strategy
    return 1 if strategy == "no_shard" else layout.grid.dp_shard * layout.grid.cp


def held(shape: tuple[int, ...], shards: int, shard: int) -> int:
    """Elements of a parameter in one shard: FSDP2 splits rows, the last shards may be short."""
    each = -(-shape[0] // shards)
    return min(max(shape[0] - shard * each, 0), each) * prod(shape[1:])


def model_state(
    layout: Layout, pp_rank: int, shard: int = 0, policy: StatePolicy | None = None
) -> ModelState:
    """What a rank keeps of weights, gradients and optimizer state.

    Args:
        layout: of the run.
        pp_rank: of the rank.
        shard: its index among those that share the state; the first one holds the most.
        policy: of the framework; None: of Fivefold.
    """
    config = layout.config
    policy = policy or engine_policy(config.parallel, config.training.precision)
    shards = num_shards(layout)
    whole = own = gathered = 0
    for index in layout.split.stages_of(pp_rank):
        sizes = []
        for shapes, count in stage_blocks(layout, layout.split.stages[index]):
            sizes.append(sum(map(prod, shapes.values())))
            whole += count * sizes[-1]
            own += count * sum(held(shape, shards, shard) for shape in shapes.values())
        ends, *layers = sizes
        gathered = max(gathered, ends + policy.in_flight * max(layers, default=0))
    optimizer = own if policy.splits_optimizer else whole
    return ModelState(
        parameters=whole,
        masters=optimizer * policy.master,
        copies=0 if policy.splits_copy else whole * policy.copy,
        gradients=(own if policy.splits_gradient else whole) * policy.gradient,
        optimizer=optimizer * policy.moments,
        gathered=gathered * policy.copy if policy.splits_copy else 0,
    )
