"""Every number that a layout implies, with the product or sum it comes from."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product

from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.stretched_rope import base_at, is_long, longrope_scale
from fivefold.config.training import TrainingConfig
from fivefold.counts.state import ModelState, model_state
from fivefold.counts.volumes import by_axis, step_volumes
from fivefold.description.activations import saved_activations
from fivefold.description.kinds import LayerKind, layer_kind, layer_kinds
from fivefold.description.running import Running
from fivefold.description.shape import (
    ModelParts,
    count_parameters,
    forward_flops,
    kinds_of,
    training_flops,
)
from fivefold.layout import Layout
from fivefold.pipeline.ir import Kind
from fivefold.units import human_bytes, human_count, human_flops, several

Row = tuple[str, str, str]
SHOWN = 3  # parts of a sum that are named


def describe(layout: Layout) -> list[Row]:
    """(name, value, derivation) of every number that the layout implies."""
    return [
        *_ranks(layout),
        *_batch(layout),
        *_parameters(layout),
        *_flops(layout),
        *_memory(layout),
        *moved_and_kept(layout),
        *_deferred(layout),
        *_recomputed(layout),
    ]


def moved_and_kept(layout: Layout) -> list[Row]:
    """Bytes that a rank sends in a step over each axis, and bytes that each kind of layer keeps."""
    return [*_sent(layout), *_kept(layout)]


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
        ("data parallel", f"{grid.dp}", _sharing(layout)),
    ]
    if layout.config.model.num_experts:
        stage = f"{grid.ranks_per_stage} ranks of a stage"
        why = f"ep {grid.ep} x etp {grid.etp} x {grid.edp} copies = {stage}"
        rows.append(("expert parallel", f"{grid.ep}", why))
    if grid.pp > 1:
        stages = len(split.stages)
        why = f"pp {grid.pp} x {split.num_virtual} a rank, {layout.schedule}"
        rows.append(("stages", f"{stages}", why))
    return rows


def _sharing(layout: Layout) -> str:
    """How data-parallel ranks share optimizer state."""
    if not layout.config.parallel.sharding.splits_optimizer:
        return "all replicas"
    return f"replicas {layout.grid.dp_replicate} x shards {layout.grid.dp_shard}"


def _batch(layout: Layout) -> list[Row]:
    training, dp = layout.config.training, layout.grid.dp
    size, each, length = training.global_batch_size, training.micro_batch_size, training.seq_length
    tokens = size * length
    return [
        (
            "microbatches",
            f"{layout.num_microbatches}",
            f"global batch {size:,} / (micro batch {each} x dp {dp})",
        ),
        ("tokens per step", f"{tokens:,}", f"global batch {size:,} x sequence {length:,}"),
        *_growing_batch(training),
        *_rotary(layout.config),
        ("tokens in all", human_count(training.samples * length), _all_tokens(training)),
    ]


def _rotary(config: Config) -> Iterator[Row]:
    """What `seq_length` decides: which of LongRoPE's lists is used, and the base of dynamic NTK."""
    model, length = config.model, config.training.seq_length
    if model.rope_type == "dynamic":
        base, sign = base_at(model, length), ">" if is_long(model, length) else "<="
        original = f"{model.original_max_position_embeddings:,} before scaling"
        yield "rotary base", f"{base:.6g}", f"dynamic NTK at sequence {length:,} {sign} {original}"
    if model.rope_type == "longrope":
        which, sign = ("long", ">") if is_long(model, length) else ("short", "<=")
        original = f"{model.original_max_position_embeddings:,} before scaling"
        why = f"LongRoPE at sequence {length:,} {sign} {original}"
        yield "rotary factors", which, f"{why}; features x {longrope_scale(model):.4g}"


def _growing_batch(training: TrainingConfig) -> Iterator[Row]:
    """The initial batch size, and the samples over which it grows to the whole batch."""
    if before := training.batch_sizes.smaller_steps:
        start, increment, samples = training.rampup_batch_size
        why = f"from {start:,} by {increment:,} at a time, over {samples:,} samples"
        yield "smaller batches", several(before, "step"), why


def _all_tokens(training: TrainingConfig) -> str:
    steps, length = training.num_steps, training.seq_length
    if training.rampup_batch_size:
        return f"{training.samples:,} samples of {steps:,} steps x sequence {length:,}"
    return f"{training.step_tokens:,} x {steps:,} steps"


