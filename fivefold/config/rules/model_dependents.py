"""Settings of a model that have an effect only together with another one."""

from fivefold.config.by_layer import (
    OF_CONVOLUTIONS,
    OF_DELTA_NET,
    OF_INDEXER,
    OF_ITS_LOSS,
    OF_LATENTS,
    OF_MAMBA,
    OF_WINDOWS,
)
from fivefold.config.lora import OF_ADAPTERS
from fivefold.config.rules.layer_dependents import OF_LAYERS
from fivefold.config.rules.orphan import Dependents, where
from fivefold.config.rules.sparse import TO_HAVE_IT

OF_MODELS = (
    *OF_LAYERS,
    where(
        "rotary_base rotary_percent rotary_interleaved no_rope_freq qk_l2_norm "
        "attention_chunk_size attn_temperature_rotated",
        "position_embedding_type = rope",
        "is for rotary positions",
    ),
    where(
        "position_embedding_offset",
        "position_embedding_type = learned_absolute",
        "is of a table of positions",
    ),
    where(" ".join(OF_ADAPTERS), "lora_rank != none", "is for adapters", "--lora-rank 16"),
    where(
        " ".join((*OF_LATENTS, "latent_norm_epsilon")),
        "multi_latent_attention = true",
        "is for keys and values that are made from latents",
    ),
    where(
        "moe_router_group_scores",
        "moe_router_num_groups != none",
        "is how a router chooses among groups of experts",
        "--moe-router-num-groups 2 --moe-router-group-topk 1",
    ),
    where("parallel_residual_one_norm", "parallel_residual = true", "is for branches side by side"),
    Dependents(
        ("moe_router_norm_epsilon",),
        "moe_router_score_function",
        lambda c: c.model.moe_router_score_function == "sigmoid" and c.model.moe_router_topk > 1,
        "is for several sigmoid scores that are divided by their sum",
        ("--moe-router-score-function sigmoid --moe-router-topk 2",),
    ),
    where("layernorm_bias", "normalization = LayerNorm", "is of LayerNorm"),
    where(
        "layernorm_bias apply_layernorm_1p",
        "norm_elementwise_affine = true",
        "is of norms with weights",
    ),
    where(
        " ".join(OF_CONVOLUTIONS),
        "experimental_attention_variant = gated_delta_net or "
        "experimental_attention_variant = kimi_delta_attention or "
        "experimental_attention_variant = short_convolution",
        "is for layers with linear attention, or short convolutions",
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 2",
    ),
    where(
        " ".join(OF_DELTA_NET),
        "experimental_attention_variant = gated_delta_net or "
        "experimental_attention_variant = kimi_delta_attention",
        "is for layers with linear attention",
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 2",
    ),
    where(
        " ".join((*OF_INDEXER, *OF_ITS_LOSS)),
        "experimental_attention_variant = dsa",
        "is for attention to tokens that an indexer chooses",
        TO_HAVE_IT,
    ),
    Dependents(
        OF_ITS_LOSS[1:],
        OF_ITS_LOSS[0],
        lambda c: bool(c.model.dsa_indexer_loss_coeff),
        "is how the indexer is trained",
        ("--dsa-indexer-loss-coeff 0.01",),
    ),
    where(
        " ".join(OF_MAMBA),
        "hybrid_override_pattern != none",
        "is for layers with Mamba-2",
        "--num-layers 2 --hybrid-override-pattern M-",
    ),
    where(
        "mtp_hybrid_override_pattern",
        "hybrid_override_pattern != none",
        "is for layers of one mixer each",
        "--num-layers 2 --hybrid-override-pattern M-",
    ),
    where(
        "attn_temperature_tuning",
        "no_rope_freq != none or attn_temperature_rotated = true",
        "is for layers without RoPE, or for those with it",
        "--no-rope-freq 4",
    ),
    where(
        "attn_temperature_rotated attn_scale floor_scale",
        "attn_temperature_tuning = true",
        "says where attention is sharpened, and how much",
    ),
    where(
        "qk_layernorm_type qk_layernorm_after_rope",
        "qk_layernorm = true",
        "is for norms of queries and keys",
    ),
    where(
        "rope_scaling_factor rope_low_freq_factor rope_high_freq_factor "
        "rope_original_max_position_embeddings",
        "use_rope_scaling = true",
        "is for scaled rotary positions",
    ),
    where(
        "rotary_scaling_factor",
        "rope_type = yarn or rope_type = dynamic",
        "is for positions that YaRN or dynamic NTK stretches",
    ),
    where(
        "beta_fast beta_slow mscale mscale_all_dim yarn_correction_range_round_to_int",
        "rope_type = yarn",
        "is for positions that YaRN stretches",
    ),
    where(
        "longrope_short_factor longrope_long_factor longrope_attention_factor",
        "rope_type = longrope",
        "is for positions that LongRoPE stretches",
    ),
    where(
        "original_max_position_embeddings",
        "rope_type = yarn or rope_type = longrope or rope_type = dynamic",
        "is for positions that YaRN, LongRoPE or dynamic NTK stretches",
        "--rope-type yarn",
    ),
    where(
        "window_attn_skip_freq",
        "window_size != none",
        "chooses the layers that have a window",
        "--window-size 128",
    ),
    where(
        " ".join(OF_WINDOWS),
        "window_attn_skip_freq != none",
        "is for layers with a window, where others have none",
        "--window-size 128 --window-attn-skip-freq 2",
    ),
    where(
        "rotary_base_local",
        "window_size != none",
        "is for layers with a window",
        "--window-size 128",
    ),
    where(
        "mtp_hybrid_override_pattern",
        "mtp_num_layers != 0",
        "is for the layers of multi-token prediction",
        "--mtp-num-layers 1",
    ),
    Dependents(
        ("mtp_use_repeated_layer",),
        "mtp_num_layers",
        lambda c: c.model.mtp_num_layers > 1,
        "is for multi-token prediction of several tokens",
        ("--mtp-num-layers 2",),
    ),
    where(
        "first_last_layers_bf16",
        "fp8_format != none or fp4_format != none",
        "keeps layers in bf16 where others multiply in 8 or 4 bits",
        "--fp8-format hybrid",
    ),
    where(
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        "first_last_layers_bf16 = true",
        "counts layers that keep bf16",
    ),
    where(
        "mtp_loss_scaling_factor",
        "mtp_num_layers != 0",
        "weighs the loss of multi-token prediction",
        "--mtp-num-layers 1",
    ),
)
"""Settings of models that have an effect only together with another setting."""
