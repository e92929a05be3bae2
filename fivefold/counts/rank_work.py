"""What theory says that a rank keeps in a forward and multiplies in a step; torch-free."""

from math import prod

from fivefold.counts.state import stages_held
from fivefold.layout import Layout
from fivefold.model.activations import (
    Saved,
    bookkeeping_bytes,
    embedding_bytes,
    loss_bytes,
    prediction_bytes,
    saved_activations,
    total,
)
from fivefold.model.running import Running
from fivefold.model.shape import has_final_norm, layer_weights


def kept_activations(layout: Layout, stage: int, *, packed: bool, on_host: bool) -> float:
    """Bytes that one forward of a stage keeps on a rank.

    Args:
        layout: layout of the run.
        stage: index of the stage in the split.
        packed: whether rows of the microbatch hold several documents.
        on_host: whether what is offloaded counts, too.
    """
    config, parts = layout.config, layout.split.stages[stage]
    running, model = Running.of(config), config.model
    tokens = config.training.micro_batch_size * config.training.seq_length / layout.grid.cp
    saved = [
        total(saved_activations(model, layer, running, position=place))
        for place, layer in enumerate(parts.layers)
    ]
    saved += [total(saved_activations(model, model.num_layers, running))] * parts.mtp
    saved.append(total(prediction_bytes(model, parts, running)))
    if layout.grid.tp == 1:  # the tokens themselves, which are the batch's
        saved.append(Saved(kept=-8.0 * (parts.embedding + parts.mtp)))
    if parts.embedding:
        saved.append(total(embedding_bytes(model, running)))
    if parts.head:
        loss = loss_bytes(model, running)
        if not has_final_norm(model, parts):
            del loss["final_norm"]
        saved.append(total(loss))
    smoothed = config.training.label_smoothing > 0
    small = bookkeeping_bytes(model, parts, running, smoothed=smoothed)
    groups = config.memory.recomputed_groups(len(parts.layers))
    kept_whole = [parts.layers[place] for group, again in groups if not again for place in group]
    numbers = [model.num_layers + depth for depth in range(parts.mtp)]
    if config.memory.recompute_granularity != "full":
        kept_whole += numbers
    copies = sum(_copies(layout, layer, packed) for layer in kept_whole)
    kept = total(saved).kept + small + running.element_bytes * copies
    every = len(parts.layers) + parts.mtp
    if model.hidden_dropout and layout.grid.cp > 1 and len(kept_whole) < every:
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


def multiplications(layout: Layout, pp_rank: int) -> float:
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
            runs = 3 * (1 + model.mtp_num_layers)
            passes += runs * model.padded_vocab_size // grid.tp * model.hidden_size
        for group, again in memory.recomputed_groups(len(parts.layers)):
            for place in group:
                sizes = _linear_weights(layout, parts.layers[place])
                passes += (3 + again) * sum(sizes.values())
                last = place == group[-1]
                if again and stops and last:
                    passes -= sizes["mlp.down_proj.weight"]
                if remakes_mlp:
                    passes += _remade_mlp(sizes, stops)
        further = _linear_weights(layout, model.num_layers)
        again = memory.recompute_granularity == "full"
        projection = 2 * model.hidden_size**2 // grid.tp
        passes += parts.mtp * (3 + again) * (projection + sum(further.values()))
        passes += parts.mtp * _remade_mlp(further, stops) if remakes_mlp else 0
    return 2 * passes * tokens * layout.num_microbatches / layout.num_copies


def _remade_mlp(sizes: dict[str, int], stops: bool) -> int:
    """Weights that the backward of an MLP that is recomputed multiplies with again."""
    inner = ("gate", "up") if stops else ("gate", "up", "down")
    return sum(sizes.get(f"mlp.{name}_proj.weight", 0) for name in inner)


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
