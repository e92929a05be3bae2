"""Theoretical activation bytes and linear-layer FLOPs of a rank; torch-free."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod

from fivefold.config.model import ModelConfig
from fivefold.config.reach import Reach
from fivefold.config.training import ELEMENT_BYTES
from fivefold.counts.context import seen_shares
from fivefold.counts.lengths import length_products
from fivefold.counts.recompute import RECOMPUTED_LINEARS, LayerRecompute, recomputed_layers
from fivefold.counts.routed import StepRows
from fivefold.description.activations import (
    Saved,
    bookkeeping_bytes,
    embedding_bytes,
    entry_bytes,
    loss_bytes,
    prediction_bytes,
    saved_activations,
    total,
)
from fivefold.description.kinds import layer_kind
from fivefold.description.layers import describe_layer
from fivefold.description.running import Running
from fivefold.description.shape import has_final_norm, layer_weights, placed_layers
from fivefold.layout import Layout
from fivefold.model.attention.blocks import flash_takes


def kept_activations(
    layout: Layout,
    stage: int,
    rows: StepRows | None,
    *,
    packed: bool,
    on_gpu: bool,
) -> float:
    """Activation bytes that one forward of a stage keeps on a rank.

    Args:
        layout: layout of the run.
        stage: index of the stage in the split.
        rows: rows of each layer in the step; None: expected rows with evenly used experts.
        packed: whether rows hold several documents.
        on_gpu: whether a GPU runs it: one kernel may then attend to several documents, or chunks of
            them, and offloaded bytes are elsewhere.
    """
    config, parts = layout.config, layout.split.stages[stage]
    memory, model = layout.memory_of(stage), config.model
    running = replace(Running.of(config), memory=memory)
    tokens = config.rank_tokens
    saved = []
    routed = {} if rows is None or running.routed is not None else rows.first
    for place, layer in placed_layers(model, parts):
        known = replace(running, routed=routed.get(layer, running.routed))
        saved.append(total(saved_activations(model, layer, known, position=place)))
    saved.append(total(prediction_bytes(model, parts, running)))
    saved.append(total(entry_bytes(model, parts, running)))
    if not (parts.layers or parts.mtp or parts.embedding or parts.head):  # passes on its input
        width = model.hidden_size * layout.states_into(stage) / running.token_parts
        saved.append(Saved(kept=running.element_bytes * width))
    looks_up = (parts.embedding + parts.mtp) * model.trains_all
    if layout.grid.tp == 1:  # the tokens themselves, which belong to the batch
        saved.append(Saved(kept=-8.0 * looks_up))
    if parts.embedding:
        saved.append(total(embedding_bytes(model, running)))
    if parts.head:
        loss = loss_bytes(model, running)
        if not has_final_norm(model, parts):
            del loss["final_norm"]
        saved.append(total(loss))
    smoothed = config.training.label_smoothing > 0
    small = bookkeeping_bytes(model, parts, running, routed, smoothed=smoothed)
    layers = dict(recomputed_layers(layout, stage))
    copies = sum(
        _copies(layout, layer, running, packed=packed, on_gpu=on_gpu)
        for layer, recompute in layers.items()
        if not (recompute.whole or {"core_attn", "a2a_overlap_attn"} & {*recompute.modules})
    )
    kept = total(saved).kept + small + running.element_bytes * copies
    places = looks_up * (model.embedded_dropout > 0) + _dropout_places(layout, layers)
    if layout.grid.cp > 1:  # indices of this rank's tokens, from which masks are recomputed
        repeats = any(_asks_for_indices(model, *each) for each in layers.items())
        kept += 8.0 * (places > 0 or (repeats and model.drops))
        kept += 8.0 * (repeats and model.num_experts is not None)
    if model.attention_dropout:  # not saved tensors, so recomputation does not free them
        places += sum(map(model.is_softmax, layers))
    return tokens * (kept + (0.0 if on_gpu else total(saved).offloaded)) + 8.0 * places


def _dropout_places(layout: Layout, layers: Mapping[int, LayerRecompute]) -> int:
    """Number of layers' dropouts that keep the key of their mask."""
    model = layout.config.model
    holding = {layer for layer, recompute in layers.items() if not recompute.whole}
    mixers = 2 if model.hybrid_override_pattern is None else 1
    places = mixers * len(holding) if model.hidden_dropout else 0
    if model.lora_dropout:
        if layout.config.memory.tiled_mlp_num_shards > 1:  # a tile holds it until it is recomputed
            holding |= {layer for layer in layers if layer_kind(model, layer).dense}
        places += sum(_adapters(layout, layer) for layer in holding)
    return places


def _adapters(layout: Layout, layer: int) -> int:
    """Number of linear layers with adapters in a layer."""
    weights = layer_weights(layout.config.model, layer)
    return sum(name.endswith("lora_A.weight") for name in weights)


