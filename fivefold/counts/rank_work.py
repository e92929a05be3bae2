"""What theory says that a rank keeps in a forward and multiplies in a step; torch-free."""

from math import prod

from fivefold.counts.context import gathers_latents, seen_shares
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
        window = model.window_of(layer)
        whole = window is None or window + 1 >= layout.config.training.seq_length
        fused = model.query_dim == model.value_dim and model.softmax_type == "vanilla"
        joined = packed and whole and fused
        return output if joined else 0.0
    if kind not in ("a2a", "a2a+p2p"):
        return 0.0
    exchanging = grid.cp if kind == "a2a" else parallel.hierarchical_context_parallel_sizes[0]
    heads = max(model.num_kv_heads // grid.tp, 1)
    keys = heads * (model.query_dim + model.value_dim)
    return output + (max(exchanging / heads, 1) - 1) * keys


def multiplications(layout: Layout, rank: int) -> float:
    """FLOPs of a rank's linear layers: forward, dX and dW, each 2 x weights x tokens.

    What the backward makes again counts once more: whole layers, or what an MLP's last linear
    takes; and the stages of microbatches that are not kept. PyTorch's checkpoint stops where
    nothing more is needed, which is before the last linear of a region, unless that is one of
    ours, which knows its weight gradient or its collective, or a dropout follows.
    """
    config, grid, at = layout.config, layout.grid, layout.grid.coordinates(rank)
    model, training, memory = config.model, config.training, config.memory
    tokens = training.micro_batch_size * training.seq_length / grid.cp
    stops = grid.tp == 1 and not layout.defers_weights and not model.hidden_dropout
    remade = memory.recompute_modules if memory.recompute_granularity == "selective" else ()
    total = 0.0  # weights x times that a product with them is computed
    recomputed = layout.recomputed()
    count = layout.num_microbatches // layout.num_copies
    for stage, parts in layout.stages_of(at["pp"]).items():
        passes = once = 0.0  # of a microbatch; of a forward alone
        if parts.head:
            runs = 1 + model.mtp_num_layers
            once += runs * model.padded_vocab_size // grid.tp * model.hidden_size
            passes += 3 * runs * model.padded_vocab_size // grid.tp * model.hidden_size
        groups = memory.recomputed_groups(len(parts.layers))
        layers = [
            (parts.layers[place], again, again and stops and place == group[-1])
            for group, again in groups
            for place in group
        ]
        # A projection stands before those of further predictions, and behind them a norm.
        further = range(model.num_layers, model.num_layers + parts.mtp)
        layers += [(layer, memory.recompute_granularity == "full", False) for layer in further]
        for layer, again, stops_before_last in layers:
            sizes = _linear_weights(layout, layer)
            predicts = layer >= model.num_layers
            projection = 2 * model.hidden_size**2 // grid.tp if predicts else 0
            once += projection + sum(sizes.values())
            passes += (3 + again) * (projection + sum(sizes.values()))
            if stops_before_last:
                passes -= sizes["mlp.down_proj.weight"]
            if gathers_latents(config, layer):
                _, got = seen_shares(layout, at["cp"], model.window_of(layer))
                # Of all latents, in a forward; the backward projects them again for dX and dW.
                times = (4 + again + ("core_attn" in remade)) * (1 + got) - (3 + again)
                passes += times * sizes["self_attn.kv_b_proj.weight"]
                once += got * sizes["self_attn.kv_b_proj.weight"]
            if "mla_up_proj" in remade:
                passes += sum(sizes.get(f"self_attn.{up}_proj.weight", 0) for up in _UP)
            if "mlp" in remade:
                inner = ("gate", "up") if stops else ("gate", "up", "down")
                passes += sum(sizes.get(f"mlp.{name}_proj.weight", 0) for name in inner)
        total += count * passes + recomputed[stage] * once
    return 2 * total * tokens


_UP = ("q", "q_b", "kv_b")  # projections of latent attention up to the heads


def _linear_weights(layout: Layout, layer: int) -> dict[str, float]:
    """Name -> elements that a rank multiplies with for one token, of a layer's linear layers.

    Where key/value heads are fewer than ranks, a rank holds all of them and computes one. What is
    whole on every rank multiplies this rank's tokens only, under sequence parallelism.
    """
    model, grid = layout.config.model, layout.grid
    parts = grid.tp if layout.config.parallel.sequence_parallel else 1
    sizes: dict[str, float] = {}
    for name, weight in layer_weights(model, layer).items():
        if not weight.multiplies:
            continue
        size: float = prod(weight.local(grid.tp, grid.ep, grid.etp))
        if weight.split is None:
            size /= parts
        if weight.heads % grid.tp:
            size //= weight.heads
        if weight.of_experts:
            size = size * model.moe_router_topk // (model.num_experts or 1)
        sizes[name] = size
    return sizes
