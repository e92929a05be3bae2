"""What one rank did in one step, measured or expected, and the file that keeps it; torch-free."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from fivefold.errors import DataError
from fivefold.files import read_json, write_atomic
from fivefold.layout import Layout
from fivefold.model.activations import (
    Saved,
    bookkeeping_bytes,
    embedding_bytes,
    loss_bytes,
    saved_activations,
    total,
)
from fivefold.model.running import Running
from fivefold.model.shape import layer_weights
from fivefold.state import model_state, num_shards, stages_held
from fivefold.volumes import by_axis, step_volumes

Amount = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class RankRecord:
    """One step of one rank. Sizes are bytes.

    Attributes:
        rank: whose.
        step: which, counted from 1.
        sent: by mesh axis.
        parameters: that the optimizer updates.
        gradients: when the optimizer takes them, all reductions done.
        optimizer: moments.
        activations: kept between forward and backward of one microbatch, by stage.
        multiplications: floating-point operations of matrix products, attention's apart.
        packed: whether rows of the microbatch that `activations` are of held several documents.
        any_packed: whether rows of any microbatch of the step did.
        peak_allocated: of the device's memory in the step; None where nobody counts.
    """

    rank: Annotated[int, Meta(ge=0)]
    step: Annotated[int, Meta(ge=1)]
    sent: Mapping[str, Amount]
    parameters: Amount
    gradients: Amount
    optimizer: Amount
    activations: Mapping[Annotated[int, Meta(ge=0)], Amount]
    multiplications: Amount
    packed: bool = False
    any_packed: bool = False
    peak_allocated: Amount | None = None


def write_record(folder: Path, record: RankRecord) -> None:
    """Keep a record as folder/rank-N.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"rank-{record.rank}.json", json.dumps(asdict(record), indent=2) + "\n")


def read_records(folder: Path) -> list[RankRecord]:
    """All ranks' records, in order.

    Raises:
        DataError: none is there, one is missing, or one cannot be read.
    """
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        raise DataError(
            f"{folder} has no records: nothing was measured in that run\n"
            "  try: train with --audit, which measures one step"
        )
    records = [read_json(path, RankRecord, DataError) for path in paths]
    records.sort(key=lambda record: record.rank)
    missing = sorted({*range(len(records))} - {record.rank for record in records})
    if missing:
        raise DataError(f"{folder} lacks the record of rank {missing[0]}")
    return records


def expected_record(layout: Layout, measured: RankRecord) -> RankRecord:
    """What theory says that the rank of a record does in that step."""
    at = layout.grid.coordinates(measured.rank)
    shard = at["dp_shard"] * layout.grid.cp + at["cp"] if num_shards(layout) > 1 else 0
    state = model_state(layout, at["pp"], shard)
    on_gpu, count = measured.peak_allocated is not None, len(layout.split.stages)
    # A second copy of the model has its own stages, numbered on from those of the first.
    stages = [
        stage + copy * count
        for copy, stage in enumerate(stages_held(layout, at["pp"]))
        if layout.num_copies > 1
    ] or stages_held(layout, at["pp"])
    return replace(
        measured,
        sent=by_axis(step_volumes(layout, measured.rank)),
        parameters=state.masters,
        gradients=state.masters,  # as many and as wide, once they are reduced
        optimizer=state.optimizer,
        activations={
            s: _activations(layout, s % count, packed=measured.packed, on_host=not on_gpu)
            for s in stages
        },
        multiplications=_multiplications(layout, at["pp"]),
    )


