"""Activation memory: bytes per token that each layer keeps from forward to backward.

Derived from what each operation of a layer keeps (`description.operations`), with recomputation and
offloading applied.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf
from types import MappingProxyType

from fivefold.config.memory import LOSS_TOKENS, MemoryConfig, vocab_split_sizes
from fivefold.config.model import ModelConfig
from fivefold.description.expert_rows import LayerRows
from fivefold.description.kinds import LayerKind, layer_kind
from fivefold.description.latent import LatentDown
from fivefold.description.layers import describe, describe_layer
from fivefold.description.operations import Kept, Norm
from fivefold.description.running import Running, at_place, scale_bytes, share_at_once
from fivefold.description.shape import (
    ModelParts,
    StageParts,
    all_layers,
    has_final_norm,
    rotations,
    tempers,
)
from fivefold.description.sparse import Indexing


@dataclass(frozen=True)
class Saved:
    """Bytes per token that one module keeps for the backward.

    Attributes:
        kept: bytes on the device from the forward to the backward.
        offloaded: bytes in host memory from the forward to the backward.
        recomputed: bytes that the backward recomputes, present only while it runs.
    """

    kept: float = 0.0
    offloaded: float = 0.0
    recomputed: float = 0.0


def total(saved: Mapping[str, Saved] | Iterable[Saved]) -> Saved:
    """The sum over modules or layers."""
    items = list(saved.values() if isinstance(saved, Mapping) else saved)
    return Saved(
        sum(item.kept for item in items),
        sum(item.offloaded for item in items),
        sum(item.recomputed for item in items),
    )


def saved_activations(
    model: ModelConfig, layer: int, running: Running, *, position: int = 0
) -> Mapping[str, Saved]:
    """What one layer keeps for its backward on one rank: module -> bytes per token.

    Tokens are those of the rank's microbatch (batch x sequence / CP) before sequence parallelism
    splits them. Full recomputation keeps only layer inputs: that of every
    `recompute_num_layers`-th layer (uniform), or those of the first `recompute_num_layers` layers
    (block). What the backward recomputes counts as `recomputed`; a uniform group recomputes all its
    layers at once.

    Args:
        model: the architecture.
        layer: index of the layer in the model; indices from num_layers on mean layers of MTP
            modules, of which the first includes the norms and the projection.
        running: degrees, dtypes, recomputation and offloading, of its stage.
        position: its place among the layers of its stage, for recomputation of some of them.
    """
    kind = layer_kind(model, layer)
    running = at_place(running.of_layer(layer).of_kind(kind), position)
    memory = running.memory
    if memory.recompute_granularity != "full" or not _is_recomputed(memory, position):
        return _saved(model, kind, running)
    starts = memory.recompute_method == "block" or position % memory.recompute_num_layers[0] == 0
    starts &= layer < model.num_layers or model.starts_prediction(layer)
    return _saved_by_recomputation(model, kind, running, starts)


@lru_cache(maxsize=1024)
def _saved(model: ModelConfig, kind: LayerKind, running: Running) -> Mapping[str, Saved]:
    """What a layer of this kind keeps if it is not recomputed as a whole."""
    memory = running.memory
    moved = memory.moved_items
    saved = {}
    for item in _kept_items(model, kind, running):
        if item.held_by:
            recomputed = set(running.recomputed) & set(item.recomputed_by)
            if item.module in moved and item.held_by not in moved and not recomputed:
                offloaded = _offloaded(item, running)
                # The rest is held by nothing else.
                rest = offloaded / memory.activation_offload_fraction - offloaded
                saved[item.name] = Saved(kept=rest, offloaded=offloaded)
        elif set(running.recomputed) & set(item.recomputed_by):
            saved[item.name] = Saved(recomputed=_recomputed(item, running))
        else:
            offloaded = _offloaded(item, running) if item.module in moved else 0.0
            saved[item.name] = Saved(kept=item.size - offloaded, offloaded=offloaded)
    return MappingProxyType(saved)


@lru_cache(maxsize=1024)
def _saved_by_recomputation(
    model: ModelConfig, kind: LayerKind, running: Running, starts_group: bool
) -> Mapping[str, Saved]:
    """What a layer keeps if it is recomputed as a whole; the first of a group keeps its input."""
    saved = {}
    if starts_group:
        size = running.element_bytes * model.hidden_size / running.token_parts
        moves = "layer_input" in running.memory.moved_items
        offloaded = _offloaded(Kept("layer_input", (size,)), running) if moves else 0.0
        saved["layer_input"] = Saved(kept=size - offloaded, offloaded=offloaded)
    for item in _kept_items(model, kind, running):
        if not item.held_by:
            recomputed = Saved(recomputed=_recomputed(item, running))
            saved[item.name] = Saved(kept=item.size) if item.stays else recomputed
    return MappingProxyType(saved)


def kept_items(model: ModelConfig, layer: int, running: Running) -> list[Kept]:
    """What the operations of a layer keep without recomputation and offloading."""
    kind = layer_kind(model, layer)
    return _kept_items(model, kind, running.of_layer(layer).of_kind(kind))


def _kept_items(model: ModelConfig, kind: LayerKind, running: Running) -> list[Kept]:
    operations = describe(model, kind).operations
    items = (item for operation in operations for item in operation.kept(running))
    return [item for item in items if item.size]


def embedding_bytes(model: ModelConfig, running: Running) -> dict[str, Saved]:
    """Bytes per token that the input embedding keeps, unless it is frozen: token ids, rows
    of positions that have an offset, the input of its norm, and a dropout mask."""
    if not model.trains_all:
        return {}
    around = model.hidden_size / running.token_parts
    mask = running.mask_bytes * around if model.embedded_dropout else 0.0
    normed = running.element_bytes * around if model.embed_layernorm else 0.0
    looks_up = model.position_embedding_type == "learned_absolute"
    rows = 8.0 / running.token_parts if looks_up and model.position_embedding_offset else 0.0
    found = {
        "tokens": 8.0,
        "rows_of_positions": rows,  # others are the batch's own positions
        "embedding_norm": normed,
        "embedding_dropout": mask,
    }
    return {name: Saved(kept=size) for name, size in found.items()}


def prediction_bytes(model: ModelConfig, parts: StageParts, running: Running) -> dict[str, Saved]:
    """Bytes per token that a stage keeps for multi-token prediction, outside the layers.

    These are the ids of the tokens looked up and their dropout masks. If another stage has the
    output layer, also the states predicted from and the input of the final norm, which the output
    layer would otherwise count as its own input; so where that keeps none, or them divided.
    """
    if not parts.mtp:
        return {}
    around = model.hidden_size / running.token_parts
    mask = running.mask_bytes * around * parts.mtp if model.embedded_dropout else 0.0
    states = 1 + parts.mtp
    if parts.head:
        states = 0 if _keeps_whole_states(model, running) else parts.mtp
    return {
        "mtp_tokens": Saved(kept=8.0 * parts.mtp * model.trains_all),
        "mtp_dropout": Saved(kept=mask),
        "states": Saved(kept=running.element_bytes * around * states),
    }


def entry_bytes(model: ModelConfig, parts: StageParts, running: Running) -> dict[str, Saved]:
    """Bytes per token of a stage's input that stays on the device, beside its copy in host memory.

    The pipeline holds it for its gradient. Elsewhere the first layer counts it as its own: as its
    input if it is recomputed, else as that of its first norm, or of its first product. So does the
    output layer behind the stage of multi-token prediction, unless it keeps none, or them divided.
    """
    size = running.element_bytes * model.hidden_size / running.token_parts
    if parts.head and not has_final_norm(model, parts):
        states = 0 if _keeps_whole_states(model, running) else 1 + model.mtp_num_layers
        return {"entry": Saved(kept=size * states)}
    if parts.embedding or not parts.layers:
        return {}
    again = running.memory.recompute_granularity == "full"
    layer = describe_layer(model, parts.layers[0])
    first, own = layer.operations[0], running.of_layer(parts.layers[0]).of_kind(layer.kind)
    if not (model.norms_before or again) and (own.narrows() or not first.keeps_inputs(own)):
        return {"entry": Saved(kept=size)}  # the first product keeps a copy in 8 bits, or none
    moved = {*running.memory.moved_items}
    moves = (
        "layer_input" in moved if again else any(item.module in moved for item in first.kept(own))
    )
    moves = moves and _offloaded(Kept("entry", (size,)), running) > 0
    return {"entry": Saved(kept=size)} if moves else {}


def loss_bytes(model: ModelConfig, running: Running) -> dict[str, Saved]:
    """Bytes per token that the final norm, the output layer and the loss keep on one rank.

    Logits are kept in the compute dtype. A fused loss makes an fp32 gradient of them, except "te"
    and Fivefold's, which overwrite the logits; an unfused loss holds the fp32 copy of narrower
    logits, their exponentials and the logits at once, or, in the compute dtype, the logits, their
    log-softmax (both kept) and the gradients of both. A loss fused with the output layer ("linear")
    holds some tokens and a slice of the vocabulary at a time. With multi-token prediction the
    output layer runs once more per further token, but only one loss is computed at a time.
    """
    memory, element = running.memory, running.element_bytes
    runs = 1 + model.mtp_num_layers
    around = model.hidden_size / running.token_parts
    entries, wide = _logits(model, running), max(element, 4)
    kept, busy, sums = element * entries, (1 + (element < wide)) * wide * entries, wide
    if running.narrow_loss:
        kept, busy, sums = 2 * element * entries, 2 * element * entries, 0.0
    if memory.cross_entropy_loss_fusion:
        busy, sums = wide * entries, 0.0  # the forward already computes the gradient
        if memory.cross_entropy_fusion_impl == "te" or not running.others:
            busy = 0.0
        if memory.cross_entropy_fusion_impl == "linear":
            known = running.microbatch_tokens < inf
            share = min(LOSS_TOKENS / running.microbatch_tokens, 1.0) if known else 1.0
            slice_ = min(entries, max(vocab_split_sizes(os.environ)))
            kept, busy, sums = 0.0, (element + wide) * slice_ * share, wide
    return {
        "final_norm": Saved(kept=element * around),
        "output_layer": Saved(kept=runs * element * around * _keeps_states(model, running)),
        "logits": Saved(kept=runs * kept, recomputed=busy),
        "log_sum_exp": Saved(kept=runs * sums),
    }


def _keeps_states(model: ModelConfig, running: Running) -> bool:
    """Whether the output layer keeps its input."""
    return model.trains_all or running.memory.recomputes_logits


def _keeps_whole_states(model: ModelConfig, running: Running) -> bool:
    """Whether the output layer keeps its input unchanged."""
    return _keeps_states(model, running) and model.logits_scaling == 1.0


def loss_gradient_bytes(model: ModelConfig, running: Running) -> float:
    """Bytes per token that the backward of Fivefold's loss needs in addition to its logits, on one
    rank.

    An unfused loss makes their gradient in at least fp32, then in their own type; a fused one has
    made it in its forward.
    """
    wide = max(running.element_bytes, 4)
    narrowed = running.element_bytes if running.element_bytes < wide else 0
    fused = running.memory.cross_entropy_loss_fusion
    return 0.0 if fused else (wide + narrowed) * _logits(model, running)


def deferred_by_ends(model: ModelConfig, parts: StageParts, running: Running) -> float:
    """Bytes per token that deferred weight gradients of a stage's ends keep: x and dY.

    The embedding's dY is that of all tokens of the tensor-parallel ranks. The output layer runs
    once for each predicted token; fused with the loss it computes its gradient at once.
    """
    if not model.trains_all:
        return 0.0
    found = (parts.embedding + parts.mtp) * (8.0 + running.element_bytes * model.hidden_size)
    if parts.head and not running.memory.recomputes_logits:
        x = model.hidden_size / running.token_parts
        runs = 1 + model.mtp_num_layers
        found += runs * running.element_bytes * (x + _logits(model, running))
    return found


def _logits(model: ModelConfig, running: Running) -> float:
    """Number of logits per token on one rank."""
    return model.padded_vocab_size / (1 if running.whole_logits else running.tensor_parallel)


def bookkeeping_bytes(
    model: ModelConfig,
    parts: StageParts,
    running: Running,
    routed: Mapping[int, LayerRows],
    *,
    smoothed: bool,
) -> float:
    """Bytes per token of a stage that Fivefold keeps beyond the published formulas.

    These are row statistics of norms, tables of positions, and copies of labels and loss weights
    (with a split vocabulary: of the labels' logits and their mask), and scales of 8-bit inputs.
    An expert without any rows keeps no scales, unless they are those of earlier steps.

    Args:
        model: the architecture.
        parts: what the stage holds.
        running: degrees, dtypes, recomputation and offloading, of the stage.
        routed: known rows of layers with experts; of others each expert has its share.
        smoothed: whether the loss uses label smoothing.
    """
    wide, tp, tokens = max(running.element_bytes, 4), running.tensor_parallel, running.token_parts
    # PyTorch's layer norm keeps mean and deviation; on a CPU, in the compute dtype.
    layer_norm = 2 * running.element_bytes / tokens
    norm = layer_norm if model.normalization == "LayerNorm" else wide / tokens
    size = 0.0
    groups = running.memory.recomputed_groups(len(parts.layers))
    kept_whole = [(at, parts.layers[at]) for group, again in groups if not again for at in group]
    if running.memory.recompute_granularity != "full":
        kept_whole += [(0, layer) for layer in all_layers(model, ModelParts(mtp=parts.mtp))]
        # The norm of a frozen embedding has no backward.
        size += (3 if model.trains_all else 2) * norm * parts.mtp
    for place, layer in kept_whole:
        own = at_place(running, place).of_kind(layer_kind(model, layer))
        known = replace(own, routed=routed.get(layer, own.routed))
        for item in kept_items(model, layer, known):
            if not {*own.recomputed} & {*item.recomputed_by}:
                pairs = product(item.scaled, item.groups or (None,))
                size += sum(scale_bytes(own, features, rows) for features, rows in pairs)
        if "a2a_overlap_attn" not in own.recomputed:
            size += wide * _unit_norms(model, layer, tp)
        for operation in describe_layer(model, layer).operations:
            again = {*own.recomputed}.intersection(operation.rerun_by)
            if "a2a_overlap_attn" in again:
                continue
            if isinstance(operation, Norm):
                if again and operation.inside:
                    continue
                queries, keys = operation.heads or (0, 0)
                each = 2 if operation.together else queries / tp + max(keys / tp, 1)
                size += wide * each if queries else norm
            if isinstance(operation, LatentDown):
                size += norm * operation.norms
            if isinstance(operation, Indexing) and not operation.frozen:
                size += layer_norm
    turned = sum(model.attention_of(local).rotary_dim for local in rotations(model, parts))
    size += running.element_bytes * 1.5 * turned  # tables: cos [R] and sin [R / 2]
    size += wide * tempers(model, parts)
    if tp > 1 and model.trains_all:
        size += parts.embedding + parts.mtp
    size += norm * has_final_norm(model, parts)
    size += norm * (parts.embedding and model.embed_layernorm and model.trains_all)
    if parts.head:
        runs = 1 + model.mtp_num_layers
        if not running.memory.cross_entropy_loss_fusion:
            size += runs * (wide * (1 + smoothed) if tp > 1 else 8.0 + wide)
        elif running.memory.cross_entropy_fusion_impl == "linear":
            size += runs * wide * (2 + smoothed)
    return size


def _is_recomputed(memory: MemoryConfig, position: int) -> bool:
    return memory.recompute_method == "uniform" or position < max(memory.recompute_num_layers)


def _recomputed(item: Kept, running: Running) -> float:
    """Bytes per token of an item that are recomputed at a time."""
    return item.size * share_at_once(running, item.recomputed_by)


def _offloaded(item: Kept, running: Running) -> float:
    """Bytes per token of an item's tensors that are offloaded, those that are large enough."""
    least = running.memory.min_offloaded_tensor_size / running.microbatch_tokens
    large = sum(tensor for tensor in item.tensors if tensor >= least)
    return running.memory.activation_offload_fraction * large


def _unit_norms(model: ModelConfig, layer: int, tp: int) -> float:
    """Number of heads of a layer on one rank that are normalised without weights."""
    keys = model.as_in(layer).kv_heads_of(tp)
    of_values = keys * (model.v_l2_norm and model.is_softmax(layer))
    turned = model.qk_l2_norm and model.rotates(layer)
    return (model.num_attention_heads / tp + keys) * turned + of_values
