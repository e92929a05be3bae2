"""Shrinks a recipe for verification: small enough for one device, same structure. No torch."""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import Any

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.layer_pattern import (
    layer_frequency,
    unrotated_frequency,
    window_frequency,
)
from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig
from fivefold.config.rules.dependence import without_orphans
from fivefold.counts.shards import num_expert_shards
from fivefold.data_parallel.rules import keeps_blocks
from fivefold.description.shape import count_parameters
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.pipeline.ir import v_placement
from fivefold.pipeline.split.stages import StageSpec, layout_string
from fivefold.units import human_count, several
from fivefold.verify.last_bits import refuse_last_bits
from fivefold.verify.mixers import few_mixers, kind_of, small_states

LARGEST_MODEL = 2_000_000  # parameters: a few steps in fp64 take seconds
LARGEST_BATCH = 8_192  # tokens of a global batch
MOST_FEATURES = 512  # inner features of all experts of a layer, if their ranks allow it
LEARNING_RATE = 1e-2
ADAM_EPS = 1e-2

SPLIT_FLAGS: dict[str, Any] = {
    "num_virtual_stages_per_pipeline_rank": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}


def prepare(layout: Layout) -> tuple[Layout, tuple[str, ...]]:
    """The layout to verify, and the changes made for it.

    A model of more than 2 M parameters gets fewer and narrower layers and fewer experts; a batch of
    more than 8,192 tokens gets fewer and shorter sequences. What parallelism divides stays
    divisible as before, stages stay uneven or empty, KV heads stay fewer than tp, layers with and
    without experts both remain, and windows and chunks end within sequences. The optimizer takes
    large, well-conditioned steps: with AdamW's usual epsilon, a gradient that is zero up to
    rounding would move its weight by a visible, meaningless amount.
    """
    config, changes = layout.config.with_batch(), list[str]()
    world_size = layout.grid.world_size
    refuse_last_bits(config)
    if config != layout.config:
        changes.append("a step of the whole batch, to which rampup_batch_size grows")
    size = count_parameters(config.model).total
    if size > LARGEST_MODEL:
        config = _narrower(layout, _shallower(layout, config))
        now = config.model
        changes.append(
            f"{human_count(size)} parameters -> {human_count(count_parameters(now).total)}: "
            f"{now.num_layers} layers, hidden {now.hidden_size}, {now.num_attention_heads} heads "
            f"({now.num_kv_heads} key/value), ffn {now.ffn_size}, {_experts_in_words(now)}"
            f"vocabulary {now.vocab_size}"
        )
    training = config.training
    if training.step_tokens > LARGEST_BATCH:
        config = _fewer_tokens(layout, config)
        now_t = config.training
        changes.append(
            f"batches of {training.global_batch_size} x {training.seq_length} tokens -> "
            f"{now_t.global_batch_size} x {now_t.seq_length}"
        )
    if config.training.fp8_format is not None:
        config = _with_whole_gradients(config, changes)
    _tell_rounding(config, changes)
    config = _with_wide_messages(_with_whole_blocks(config, changes), changes)
    constant: dict[str, Any] = {
        "lr": LEARNING_RATE,
        "lr_decay_style": "constant",
        "lr_warmup_iters": 0,
        "train_samples": None,
    }
    if config.optimizer.decoupled_lr is not None:
        constant["decoupled_lr"] = 2 * LEARNING_RATE
    config, _ = without_orphans(config.with_values(**constant, adam_eps=ADAM_EPS), constant)
    config = _with_few_iterations(config, changes)
    if config.memory.fine_grained_activation_offloading:
        config = config.with_values(min_offloaded_tensor_size=1)
        changes.append("activations of any size are moved")
    changes.append(f"AdamW at a constant rate of {LEARNING_RATE:g} with an epsilon of {ADAM_EPS:g}")
    return check(config, world_size), tuple(changes)


def _with_few_iterations(config: Config, changes: list[str]) -> Config:
    """A configuration in which Muon does not make rounding as large as what it is of.

    An iteration multiplies the smallest singular values, among them rounding, by about four.
    """
    most = {"fp64": 5, "fp32": 1}.get(config.training.precision)
    steps = config.optimizer.muon_num_ns_steps
    if config.optimizer.optimizer != "muon" or most is None or steps <= most:
        return config
    iterations = several(most, "Newton-Schulz iteration")
    changes.append(
        f"{steps} -> {iterations}, of which each makes rounding in {config.training.precision} "
        "four times as large"
    )
    return config.with_values(muon_num_ns_steps=most)