def _asks_for_indices(model: ModelConfig, layer: int, recompute: LayerRecompute) -> bool:
    """Whether the recomputation of a layer needs the indices of its tokens."""
    mlp = ("moe", "a2a_overlap_post_attn") if layer_kind(model, layer).experts else ("mlp",)
    return recompute.whole or not {"a2a_overlap_attn", *mlp}.isdisjoint(recompute.modules)


def _copies(layout: Layout, layer: int, running: Running, *, packed: bool, on_gpu: bool) -> float:
    """Elements per token that attention keeps twice.

    Outputs of several documents or chunks are joined where no kernel takes them in one call. Where
    the output projection keeps 8 bits of what it reads, attention counts its own.
    """
    model, grid = layout.config.model.as_in(layer), layout.grid
    if grid.cp > 1 or not model.is_softmax(layer):
        return 0.0
    gated = model.attention_output_gate  # the gate keeps the output in any case
    read = gated or model.trains_all or model.reads_shared("o_proj")
    shared = gated or not running.of_kind(layer_kind(model, layer)).narrows()
    output = model.attention_size / grid.tp * (read and shared and not _is_moved(layout, model))
    reach, length = model.reach_of(layer), layout.config.training.seq_length
    several = packed or not Reach(chunk=reach.chunk).is_whole(length)
    whole = Reach(reach.window).is_whole(length)
    fused = model.query_dim == model.value_dim and model.softmax_type == "vanilla"
    fused = fused and not model.attention_dropout and model.attn_logit_softcapping is None
    fused = fused and not layout.config.optimizer.notes_logits
    halves = ELEMENT_BYTES[layout.config.training.precision] == 2
    one_call = on_gpu and halves and flash_takes(model.query_dim)
    joined = several and not one_call and whole and fused
    return output if joined else 0.0


def _is_moved(layout: Layout, model: ModelConfig) -> bool:
    """Whether attention's outputs are offloaded with it, and so are counted there."""
    config, memory = layout.config, layout.config.memory
    features = model.attention_size / layout.grid.tp
    size = ELEMENT_BYTES[config.training.precision] * features * config.rank_tokens
    return "core_attn" in memory.moved_items and size >= memory.min_offloaded_tensor_size


def multiplications(layout: Layout, rank: int, rows: StepRows | None) -> float:
    """FLOPs of a rank's linear layers per step: forward, dX and dW, each 2 x weights x tokens,
    without dW of what is frozen.
    Lengths of rows with magnitudes (DoRA) are made in each forward; where their adapters have
    dropout, their linear layers multiply by both inputs.

    Recomputed layers count once more: whole layers, modules except possibly their last linear, or
    the stages of microbatches that are not kept.

    Args:
        layout: layout of the run.
        rank: rank whose FLOPs are counted.
        rows: rows of each layer in the step; None: expected rows with evenly used experts.
    """
    config, grid = layout.config, layout.grid
    model, memory, tokens = config.model, config.memory, config.rank_tokens
    products = _Products(layout, rank)
    count = layout.num_microbatches // layout.num_copies
    recomputed, total = layout.recomputed(), 0.0
    for stage, parts in layout.stages_of(grid.coordinates(rank)["pp"]).items():
        passes = once = 0.0  # weight products per microbatch; per forward alone
        if parts.head:
            runs = 1 + model.mtp_num_layers
            once += runs * model.padded_vocab_size // grid.tp * model.hidden_size
            passes += (2 + model.trains_all + memory.recomputes_logits) * once
        for layer, recompute in recomputed_layers(layout, stage):
            more, alone = products.of_layer(layer, recompute)
            passes, once = passes + more, once + alone
            if layer_kind(model, layer).experts:
                every, repeated = _reached(layout, layer, count, recomputed[stage], rows)
                total += products.of_experts(layer, recompute) * every
                total += products.of_one_expert(layer) * repeated
        total += (count * passes + recomputed[stage] * once) * tokens
    return 2 * total


def _reached(
    layout: Layout, layer: int, microbatches: int, again: int, rows: StepRows | None
) -> tuple[float, float]:
    """Rows that reach a rank's experts of a layer per step, and in recomputed stages."""
    running = Running.of(layout.config)
    if rows is not None and running.routed is None:
        return rows.every[layer].reached, rows.again[layer].reached if again else 0.0
    each = running.rows(layout.config.model.moe_router_topk) * running.microbatch_tokens
    slices = layout.config.parallel.num_sequence_slices
    return microbatches * slices * each, again * slices * each


