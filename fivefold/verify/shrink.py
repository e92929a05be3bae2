"""Shrinks a recipe for verification: small enough for one device, same structure. No torch."""

from math import lcm
from typing import Any

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.rules.dependence import without_orphans
from fivefold.config.rules.layer_dependents import DECIDES
from fivefold.data_parallel.rules import keeps_blocks
from fivefold.description.shape import count_parameters
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.units import human_count, several
from fivefold.verify.fewer_layers import shallower
from fivefold.verify.last_bits import refuse_last_bits
from fivefold.verify.narrower import narrower

LARGEST_MODEL = 2_000_000  # parameters: a few steps in fp64 take seconds
LARGEST_BATCH = 8_192  # tokens of a global batch
LEARNING_RATE = 1e-2
ADAM_EPS = 1e-2
LOGIT = 0.05


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
        config = narrower(layout, shallower(layout, config))
        config, _ = without_orphans(config, (), deciding=DECIDES)  # it has set sizes of all kinds
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
    if config.optimizer.qk_clip and config.optimizer.qk_clip_threshold > 1:
        changes.append(f"qk_clip_threshold {LOGIT:g}, which logits of so small weights exceed")
        config = config.with_values(qk_clip_threshold=LOGIT)
    if config.memory.fine_grained_activation_offloading:
        config = config.with_values(min_offloaded_tensor_size=1)
        changes.append("activations of any size are moved")
    changes.append(f"AdamW at a constant rate of {LEARNING_RATE:g} with an epsilon of {ADAM_EPS:g}")
    return check(config, world_size), tuple(changes)


def _with_few_iterations(config: Config, changes: list[str]) -> Config:
    """A configuration in which Muon's iterations do not magnify rounding to the size of the result.

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
    """A configuration whose 8-bit operands are the same on one device and in the layout."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    kinds = {"num_query_groups": False, "num_query_groups_local": True}
    heads = {name: model.attention_of(local).num_kv_heads for name, local in kinds.items()}
    few = {n: kv for n, kv in heads.items() if kv % tp and (n[-1] != "l" or model.has_local_sizes)}
    if not few or model.multi_latent_attention:
        return config
    changes.append(
        f"{' and '.join(map(str, few.values()))} key/value heads -> {tp}: ranks that share a head "
        "round their parts of its gradient, one device the sum"
    )
    return config.with_values(**dict.fromkeys(few, tp))


def _with_whole_blocks(config: Config, changes: list[str]) -> Config:
    """A configuration in which no block of 8-bit moments is cut by the narrower rows."""
    parallel = config.parallel
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    if keeps_blocks(config, tp, etp):
        return config
    types = ("exp_avg_dtype", "exp_avg_sq_dtype")
    few = {name: "bf16" for name in types if config.value(name) == "fp8"}
    changes.append(f"{' and '.join(few)} fp8 -> bf16: the narrower rows are cut within blocks")
    return config.with_values(**few)


def _with_wide_messages(config: Config, changes: list[str]) -> Config:
    """A configuration that sends gradients unrounded, unless everything is compared in bf16."""
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
    """Note how ZeRO++'s rounding is made the same on one device and in the layout."""
    parallel = config.parallel
    if parallel.zero_quantized_weights:
        changes.append("weights are gathered as INT8 with a scale for each element, not each block")
    if parallel.zero_quantized_gradients:
        changes.append("gradients go the way of zero_quantized_gradients, but are not rounded")


def _experts_in_words(model: ModelConfig) -> str:
    if model.num_experts is None:
        return ""
    shared = f", {model.shared_ffn_size} shared" if model.shared_ffn_size else ""
    size = f"{model.expert_ffn_size} wide{shared}"
    return f"{model.num_experts} experts ({model.moe_router_topk} a token, {size}), "


def _reaches(model: ModelConfig, length: int, before: int) -> dict[str, int | None]:
    """Windows, chunks, and temperature steps, in the same relation to sequences as before."""
    tempered = ("floor_scale",) if model.attn_temperature_tuning else ()
    found = {n: getattr(model, n) for n in ("window_size", "attention_chunk_size", *tempered)}
    return {n: tokens and max(1, tokens * length // before) for n, tokens in found.items()}


def _fewer_tokens(layout: Layout, config: Config) -> Config:
    """Short sequences, and the fewest microbatches with the same relation to the pipeline."""
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