def _with_whole_gradients(config: Config, changes: list[str]) -> Config:
    """A configuration whose 8-bit operands are the same numbers on one device and in the layout."""
    heads, tp = config.model.num_kv_heads, config.parallel.tensor_model_parallel_size
    if heads % tp == 0 or config.model.multi_latent_attention:
        return config
    changes.append(
        f"{heads} key/value heads -> {tp}: ranks that share a head round their parts of its "
        "gradient, one device the sum"
    )
    return config.with_values(num_query_groups=tp)


def _with_whole_blocks(config: Config, changes: list[str]) -> Config:
    """A configuration whose narrower rows are not cut within blocks of moments in 8 bits."""
    parallel = config.parallel
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    if keeps_blocks(config, tp, etp):
        return config
    types = ("exp_avg_dtype", "exp_avg_sq_dtype")
    few = {name: "bf16" for name in types if config.value(name) == "fp8"}
    changes.append(f"{' and '.join(few)} fp8 -> bf16: the narrower rows are cut within blocks")
    return config.with_values(**few)


def _with_wide_messages(config: Config, changes: list[str]) -> Config:
    """A configuration whose gradients travel unrounded, unless everything is compared in bf16."""
    precision, wide = config.training.precision, {"grad_reduce_in_bf16": False}
    if precision == "bf16" or not config.parallel.grad_reduce_in_bf16:
        return config
    changes.append(
        f"gradients are sent in {precision}, not in bf16: one device does not round them "
        "(--bf16 compares them as they are sent)"
    )
    config, _ = without_orphans(config.with_values(**wide), wide)
    return config


def _tell_rounding(config: Config, changes: list[str]) -> None:
    """Tell how rounding by ZeRO++ is made the same on one device and in the layout."""
    parallel = config.parallel
    if parallel.zero_quantized_weights:
        changes.append("weights are gathered as INT8 with a scale for each element, not each block")
    if parallel.zero_quantized_gradients:
        changes.append("gradients go the way of zero_quantized_gradients, but are not rounded")


def _shallower(layout: Layout, config: Config) -> Config:
    """Keep few layers per stage, with the stages' structure.

    A stage keeps one layer, or two if it has more than the smallest stage; empty stages stay empty;
    stages with and without experts keep one more, and so do those that recompute some of theirs.
    """
    model, stages = config.model, layout.split.stages
    counts = [len(stage.layers) for stage in stages]
    if len(counts) == 1:
        mixers = {*map(model.mixer_of, stages[0].layers)}
        few = max(2, len(set(config.parallel.cp_comm_type)), len(mixers))
        taken = _taken(model, stages[0].layers, few)
        return _with_layers(_recomputing_fewer(config, counts, [len(taken)]), taken)
    fewest = min(count for count in counts if count)
    kinds = max(len({kind_of(model, layer) for layer in stage.layers}) for stage in stages)
    least = min(fewest, max(kinds, 1 + _recomputes_some(config.memory, counts)))
    kept: list[StageSpec] = []
    taken = []
    for stage, count in zip(stages, counts, strict=True):
        chosen = _taken(model, stage.layers, least if count == fewest else least + 1)
        kept.append(replace(stage, layers=tuple(range(len(taken), len(taken) + len(chosen)))))
        taken += chosen
    placement = layout.split.placement
    is_v = placement == v_placement(layout.grid.pp, len(counts)) and len(counts) > layout.grid.pp
    text = ("v:" if is_v else "") + layout_string(kept)
    config = config.with_values(pipeline_model_parallel_layout=text, **SPLIT_FLAGS)
    config = _recomputing_fewer(config, counts, [len(stage.layers) for stage in kept])
    return _with_layers(config, taken)


def _recomputes_some(memory: MemoryConfig, counts: Sequence[int]) -> bool:
    """Whether some stage recomputes some of its layers only, or all in more than one group."""
    again = memory.recomputes_first_layers or memory.recompute_granularity == "full"
    numbers = memory.recompute_num_layers
    each = numbers * len(counts) if len(numbers) == 1 else numbers
    return again and any(0 < n < count for n, count in zip(each, counts, strict=True))


