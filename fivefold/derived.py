"""Every number that a layout implies, with the product or sum that gives it."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from fivefold.check import Layout
from fivefold.config.model import ModelConfig
from fivefold.model.shape import (
    count_parameters,
    forward_flops,
    parameter_shapes,
    training_flops,
)
from fivefold.units import human_bytes, human_count, human_flops

Row = tuple[str, str, str]

_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
_COLUMN_WISE = ("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_ROW_WISE = ("o_proj", "down_proj")


@dataclass(frozen=True)
class ModelState:
    """Bytes that a rank keeps from one microbatch to the next, activations apart.

    Attributes:
        parameters: that the rank is responsible for, after tensor and pipeline parallelism.
        weights: master weights, and gathered or cast ones that stay.
        gradients: that are accumulated.
        optimizer: both moments of AdamW.
        gathered: of weights that are gathered for a layer and freed after it.
    """

    parameters: int
    weights: float
    gradients: float
    optimizer: float
    gathered: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.gathered


def local_parameters(model: ModelConfig, tp: int, shapes: dict[str, tuple[int, ...]]) -> int:
    """How many of the parameters in `shapes` one tensor-parallel rank holds.

    Splits as `tensor.install` does: q, k, v, gate, up and the vocabulary by rows, o and down by
    columns (a bias of theirs is whole), the rest whole; k and v whole where the key/value heads
    are fewer than the ranks.
    """
    columns = {*_COLUMN_WISE}
    if model.num_kv_heads % tp == 0:
        columns |= {"k_proj", "v_proj"}
    total = 0
    for name, shape in shapes.items():
        *_, module, kind = name.split(".")
        split = module in columns or (module in _ROW_WISE and kind == "weight")
        total += prod(shape) // (tp if split else 1)
    return total


def model_state(layout: Layout, pp_rank: int) -> ModelState:
    """What a rank of this pipeline rank keeps of weights, gradients and optimizer state.

    A parameter costs, with d shards, c bytes of the compute type and m of the master type:
    weights m/d, plus c where a gathered copy stays (all but ZeRO-3; not where no_shard computes in
    the master type); gradients m until they are reduced (no_shard, ZeRO-1), else m/d; moments
    2m/d. ZeRO-3 has besides two layers gathered, one that computes and one that arrives.
    """
    parallel, training = layout.config.parallel, layout.config.training
    strategy = parallel.data_parallel_sharding_strategy
    compute, master = _BYTES[training.precision], max(4, _BYTES[training.precision])
    shards = 1 if strategy == "no_shard" else layout.grid.dp_shard * layout.grid.cp
    own = _rank_parameters(layout, pp_rank)
    layer = _layer_parameters(layout)
    keeps_copy = strategy != "optim_grads_params" and not (
        strategy == "no_shard" and compute == master
    )
    accumulates_whole = strategy in ("no_shard", "optim")
    return ModelState(
        parameters=own,
        weights=own * (master / shards + (compute if keeps_copy else 0)),
        gradients=own * master / (1 if accumulates_whole else shards),
        optimizer=own * 2 * master / shards,
        gathered=2 * layer * compute if strategy == "optim_grads_params" else 0,
    )


def describe(layout: Layout) -> list[Row]:
    """(name, value, how it comes about) of every number that the layout implies."""
    return [
        *_ranks(layout),
        *_batch(layout),
        *_parameters(layout),
        *_flops(layout),
        *_memory(layout),
    ]


def as_table(rows: Iterable[Row]) -> str:
    """The rows as aligned text."""
    rows = list(rows)
    names, values = (max(len(row[i]) for row in rows) for i in (0, 1))
    return "\n".join(f"{n:<{names}}  {v:>{values}}  {why}".rstrip() for n, v, why in rows)


def _ranks(layout: Layout) -> list[Row]:
    grid, split = layout.grid, layout.split
    rows = [
        (
            "world",
            f"{grid.world_size}",
            f"pp {grid.pp} x dp {grid.dp} x cp {grid.cp} x tp {grid.tp}",
        ),
        ("data parallel", f"{grid.dp}", f"replicas {grid.dp_replicate} x shards {grid.dp_shard}"),
    ]
    if grid.pp > 1:
        stages = len(split.stages)
        why = f"pp {grid.pp} x {split.num_virtual} a rank, {layout.schedule}"
        rows.append(("stages", f"{stages}", why))
    return rows


def _batch(layout: Layout) -> list[Row]:
    training, dp = layout.config.training, layout.grid.dp
    size, each, length = training.global_batch_size, training.micro_batch_size, training.seq_length
    tokens = size * length
    return [
        (
            "microbatches",
            f"{layout.num_microbatches}",
            f"global batch {size} / (micro batch {each} x dp {dp})",
        ),
        ("tokens per step", f"{tokens:,}", f"global batch {size} x sequence {length}"),
        (
            "tokens in all",
            human_count(tokens * training.train_iters),
            f"{tokens:,} x {training.train_iters:,} steps",
        ),
    ]


def _parameters(layout: Layout) -> list[Row]:
    model = layout.config.model
    count, multiple = count_parameters(model), model.make_vocab_size_divisible_by
    tied = "" if model.untie_embeddings_and_output_weights else ", output tied to embedding"
    layer = count.layers // model.num_layers
    rows = [
        (
            "padded vocabulary",
            f"{model.padded_vocab_size:,}",
            f"{model.vocab_size:,} rounded up to a multiple of {multiple}",
        ),
        (
            "parameters",
            human_count(count.total),
            f"embedding {human_count(count.embedding)} + {model.num_layers} layers x "
            f"{human_count(layer)} + head {human_count(count.head)}{tied}",
        ),
    ]
    if len(layout.split.stages) > 1:
        each = [count_parameters(model, stage).total for stage in layout.split.stages]
        why = (
            " + ".join(map(human_count, each))
            if len(each) <= 8
            else f"{len(each)} stages, " + (f"{human_count(min(each))} to {human_count(max(each))}")
        )
        rows.append(("largest stage", human_count(max(each)), f"of {why}"))
    return rows


def _flops(layout: Layout) -> list[Row]:
    model, training = layout.config.model, layout.config.training
    flops = training_flops(model, training.seq_length)
    forward = forward_flops(model, training.seq_length)
    tokens = training.global_batch_size * training.seq_length
    return [
        (
            "FLOPs per token",
            human_flops(flops.total),
            f"3 x forward (matmul {human_flops(forward.matmul)} + causal attention "
            f"{human_flops(forward.attention)})",
        ),
        (
            "FLOPs per step",
            human_flops(flops.total * tokens),
            f"{human_flops(flops.total)} x {tokens:,} tokens",
        ),
    ]


def _memory(layout: Layout) -> list[Row]:
    states = [model_state(layout, rank) for rank in range(layout.grid.pp)]
    worst = max(range(layout.grid.pp), key=lambda rank: states[rank].total)
    state, parallel = states[worst], layout.config.parallel
    gathered = f" + gathered layers {human_bytes(state.gathered)}" if state.gathered else ""
    where = f", pipeline rank {worst}" if layout.grid.pp > 1 else ""
    return [
        (
            "model state a rank",
            human_bytes(state.total),
            f"weights {human_bytes(state.weights)} + gradients {human_bytes(state.gradients)} + "
            f"AdamW {human_bytes(state.optimizer)}{gathered}",
        ),
        (
            "",
            "",
            f"of {human_count(state.parameters)} parameters after tp {layout.grid.tp}{where}, "
            f"{parallel.data_parallel_sharding_strategy}, {layout.config.training.precision}",
        ),
    ]


def _rank_parameters(layout: Layout, pp_rank: int) -> int:
    model = layout.config.model
    shapes: dict[str, tuple[int, ...]] = {}
    for stage in layout.split.stages_of(pp_rank):
        shapes.update(parameter_shapes(model, layout.split.stages[stage]))
    return local_parameters(model, layout.grid.tp, shapes)


def _layer_parameters(layout: Layout) -> int:
    """Of the largest unit that is gathered at once: a layer."""
    model = layout.config.model
    names = {n: s for n, s in parameter_shapes(model).items() if n.startswith("layers.0.")}
    return local_parameters(model, layout.grid.tp, names)
