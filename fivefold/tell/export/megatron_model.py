"""Megatron-LM's flags for the model, and the features that it lacks."""

from collections.abc import Iterator
from shlex import quote

from fivefold.config.by_layer import OF_INDEXER, OF_LATENTS, OF_LINEAR_ATTENTION, OF_MAMBA
from fivefold.config.layer_pattern import runs
from fivefold.config.megatron import HYBRID_EPSILON, HYBRID_SPEC
from fivefold.config.model import INITIAL, ModelConfig
from fivefold.layout import Layout
from fivefold.tell.export.megatron_experts import expert_flags
from fivefold.tell.export.settings import Settings, flag, flags, set_flag

_ITS_ROPE_SCALING = {
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_max_position_embeddings": 8192,
}


def model_flags(said: Settings, layout: Layout) -> Iterator[str]:
    """Sizes, norms, positions, attention, experts and multi-token prediction."""
    model = layout.config.model
    yield from flags(said, "num_layers", "hidden_size", "num_attention_heads")
    said.mention("ffn_hidden_size")
    yield from set_flag("ffn_hidden_size", model.ffn_size)
    if said["num_query_groups"] and not model.multi_latent_attention:
        yield "--group-query-attention"
        yield from flags(said, "num_query_groups")
    yield from flags(said, "kv_channels", "normalization", "norm_epsilon")
    yield from set_flag("apply_layernorm_1p", said["apply_layernorm_1p"])
    yield from set_flag("qk_layernorm", said["qk_layernorm"] or model.multi_latent_attention)
    yield from set_flag("qk_l2_norm", said["qk_l2_norm"])
    if said["softmax_type"] != "vanilla":
        yield from flags(said, "softmax_type")
    yield from flags(said, "attention_output_gate")
    if said["experimental_attention_variant"] == "gated_delta_net":
        yield from flags(said, "experimental_attention_variant", *OF_LINEAR_ATTENTION)
    if model.is_sparse:
        yield from flags(said, "experimental_attention_variant", *OF_INDEXER)
        yield from set_flag("dsa_indexer_loss_coeff", said["dsa_indexer_loss_coeff"] or 0.0)
        yield from set_flag("dsa_indexer_use_sparse_loss", said["dsa_indexer_use_sparse_loss"])
    if said["hybrid_override_pattern"] is not None:
        yield from _hybrid(said)
    yield from flags(said, "position_embedding_type")
    positions = max(said["max_position_embeddings"], layout.config.training.seq_length)
    yield from set_flag("max_position_embeddings", positions)
    if said["window_size"] is not None:
        yield from flag("window-size", f"{model.window_size},0")
        yield from flags(said, "window_attn_skip_freq")
    if model.position_embedding_type == "rope":
        yield from set_flag("rotary_base", round(said["rotary_base"]))
        latent = said["multi_latent_attention"]  # has two bases, and another default
        its = latent and said["rope_type"] == "yarn"
        yield from flag("rope-type", "yarn" if its else "rope")
        if said["rotary_percent"] != 1.0:
            yield from flags(said, "rotary_percent")
        yield from flags(said, "rotary_interleaved")
        if said["no_rope_freq"] is not None:  # there a number must divide the layers
            without = [not model.rotates(layer) for layer in range(model.num_layers)]
            yield from flag("no-rope-freq", runs(without))
        if model.use_rope_scaling:
            yield from flags(said, "use_rope_scaling", "rope_scaling_factor")
    yield from _activation(said, model)
    yield from flags(said, "add_qkv_bias", "untie_embeddings_and_output_weights")
    yield from flags(said, "vocab_size", "make_vocab_size_divisible_by")
    if model.padded_vocab_size % (model.make_vocab_size_divisible_by * layout.grid.tp):
        yield from set_flag("padded_vocab_size", model.padded_vocab_size)  # else padded for TP, too
    yield from flags(said, "hidden_dropout", "attention_dropout", *INITIAL)
    if said["num_experts"]:
        yield from expert_flags(said)
    if said["multi_latent_attention"]:
        yield from flags(said, "multi_latent_attention", *OF_LATENTS)
    if said["rope_type"] == "yarn" and said["multi_latent_attention"]:
        yield from flags(said, "rotary_scaling_factor", "mscale", "mscale_all_dim")
    hybrid = model.hybrid_override_pattern is not None
    yield from set_flag("mtp_num_layers", (not hybrid and said["mtp_num_layers"]) or None)
    if model.mtp_num_layers and not hybrid:
        yield from flags(said, "mtp_loss_scaling_factor")