def _recomputing_fewer(config: Config, counts: Sequence[int], left: Sequence[int]) -> Config:
    """Recompute none, some or all of the layers that are left of each stage, as before."""
    numbers = config.memory.recompute_num_layers
    if len(numbers) == 1:  # for every stage, of which the largest has a like after the change
        counts, left = [max(counts)], [max(left)]
    if len(numbers) != len(counts):
        return config
    fewer = tuple(map(_fewer_recomputed, numbers, counts, left))
    return config.with_values(recompute_num_layers=fewer)


def _fewer_recomputed(number: int, count: int, left: int) -> int:
    """Recomputed layers of a stage, or of a group: none, some or all of those that are left."""
    if number >= count:
        return left or number
    return min(number, max(left - 1, 1))


def _taken(model: ModelConfig, layers: Sequence[int], count: int) -> list[int]:
    """At most `count` of these layers, with and without experts if there are both, and of each
    mixer if layers have one."""
    firsts = {kind_of(model, layer): layer for layer in reversed(layers)}
    others = [layer for layer in layers if layer not in firsts.values()]
    return sorted([*firsts.values(), *others][:count])


def _with_layers(config: Config, layers: Sequence[int]) -> Config:
    """Keep only these layers, which alternate between the cp_comm_types in use."""
    model, kinds = config.model, tuple(dict.fromkeys(config.parallel.cp_comm_type))
    if len(kinds) > 1:
        kinds = tuple(kinds[place % len(kinds)] for place in range(len(layers)))
    if model.hybrid_override_pattern is not None:
        config = config.with_values(hybrid_override_pattern=few_mixers(model, layers))
    elif model.num_experts is not None:
        config = config.with_values(moe_layer_freq=layer_frequency([*map(model.is_moe, layers)]))
    if model.window_attn_skip_freq is not None:
        has = _some_of([model.window_of(n) is not None for n in range(model.num_layers)], layers)
        config = config.with_values(window_attn_skip_freq=window_frequency(has))
    if model.linear_attention_freq is not None:
        has = _some_of([*map(model.is_linear, range(model.num_layers))], layers)
        config = config.with_values(linear_attention_freq=window_frequency(has))
    if model.no_rope_freq is not None:
        has = _some_of([not model.rotates(n) for n in range(model.num_layers)], layers)
        config = config.with_values(no_rope_freq=unrotated_frequency(has))
    return config.with_values(num_layers=len(layers), cp_comm_type=kinds)


def _some_of(has: Sequence[bool], layers: Sequence[int]) -> list[bool]:
    """Which of the layers that are kept have something: one with, one without, if there were."""
    few = [has[layer] for layer in layers]
    few[0] |= any(has) and not any(few)
    few[-1] &= all(has) or not all(few)
    return few