def _parameters(layout: Layout) -> list[Row]:
    model = layout.config.model
    count, multiple = count_parameters(model), model.make_vocab_size_divisible_by
    tied = "" if model.untie_embeddings_and_output_weights else ", output tied to embedding"
    rows = [
        (
            "padded vocabulary",
            f"{model.padded_vocab_size:,}",
            f"{model.vocab_size:,} rounded up to a multiple of {multiple}",
        ),
        (
            "parameters",
            human_count(count.total),
            f"embedding {human_count(count.embedding)} + {_layers(model)} + head "
            f"{human_count(count.head)}{tied}"
            + (f" + multi-token prediction {human_count(count.mtp)}" if count.mtp else ""),
        ),
    ]
    if model.lora_rank is not None:
        lengths = " and magnitudes of rows" if model.use_dora else ""
        why = f"adapters of rank {model.lora_rank}{lengths}; all else is frozen"
        trained = count.total - count_parameters(model.base).total
        rows.append(("trained parameters", human_count(trained), why))
    if model.num_experts:
        active = count_parameters(model, active=True)
        why = f"{model.moe_router_topk} of {model.num_experts} experts for each token"
        rows.append(("active parameters", human_count(active.total), why))
    if model.unmodelled:
        rows.append(("left out", "", ", ".join(model.unmodelled)))
    if len(layout.split.stages) > 1:
        each = [count_parameters(model, stage).total for stage in layout.split.stages]
        why = (
            " + ".join(map(human_count, each))
            if len(each) <= 8
            else f"{len(each)} stages, " + (f"{human_count(min(each))} to {human_count(max(each))}")
        )
        rows.append(("largest stage", human_count(max(each)), f"of {why}"))
    return rows


def _layers(model: ModelConfig) -> str:
    """'32 layers x 218 M', or dense layers and layers with experts separately."""
    kinds, parts = kinds_of(model, range(model.num_layers)), []
    for kind, count in kinds.items():
        size = count_parameters(model, ModelParts((layer_kinds(model)[kind],))).layers
        number = several(count, "layer") + _with(kind)
        if len(kinds) > 1 and not _with(kind):
            number = several(count, "dense layer")
        parts.append(f"{number} x {human_count(size)}")
    return " + ".join(parts)


def _with(kind: LayerKind) -> str:
    """The property that distinguishes a kind of layer from others of the model."""
    wide = " in bf16" * kind.wide
    if kind.mixer is not None:
        return f" with {_MIXERS[kind.mixer]}{wide}"
    return " with experts" * kind.experts + wide


_MIXERS = {"M": "Mamba-2", "*": "attention", "-": "an MLP", "E": "experts"}