def _activation(said: Settings, model: ModelConfig) -> Iterator[str]:
    """Flags of the activation; Megatron-LM's GELU uses tanh if fused with a bias, else erf."""
    if said["gated_linear_unit"] and said["activation_func"] == "silu":
        yield "--swiglu"
    elif model.gated_linear_unit and model.activation_func == "quick_gelu":
        yield "--quick-geglu"
    squared = (model.activation_func, model.gated_linear_unit) == ("squared_relu", False)
    yield from set_flag("squared_relu", squared)
    exact = model.activation_func == "gelu" and model.add_bias_linear
    if exact or _has_tanh(model):  # its fusion decides between them
        said.mention("activation_func")
    unfused = not said["bias_gelu_fusion"] and not _has_tanh(model)
    yield from set_flag("no_bias_gelu_fusion", exact or squared or unfused)
    fuses = said["bias_swiglu_fusion"]
    if said["glu_linear_offset"]:
        yield from flags(said, "glu_linear_offset")
        fuses = fuses and model.activation_func == "quick_gelu"
    yield from set_flag("no_bias_swiglu_fusion", not fuses)
    yield from flags(said, "activation_func_clamp_value")
    if not said["add_bias_linear"]:
        yield "--disable-bias-linear"


def fusion_flags(said: Settings, model: ModelConfig) -> Iterator[str]:
    """Flags of fusions that are on in Megatron-LM unless turned off."""
    for name in ("rope_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion"):
        on = said[name] and not (name == "rope_fusion" and _turns_unfused(model))
        yield from set_flag(f"no_{name}", not on)


def _turns_unfused(model: ModelConfig) -> bool:
    """Whether Megatron-LM has no fused RoPE for the model: latent attention without YaRN, or
    dsa."""
    return model.multi_latent_attention and (model.rope_type != "yarn" or model.is_sparse)


def _has_tanh(model: ModelConfig) -> bool:
    """Whether the MLP would be a GELU by tanh in Megatron-LM, which it has only fused."""
    return model.activation_func == "gelu_tanh" and model.add_bias_linear


def _hybrid(said: Settings) -> Iterator[str]:
    """Flags for layers of one mixer each, which Megatron-LM builds from a specification."""
    yield "--is-hybrid-model"
    yield from flag("spec", *HYBRID_SPEC)
    pattern = said["hybrid_override_pattern"]
    if pattern.startswith("-"):  # or it would be a flag itself
        yield f"--hybrid-override-pattern={quote(pattern)}"
    else:
        yield from flag("hybrid-override-pattern", pattern)
    yield from flags(said, *OF_MAMBA)


def _lost_of_hybrids(model: ModelConfig, layout: Layout) -> Iterator[str]:
    """Sentences about models whose layers have one mixer each."""
    yield (
        "layers of one mixer each (hybrid_override_pattern) are a model of pretrain_mamba.py, not "
        "of pretrain_gpt.py"
    )
    if model.mtp_num_layers:
        yield (
            f"its layers of one mixer each have no multi-token prediction in release 0.16: "
            f"mtp_num_layers = {model.mtp_num_layers} of mtp_hybrid_override_pattern = "
            f"{model.mtp_hybrid_override_pattern} was left out"
        )
    if model.norm_epsilon != HYBRID_EPSILON:
        yield (
            f"norms of Mamba-2's heads add {HYBRID_EPSILON:g} to the variance there, whatever "
            f"norm_epsilon is: {model.norm_epsilon:g}"
        )
    stages = {len(stage.layers) for stage in layout.split.stages}
    if layout.grid.pp > 1 and (len(stages) > 1 or layout.split.num_virtual > 1):
        yield (
            "its layers of one mixer each are split evenly over pipeline ranks, one stage on each: "
            "pipeline_model_parallel_layout and num_virtual_stages_per_pipeline_rank do not go "
            "with them"
        )


def _lost_of_sparse(layout: Layout) -> Iterator[str]:
    """Sentences about attention to chosen tokens."""
    yield (
        "its release 0.16 has experimental_attention_variant dsa and its flags, but builds layers "
        "of gated_delta_net alone by them: they need a --spec of your own"
    )
    if layout.config.model.q_lora_rank is not None:
        yield "its indexer reads the query latent before its norm, which scores here are made of"
    if layout.config.data.reset_attention_mask:
        yield "its dsa attends to earlier documents, whatever reset_attention_mask says"
    if "core_attn" in layout.config.memory.recomputed_modules:
        yield "its dsa cannot recompute core_attn: that gives an indexer no hidden states"