def _narrower(layout: Layout, config: Config) -> Config:
    """Few, small heads and a small vocabulary; what tp divides is divided as before."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    kv_heads, group = _few_heads(model, tp * _exchanging(config))
    heads = kv_heads * group
    head_dim = min(model.head_dim, max(4, 64 // heads // 2 * 2))  # even, for RoPE
    hidden = heads * head_dim
    if model.q_size != model.hidden_size:
        hidden += 8
    ffn = tp * max(1, min(model.ffn_size, 2 * hidden) // tp)
    multiple = lcm(tp, min(model.make_vocab_size_divisible_by, 64))
    padding = min(model.padded_vocab_size - model.vocab_size, 7)
    if model.num_experts is not None:
        config = config.with_values(**_fewer_experts(layout, config, hidden))
    if model.hybrid_override_pattern is not None:
        config = config.with_values(**small_states(config))
    return config.with_values(
        hidden_size=hidden,
        num_attention_heads=heads,
        **_small_heads(model, kv_heads, head_dim),
        ffn_hidden_size=ffn,
        vocab_size=4 * multiple - padding,
        make_vocab_size_divisible_by=multiple,
        init_method_std=model.init_method_std * (model.hidden_size / hidden) ** 0.5,
    )


def _small_heads(model: ModelConfig, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """Sizes of heads and latents; features without positions remain if there were any."""
    if model.multi_latent_attention:
        most = {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 6,
        }
        sizes = {name: getattr(model, name) for name in most}
        small = {n: None if size is None else min(size, most[n]) for n, size in sizes.items()}
        return {"num_query_groups": None, "kv_channels": None, **small}
    share = model.rotary_percent
    if share != 1.0:
        share = (max(2, int(head_dim * share) // 2 * 2) + 0.5) / head_dim
    return {"num_query_groups": kv_heads, "kv_channels": head_dim, "rotary_percent": share}


def _few_heads(model: ModelConfig, ranks: int) -> tuple[int, int]:
    """Key/value heads, and query heads per key/value head, that divide evenly over the ranks."""
    kv_heads, group = model.num_kv_heads, model.num_attention_heads // model.num_kv_heads
    if kv_heads % ranks == 0:
        kv_heads = ranks * min(kv_heads // ranks, 2)
    fits = [n for n in range(min(group, 2), group + 1) if kv_heads * n % ranks == 0]
    return kv_heads, fits[0]


def _fewer_experts(layout: Layout, config: Config, hidden: int) -> dict[str, Any]:
    """Few, narrow experts, in the same relation to ranks, groups and choices as before.

    Several experts stay on a rank and in a group, at most half of them are chosen, and what expert
    ranks, shards and expert tensor parallelism divide is divided as before.
    """
    model, parallel = config.model, config.parallel
    assert model.num_experts is not None
    ep, groups = parallel.expert_model_parallel_size, model.moe_router_num_groups or 1
    topk, chosen = min(model.moe_router_topk, 3), model.moe_router_group_topk or 1
    sharded = ep * num_expert_shards(layout)
    ranks = ep if model.num_experts % sharded else sharded
    unit = lcm(ranks, groups)
    scored = model.moe_router_group_scores or max(topk // chosen, 1)

    def relates(experts: int) -> bool:
        """Whether this number has the same relation to ranks, groups and choices."""
        enough = topk <= chosen * experts // groups and scored <= experts // groups
        of_each = (experts // part > 1 or experts == model.num_experts for part in (ranks, groups))
        return enough and all(of_each) and 2 * topk <= experts

    few = next(filter(relates, range(unit, model.num_experts, unit)), model.num_experts)
    etp, shared = parallel.expert_tensor_parallel_size, model.shared_ffn_size
    tp = parallel.tensor_model_parallel_size
    inner = min(model.expert_ffn_size, hidden, max(1, MOST_FEATURES // few))
    return {
        "num_experts": few,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": etp * max(1, inner // etp),
        "moe_shared_expert_intermediate_size": tp * max(1, min(shared, hidden) // tp)
        if shared
        else model.moe_shared_expert_intermediate_size,
    }


def _experts_in_words(model: ModelConfig) -> str:
    if model.num_experts is None:
        return ""
    shared = f", {model.shared_ffn_size} shared" if model.shared_ffn_size else ""
    size = f"{model.expert_ffn_size} wide{shared}"
    return f"{model.num_experts} experts ({model.moe_router_topk} a token, {size}), "


def _exchanging(config: Config) -> int:
    """Ranks that exchange heads for tokens; their least common multiple if layers differ."""
    parallel = config.parallel
    sizes = {"a2a": parallel.context_parallel_size}
    if parallel.hierarchical_context_parallel_sizes:
        sizes["a2a+p2p"] = parallel.hierarchical_context_parallel_sizes[0]
    return lcm(*(sizes.get(kind, 1) for kind in parallel.cp_comm_type))


def _reaches(model: ModelConfig, length: int, before: int) -> dict[str, int | None]:
    """Windows, chunks, and steps of the temperature, in the same relation to sequences."""
    tempered = ("floor_scale",) if model.attn_temperature_tuning else ()
    found = {n: getattr(model, n) for n in ("window_size", "attention_chunk_size", *tempered)}
    return {n: tokens and max(1, tokens * length // before) for n, tokens in found.items()}


def _fewer_tokens(layout: Layout, config: Config) -> Config:
    """Short sequences, and the fewest microbatches in the same relation to the pipeline."""
    training, tp = config.training, config.parallel.tensor_model_parallel_size
    cp = config.parallel.context_parallel_size
    slices = config.parallel.num_sequence_slices
    length = min(training.seq_length, lcm(32, 2 * cp * tp if cp > 1 else tp) * slices)
    each, most = min(training.micro_batch_size, 2), layout.num_microbatches
    few = min(most, max(2, 2 * layout.grid.pp))
    for count in range(few, most + 1):
        smaller = config.with_values(
            seq_length=length,
            **_reaches(config.model, length, training.seq_length),
            micro_batch_size=each,
            global_batch_size=each * count * layout.grid.dp,
        )
        try:
            check(smaller, layout.grid.world_size)
        except ConfigError:
            continue  # the schedule does not support this number of microbatches
        return smaller
    return config