def _activations(layout: Layout, stage: int, *, packed: bool, on_host: bool) -> float:
    """Kept by one forward of a stage, on the host what is offloaded as well."""
    config, parts = layout.config, layout.split.stages[stage]
    running, model = Running.of(config), config.model
    tokens = config.training.micro_batch_size * config.training.seq_length / layout.grid.cp
    saved = [
        total(saved_activations(model, layer, running, position=place))
        for place, layer in enumerate(parts.layers)
    ]
    if parts.embedding:
        saved.append(total(embedding_bytes(model, running)))
        if layout.grid.tp == 1:  # the tokens themselves, which are the batch's
            saved.append(Saved(kept=-8.0))
    if parts.head:
        saved.append(total(loss_bytes(model, running)))
    smoothed = config.training.label_smoothing > 0
    small = bookkeeping_bytes(model, parts, running, smoothed=smoothed)
    groups = config.memory.recomputed_groups(len(parts.layers))
    kept_whole = [parts.layers[place] for group, again in groups if not again for place in group]
    copies = sum(_copies(layout, layer, packed) for layer in kept_whole)
    kept = total(saved).kept + small + running.element_bytes * copies
    if model.hidden_dropout and layout.grid.cp > 1 and len(kept_whole) < len(parts.layers):
        kept += 8.0  # numbers of this rank's tokens, which dropout needs when it is repeated
    return tokens * (kept + (total(saved).offloaded if on_host else 0.0))


def _copies(layout: Layout, layer: int, packed: bool) -> float:
    """Elements per token that attention keeps twice.

    Its output is joined from that of each packed document; or exchanged for that of other tokens,
    and so are keys and values, which are repeated where there are too few heads for all ranks.
    """
    model, parallel, grid = layout.config.model, layout.config.parallel, layout.grid
    kind = parallel.cp_comm_type[layer % len(parallel.cp_comm_type)]
    output = model.attention_size / grid.tp
    memory = layout.config.memory
    if memory.recompute_granularity == "selective" and "core_attn" in memory.recompute_modules:
        return 0.0
    if grid.cp == 1:
        return output if packed else 0.0
    if kind not in ("a2a", "a2a+p2p"):
        return 0.0
    exchanging = grid.cp if kind == "a2a" else parallel.hierarchical_context_parallel_sizes[0]
    heads = max(model.num_kv_heads // grid.tp, 1)
    keys = heads * (model.query_dim + model.value_dim)
    return output + (max(exchanging / heads, 1) - 1) * keys


def _multiplications(layout: Layout, pp_rank: int) -> float:
    """FLOPs of a rank's linear layers: forward, dX and dW, each 2 x weights x tokens.

    What the backward makes again counts once more: whole layers, or what an MLP's last linear
    takes. PyTorch's checkpoint stops where nothing more is needed, which is before the last linear
    of a region, unless that is one of ours, which knows its weight gradient or its collective, or
    a dropout follows.
    """
    config, grid = layout.config, layout.grid
    model, training, memory = config.model, config.training, config.memory
    tokens = training.micro_batch_size * training.seq_length / grid.cp
    stops = grid.tp == 1 and not layout.defers_weights and not model.hidden_dropout
    remakes_mlp = memory.recompute_granularity == "selective" and "mlp" in memory.recompute_modules
    passes = 0.0  # weights x times that a product with them is computed
    for stage in stages_held(layout, pp_rank):
        parts = layout.split.stages[stage]
        if parts.head:
            passes += 3 * model.padded_vocab_size // grid.tp * model.hidden_size
        for group, again in memory.recomputed_groups(len(parts.layers)):
            for place in group:
                sizes = _linear_weights(layout, parts.layers[place])
                passes += (3 + again) * sum(sizes.values())
                last = place == group[-1]
                if again and stops and last:
                    passes -= sizes["mlp.down_proj.weight"]
                if remakes_mlp:
                    inner = ("gate", "up") if stops else ("gate", "up", "down")
                    passes += sum(sizes.get(f"mlp.{name}_proj.weight", 0) for name in inner)
    return 2 * passes * tokens * layout.num_microbatches / layout.num_copies


def _linear_weights(layout: Layout, layer: int) -> dict[str, int]:
    """Name -> elements that a rank multiplies with for one token, of a layer's linear layers.

    Where key/value heads are fewer than ranks, a rank holds all of them and computes one.
    """
    model, grid = layout.config.model, layout.grid
    sizes = {}
    for name, weight in layer_weights(model, layer).items():
        if not weight.multiplies:
            continue
        size = prod(weight.local(grid.tp, grid.ep, grid.etp))
        if weight.heads % grid.tp:
            size //= weight.heads
        if weight.of_experts:
            size = size * model.moe_router_topk // (model.num_experts or 1)
        sizes[name] = size
    return sizes