class _Products:
    """Products with weights per token on one rank.

    PyTorch's checkpoint stops where nothing more is needed. That is before the last linear of a
    region, unless that is of the plain model in 8 bits (which multiplies before it saves), or a
    later operation saves tensors.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout, self._model = layout, layout.config.model
        self._memory = memory = layout.config.memory
        tokens = layout.config.rank_tokens // layout.config.parallel.token_parts
        self._last_tile = memory.last_tile(tokens)
        self._cp_rank = layout.grid.coordinates(rank)["cp"]
        self._fp8 = layout.config.training.fp8_format is not None

    def of_layer(self, layer: int, recompute: LayerRecompute) -> tuple[float, float]:
        """Products per token of a step, and of one forward, without experts."""
        sizes, model = _linear_weights(self._layout, layer), self._model
        if self._layout.config.reads_chosen:
            del sizes["self_attn.kv_b_proj.weight"]  # multiplied within attention
        stops = recompute.ends_group and not describe_layer(model, layer).keeps_end
        again = recompute.whole
        weights = describe_layer(model, layer).weights
        trained = {weight.name for weight in weights if weight.trained}
        passes_on = {weight.name for weight in weights if weight.passes_on}
        once = sum(sizes.values())
        passes = (3 + again) * once
        passes -= sum(size for name, size in sizes.items() if name not in trained)  # no dW
        passes -= sum(size for name, size in sizes.items() if name not in passes_on)  # no dX
        tiled = [name for name in sizes if again and name.startswith(RECOMPUTED_LINEARS["mlp"])]
        if self._memory.tiled_mlp_num_shards == 1:
            tiled = []
        ends = partial(self._ends, eight_bit=self._fp8 and not model.is_wide(layer))
        passes += sum(sizes[name] for name in tiled if not ends(name, "mlp"))
        if stops and tiled:
            # The last tile's input is the last that is saved, so its forward is not repeated.
            passes -= self._last_tile * sum(sizes[name] for name in tiled)
        elif stops:
            passes -= sum(sizes[name] for name in sizes if ends(name, "layer"))
        if self._layout.config.projects_latents(layer):
            _, got = seen_shares(self._layout, self._cp_rank, model.reach_of(layer))
            # Of all latents, in the forward; the backward projects again for dX and dW.
            around = "a2a_overlap_attn" in recompute.modules  # counted with the other projections
            attends = around or "core_attn" in recompute.modules
            times = (4 + again + attends) * (1 + got) - (3 + again + around)
            passes += times * sizes["self_attn.kv_b_proj.weight"]
            once += got * sizes["self_attn.kv_b_proj.weight"]
        for module in recompute.modules:
            names = [name for name in sizes if name.startswith(RECOMPUTED_LINEARS.get(module, ()))]
            passes += sum(sizes[name] for name in names if not ends(name, module))
        every, alone = length_products(self._layout, layer, recompute)
        return passes + every, once + alone

    def of_experts(self, layer: int, recompute: LayerRecompute) -> float:
        """Products of a step per row of an expert."""
        again = recompute.whole or not {"moe", "routed_experts"}.isdisjoint(recompute.modules)
        return (2 + self._model.trains_all + again) * self.of_one_expert(layer)

    def of_one_expert(self, layer: int) -> float:
        """Products of one forward per row of an expert."""
        weights = layer_weights(self._model, layer).values()
        etp, experts = self._layout.grid.etp, self._model.num_experts or 1
        return sum(
            prod(weight.local(etp=etp)) / experts
            for weight in weights
            if weight.of_experts and weight.multiplies
        )

    def _ends(self, name: str, region: str, *, eight_bit: bool) -> bool:
        """Whether recomputation of this module, or of a whole layer, stops before this linear,
        which may multiply in 8 bits."""
        stops = self._layout.owns_linears or not eight_bit
        if not stops or self._model.keeps_made(name.split(".")[-2]):
            return False
        if name == "mlp.shared_experts.down_proj.weight":
            return region == "shared_experts" or not self._model.keeps_shared
        if name == "mlp.fc2_latent_proj.weight":  # the plain model does so in every layout
            return not (self._model.shared_ffn_size or eight_bit)
        if name in ("self_attn.o_proj.weight", "self_attn.out_proj.weight"):
            return region != "layer" or self._model.hybrid_override_pattern is not None
        return name == "mlp.down_proj.weight"


def _linear_weights(layout: Layout, layer: int) -> dict[str, float]:
    """Name -> elements of a layer's linear weights that a rank multiplies with per token.

    With fewer key/value heads than ranks, a rank holds all of them and uses one. Weights that every
    rank holds whole multiply only this rank's tokens under sequence parallelism. Experts are not
    included, because they multiply rows instead of tokens.
    """
    model, grid = layout.config.model, layout.grid
    parts = layout.config.parallel.token_parts
    sizes: dict[str, float] = {}
    for weight in describe_layer(model, layer).weights:
        if not weight.multiplies or weight.of_experts:
            continue
        size: float = prod(weight.local(grid.tp))
        if weight.split is None:
            size /= parts
        if weight.heads % grid.tp:
            size //= weight.heads
        apart = model.lora_dropout > 0 and model.keeps_made(weight.name.split(".")[-2])
        sizes[weight.name] = 2 * size if apart else size
    return sizes