def lost_of_the_model(said: Settings, layout: Layout) -> Iterator[str]:
    """Sentences on features of the model that Megatron-LM lacks, or implements differently."""
    model = layout.config.model
    if model.position_embedding_type == "rope" and model.rotary_base % 1:
        base = model.rotary_base
        yield f"its rotary_base is a whole number: {round(base)}, not {base}"
    stretch = said["rotary_seq_len_interpolation_factor"]
    if stretch is not None:
        yield (
            f"rotary_seq_len_interpolation_factor {stretch:g} was left out: models of release 0.16 "
            "take no notice of its flag, which later ones read as a whole number"
        )
    if model.hybrid_override_pattern is not None:
        yield from _lost_of_hybrids(model, layout)
    if model.multi_latent_attention and model.position_embedding_type == "none":
        yield "its latent attention turns by RoPE, whatever position_embedding_type says"
    if model.is_sparse:
        yield from _lost_of_sparse(layout)
    elif model.fades_features:
        asked = said.values_of("experimental_attention_variant", *OF_LINEAR_ATTENTION)
        yield f"its release 0.16 has no such layers: {asked}"
    elif model.experimental_attention_variant == "short_convolution":
        yield (
            "it has no short convolutions (experimental_attention_variant short_convolution): its "
            "layers all have attention"
        )
    elif model.experimental_attention_variant is not None and layout.grid.cp > 1:
        yield "its linear attention has no context parallelism in release 0.16"
    if model.use_rope_scaling:
        others = [
            f"{name} is {its:g} there, not {said[name]:g}"
            for name, its in _ITS_ROPE_SCALING.items()
            if said[name] != its
        ]
        if others:
            yield f"its RoPE scaling has these numbers in its code: {'; '.join(others)}"
    function = (model.activation_func, model.gated_linear_unit)
    flagged = ("silu", True), ("quick_gelu", True), ("squared_relu", False), ("gelu", False)
    if function not in flagged and (model.gated_linear_unit or not _has_tanh(model)):
        asked = said.values_of("activation_func", "gated_linear_unit", "add_bias_linear")
        yield f"{asked} have no flag there: its MLP runs GELU without a gate"
    if not said["bias_gelu_fusion"] and _has_tanh(model):
        yield "it has GELU by tanh only fused: bias_gelu_fusion stays on"
    if model.mtp_use_repeated_layer and model.hybrid_override_pattern is None:
        yield "it has no mtp_use_repeated_layer: each MTP module has weights of its own"
    if model.mtp_num_layers and model.position_embedding_type == "learned_absolute":
        yield "it refuses mtp_num_layers with learned positions (position_embedding_type)"
    if said["rope_fusion"] and _turns_unfused(model):
        why = "goes without dsa" if model.is_sparse else "needs rope_type yarn"
        yield f"rope_fusion was left out: with latent attention it {why}"
    if said["qk_l2_norm"] and model.no_rope_freq is not None:
        yield "its qk_l2_norm is of layers without RoPE (no_rope_freq), too"
    if said["parallel_residual"]:
        yield "it has no parallel_residual: attention and MLP run one after the other there"
    if said["parallel_residual_one_norm"]:
        yield "nor parallel_residual_one_norm: attention and MLP have norms of their own there"
    if not said["layernorm_bias"]:
        yield "it has no layernorm_bias: every LayerNorm has a bias there"
    yield from _lost_of_parts(said)
    yield from _lost_of_stretched(said)
    if said["unmodelled"]:
        left_out = ", ".join(model.unmodelled)
        yield f"what this description leaves out (unmodelled) is yours to add: {left_out}"


def _lost_of_parts(said: Settings) -> Iterator[str]:
    """Sentences about norms, biases and bounds that models there do not have."""
    if not said["norm_elementwise_affine"]:
        yield "every norm has weights there: norm_elementwise_affine = false was left out"
    if said["embed_layernorm"]:
        yield "it has no embed_layernorm: embeddings go into the first layer as they are"
    if said["embedding_dropout"] not in (None, said["hidden_dropout"]):
        yield "its embeddings have hidden_dropout, too: embedding_dropout was left out"
    for name in ("attention_out_bias", "mlp_bias"):
        if said[name] and not said["add_bias_linear"]:
            yield f"it has no {name}: linear layers of a block all have a bias there, or none"
    if said["lm_head_bias"]:
        yield "it has no lm_head_bias: the output layer has no bias there"
    if said["position_embedding_offset"]:
        yield "it has no position_embedding_offset: the first position has the first row there"
    if said["clip_qkv"] is not None:
        yield f"it has no clip_qkv: {said['clip_qkv']:g} bounds no queries, keys and values there"


def _lost_of_stretched(said: Settings) -> Iterator[str]:
    """Sentences on rotary positions beyond the original length."""
    if said["rope_type"] == "yarn" and not said["multi_latent_attention"]:
        scaling = f"rotary_scaling_factor = {said['rotary_scaling_factor']}"
        yield (
            f"it has no rope_type yarn but for latent attention: {scaling}, mscale = "
            f"{said['mscale']} and mscale_all_dim = {said['mscale_all_dim']} were left out"
        )
    if said["rope_type"] == "longrope":
        of_lists = "longrope_short_factor", "longrope_long_factor", "longrope_attention_factor"
        given = said.values_of("original_max_position_embeddings", *of_lists)
        yield f"it has no rope_type longrope: {given} were left out"
    if said["rope_type"] == "dynamic":
        given = said.values_of("original_max_position_embeddings", "rotary_scaling_factor")
        yield f"it has no rope_type dynamic: {given} were left out"
    if said["rope_type"] == "yarn":
        given = said.values_of("original_max_position_embeddings", "beta_fast", "beta_slow")
        rounds = said["yarn_correction_range_round_to_int"]
        yield (
            f"fields of its configuration, without flags: {given}, "
            f"yarn_correction_range_round_to_int = {str(rounds).lower()}"
        )