def _flops(layout: Layout) -> list[Row]:
    model, tokens = layout.config.model, layout.config.training.step_tokens
    flops = training_flops(model, layout.config.attended_length)
    forward = forward_flops(model, layout.config.attended_length)
    times = "3 x forward"
    if frozen := 3 * forward.total - flops.total:
        sparse = " or pass no gradient on" * model.is_sparse
        times += f", but 2 x for {human_flops(frozen)} of weights that are frozen{sparse}"
    return [
        (
            "FLOPs per token",
            human_flops(flops.total),
            f"{times} (matmul {human_flops(forward.matmul)} + causal attention "
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
    gathered = (
        f" + update buffers {human_bytes(state.update_buffers)}" if state.update_buffers else ""
    )
    gathered += f" + 8-bit scales {human_bytes(state.scales)}" if state.scales else ""
    gathered += f" + gathered blocks {human_bytes(state.gathered)}" if state.gathered else ""
    where = f", pipeline rank {worst}" if layout.grid.pp > 1 else ""
    optimizer = {"adam": "AdamW", "muon": "Muon"}[layout.config.optimizer.optimizer]
    return [
        (
            "model state a rank",
            human_bytes(state.total),
            f"weights {human_bytes(state.weights)} + gradients {human_bytes(state.gradients)} + "
            f"{optimizer} {human_bytes(state.optimizer)}{gathered}",
        ),
        (
            "",
            "",
            f"of {human_count(state.parameters)} parameters after tp {layout.grid.tp}{where}, "
            f"{parallel.data_parallel_sharding_strategy}, {layout.config.training.precision}",
        ),
        *_off_device(layout, states),
    ]


def _off_device(layout: Layout, states: Sequence[ModelState]) -> Iterator[Row]:
    """State in host memory and on a disk, of the pipeline rank with the most."""
    weights = "weights, " if layout.config.memory.param_cpu_offload else ""
    what, host = f"offloaded {weights}masters and moments", max(state.host for state in states)
    disk = max(state.disk for state in states)
    if host:
        kept = "buffers for what comes from the disk" if disk else what
        yield "in host memory a rank", human_bytes(host), f"{kept}, and buffers for gradients"
    if disk:
        yield "on a disk a rank", human_bytes(disk), what


def _sent(layout: Layout) -> list[Row]:
    """Bytes by axis, as in an audit, of the pipeline rank that sends the most."""
    grid = layout.grid
    each = [step_volumes(layout, rank * grid.ranks_per_stage) for rank in range(grid.pp)]
    axes = dict.fromkeys(flow.axis for flows in each for flow in flows if flow.axis != "world")
    rows = []
    for axis in axes:
        sizes = [by_axis(flows).get(axis, 0.0) for flows in each]
        most = max(range(grid.pp), key=lambda rank: sizes[rank])
        purposes = defaultdict[str, float](float)
        for flow in each[most]:
            if flow.axis == axis:
                purposes[flow.purpose] += flow.size
        rows.append((f"sent over {axis}", human_bytes(sizes[most]), _summed(purposes)))
    return rows


def _kept(layout: Layout) -> list[Row]:
    """Bytes per microbatch that a layer of each kind keeps for its backward."""
    config = layout.config
    model, running, tokens = config.model, Running.of(config), config.rank_tokens
    first = {layer_kind(model, layer): layer for layer in reversed(range(model.num_layers))}
    rows = []
    memory = config.memory
    ways = {" " + "recomputed " * memory.recomputes_first_layers: memory}
    if memory.recomputes_first_layers:
        ways = {" ": memory.without_recompute} | ways
    for (kind, layer), (which, own) in product(first.items(), ways.items()):
        saved = saved_activations(model, layer, replace(running, memory=own))
        parts = {name: tokens * each.kept for name, each in saved.items()}
        name = f"kept by a{which}layer{_with(kind)}"
        rows.append((name, human_bytes(sum(parts.values())), _summed(parts)))
    return rows


def _summed(parts: Mapping[str, float]) -> str:
    """The largest parts with their sizes, and the sum of all others."""
    large = sorted((part for part in parts.items() if part[1]), key=lambda part: -part[1])
    shown = [f"{name} {human_bytes(size)}" for name, size in large[:SHOWN]]
    rest = large[SHOWN:]
    if rest:
        shown.append(f"{len(rest)} more {human_bytes(sum(size for _, size in rest))}")
    return " + ".join(shown)


def _recomputed(layout: Layout) -> list[Row]:
    """Recomputed layers of stages, and forwards repeated because of recompute_in_flight_limit."""
    again, memory, rows = layout.recomputed(), layout.config.memory, list[Row]()
    if memory.recomputes_first_layers:
        numbers = memory.recompute_num_layers
        sizes = [len(stage.layers) for stage in layout.split.stages]
        each = [min(size, numbers[i % len(numbers)]) for i, size in enumerate(sizes)]
        what = f"{' + '.join(map(str, each))}, the first of each stage"
        rows.append(("layers recomputed", f"{sum(each)} of {sum(sizes)}", what))
    if again:
        forwards = len(layout.split.stages) * layout.num_microbatches
        limit, (stage, most) = memory.recompute_in_flight_limit, again.most_common(1)[0]
        what = f"recompute_in_flight_limit {limit}; {most} of stage {stage}, which are most"
        rows.append(("forwards run twice", f"{again.total()} of {forwards}", what))
    return rows


def _deferred(layout: Layout) -> list[Row]:
    """Memory cost of a schedule that defers dW."""
    program = layout.order().program()
    last = program.num_weight_parts - 1
    changes = {(Kind.B, 0): 1, (Kind.W, last): -1}
    most = 0
    for acts in program.ranks:
        kids = (kid for act in acts for kid in act.elementary)
        most = max(most, *accumulate(changes.get((kid.kind, kid.part), 0) for kid in kids))
    if not most:
        return []
    sharded = layout.config.parallel.sharding.splits_gradients
    return [
        (
            "dW waits",
            f"{most} x microbatch",
            "at most, on a rank: x and dY of every linear layer of a stage; "
            + ("reduced block by block when computed" if sharded else "summed unsharded"),
        )
    ]
