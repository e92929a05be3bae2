"""Model architectures by name: presets, hub names, or the path of a Hugging Face model."""

import difflib
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.config.huggingface import from_hf_config
from fivefold.config.huggingface.multimodal import text_model_note
from fivefold.config.layer_pattern import runs
from fivefold.config.model import ModelConfig
from fivefold.config.rules.sparse import V32_SIZES
from fivefold.errors import ConfigError, Mistake, did_you_mean, shown
from fivefold.hub import CONFIG_ALONE, fetched_model, model_named

_log = logging.getLogger(__name__)

# fmt: off
_LLAMA2_7B = ModelConfig(
    num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=32,
    ffn_hidden_size=11008, vocab_size=32000)
_LLAMA3_8B = ModelConfig(
    num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8,
    ffn_hidden_size=14336, vocab_size=128256, max_position_embeddings=131072, rotary_base=500000.0,
    use_rope_scaling=True)
_LLAMA4_SCOUT = ModelConfig(  # its text model, as Maverick's
    num_layers=48, hidden_size=5120, num_attention_heads=40, num_query_groups=8, kv_channels=128,
    ffn_hidden_size=16384, vocab_size=202048, max_position_embeddings=10485760,
    rotary_base=500000.0, no_rope_freq="4", use_rope_scaling=True, rope_scaling_factor=16.0,
    rope_high_freq_factor=1.0, qk_l2_norm=True, attention_chunk_size=8192,
    attn_temperature_tuning=True, num_experts=16, moe_router_topk=1,
    moe_router_score_function="sigmoid", moe_apply_probs_on_input=True, moe_ffn_hidden_size=8192,
    moe_shared_expert_intermediate_size=8192)
_PHI35_LONG = (
    1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601,
    1.5899999141693115, 1.600000023841858, 1.6200000047683716, 2.620000123977661,
    3.2300000190734863, 3.2300000190734863, 4.789999961853027, 7.400000095367432, 7.700000286102295,
    9.09000015258789, 12.199999809265137, 17.670000076293945, 24.46000099182129, 28.57000160217285,
    30.420001983642578, 30.840002059936523, 32.590003967285156, 32.93000411987305,
    42.320003509521484, 44.96000289916992, 50.340003967285156, 50.45000457763672, 57.55000305175781,
    57.93000411987305, 58.21000289916992, 60.1400032043457, 62.61000442504883, 62.62000274658203,
    62.71000289916992, 63.1400032043457, 63.1400032043457, 63.77000427246094, 63.93000411987305,
    63.96000289916992, 63.970001220703125, 64.02999877929688, 64.06999969482422, 64.08000183105469,
    64.12000274658203, 64.41000366210938, 64.4800033569336, 64.51000213623047, 64.52999877929688,
    64.83999633789062,
)
_PHI35_SHORT = (
    1.0, 1.0199999809265137, 1.0299999713897705, 1.0299999713897705, 1.0499999523162842,
    1.0499999523162842, 1.0499999523162842, 1.0499999523162842, 1.0499999523162842,
    1.0699999332427979, 1.0999999046325684, 1.1099998950958252, 1.1599998474121094,
    1.1599998474121094, 1.1699998378753662, 1.2899998426437378, 1.339999794960022,
    1.679999828338623, 1.7899998426437378, 1.8199998140335083, 1.8499997854232788,
    1.8799997568130493, 1.9099997282028198, 1.9399996995925903, 1.9899996519088745,
    2.0199997425079346, 2.0199997425079346, 2.0199997425079346, 2.0199997425079346,
    2.0199997425079346, 2.0199997425079346, 2.0299997329711914, 2.0299997329711914,
    2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914,
    2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0799996852874756,
    2.0899996757507324, 2.189999580383301, 2.2199995517730713, 2.5899994373321533,
    2.729999542236328, 2.749999523162842, 2.8399994373321533,
)
_PHI4_LONG = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)
_PHI35_MINI = ModelConfig(
    num_layers=32, hidden_size=3072, num_attention_heads=32, num_query_groups=32,
    ffn_hidden_size=8192, vocab_size=32064, max_position_embeddings=131072, rope_type="longrope",
    longrope_short_factor=_PHI35_SHORT, longrope_long_factor=_PHI35_LONG, window_size=262143)
_MINISTRAL3_8B = ModelConfig(
    num_layers=34, hidden_size=4096, num_attention_heads=32, num_query_groups=8, kv_channels=128,
    ffn_hidden_size=14336, vocab_size=131072, max_position_embeddings=262144, rotary_base=1000000.0,
    rope_type="yarn", rotary_scaling_factor=16.0, original_max_position_embeddings=16384,
    mscale=0.0, attn_temperature_tuning=True, attn_temperature_rotated=True, floor_scale=16384)
_MIXTRAL_8X7B = ModelConfig(
    num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8,
    ffn_hidden_size=14336, vocab_size=32000, max_position_embeddings=32768, rotary_base=1000000.0,
    num_experts=8, moe_router_topk=2)
_QWEN3_8B = ModelConfig(
    num_layers=36, hidden_size=4096, num_attention_heads=32, num_query_groups=8, kv_channels=128,
    ffn_hidden_size=12288, vocab_size=151936, max_position_embeddings=40960, norm_epsilon=1e-6,
    rotary_base=1000000.0, qk_layernorm=True)
_QWEN3_30B_A3B = replace(
    _QWEN3_8B, num_layers=48, hidden_size=2048, num_query_groups=4, ffn_hidden_size=6144,
    num_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768)
_COMMAND_R = ModelConfig(
    num_layers=40, hidden_size=8192, num_attention_heads=64, num_query_groups=64,
    ffn_hidden_size=22528, vocab_size=256000, max_position_embeddings=8192,
    normalization="LayerNorm", layernorm_bias=False, rotary_base=8000000.0, parallel_residual=True,
    parallel_residual_one_norm=True, logits_scaling=16.0, untie_embeddings_and_output_weights=False)
_GEMMA3_4B = ModelConfig(  # its text model
    num_layers=34, hidden_size=2560, num_attention_heads=8, num_query_groups=4, kv_channels=256,
    ffn_hidden_size=10240, vocab_size=262208, max_position_embeddings=131072, norm_epsilon=1e-6,
    apply_layernorm_1p=True, norm_placement="both", embedding_multiplier=2560**0.5,
    rotary_base=1000000.0, rotary_base_local=10000.0, rotary_seq_len_interpolation_factor=8.0,
    activation_func="gelu_tanh", qk_layernorm=True, untie_embeddings_and_output_weights=False,
    window_size=1023, window_attn_skip_freq="6")
_GEMMA4_12B = ModelConfig(  # its text model
    num_layers=48, hidden_size=3840, num_attention_heads=16, num_query_groups=1, kv_channels=512,
    ffn_hidden_size=15360, vocab_size=262144, max_position_embeddings=262144, norm_epsilon=1e-6,
    norm_placement="both", embedding_multiplier=3840**0.5, layer_scalar=1.0, softmax_scale=1.0,
    final_logit_softcapping=30.0, rotary_base=1000000.0, rotary_base_local=10000.0,
    rotary_percent=0.25, rope_type="proportional", activation_func="gelu_tanh", qk_layernorm=True,
    v_l2_norm=True, untie_embeddings_and_output_weights=False, window_size=1023,
    window_attn_skip_freq="6", num_query_groups_local=8, kv_channels_local=256, keys_as_values=True)
_GEMMA4_26B_A4B = replace(  # its text model
    _GEMMA4_12B, num_layers=30, hidden_size=2816, embedding_multiplier=2816**0.5,
    num_query_groups=2, ffn_hidden_size=2112, num_experts=128, moe_router_topk=8,
    moe_ffn_hidden_size=704, moe_shared_expert_intermediate_size=2112, moe_branch_norms=True)
_OLMO2_7B = ModelConfig(
    num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=32,
    ffn_hidden_size=11008, vocab_size=100352, norm_epsilon=1e-6, norm_placement="after",
    rotary_base=500000.0, qk_layernorm=True, qk_layernorm_type="all_heads")
_DEEPSEEK_V2 = ModelConfig(
    num_layers=60, hidden_size=5120, num_attention_heads=128, ffn_hidden_size=12288,
    vocab_size=102400, max_position_embeddings=163840, norm_epsilon=1e-6, num_experts=160,
    moe_router_topk=6, moe_router_num_groups=8, moe_router_group_topk=3, moe_ffn_hidden_size=1536,
    moe_shared_expert_intermediate_size=2 * 1536, moe_layer_freq="[0]*1+[1]*59",
    multi_latent_attention=True, q_lora_rank=1536, kv_lora_rank=512, moe_router_group_scores=1,
    moe_router_pre_softmax=True, moe_router_topk_scaling_factor=16.0, rope_type="yarn",
    rotary_scaling_factor=40.0, original_max_position_embeddings=4096, mscale=0.707,
    mscale_all_dim=0.707)
_DEEPSEEK_V3 = replace(
    _DEEPSEEK_V2, num_layers=61, hidden_size=7168, ffn_hidden_size=18432, vocab_size=129280,
    num_experts=256, moe_router_topk=8, moe_router_group_topk=4, moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048, moe_layer_freq="[0]*3+[1]*58", mtp_num_layers=1,
    moe_router_group_scores=2, moe_router_score_function="sigmoid", moe_router_pre_softmax=False,
    moe_router_topk_scaling_factor=2.5, moe_router_enable_expert_bias=True, mscale=1.0,
    mscale_all_dim=1.0)
_GLM45_AIR = ModelConfig(
    num_layers=46, hidden_size=4096, num_attention_heads=96, num_query_groups=8, kv_channels=128,
    ffn_hidden_size=10944, vocab_size=151552, max_position_embeddings=131072, rotary_base=1000000.0,
    rotary_percent=0.5, add_qkv_bias=True, num_experts=128, moe_router_topk=8,
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
    moe_ffn_hidden_size=1408, moe_shared_expert_intermediate_size=1408,
    moe_layer_freq="[0]*1+[1]*45", mtp_num_layers=1)
_GPT_OSS_120B = ModelConfig(
    num_layers=36, hidden_size=2880, num_attention_heads=64, num_query_groups=8, kv_channels=64,
    ffn_hidden_size=2880, vocab_size=201088, max_position_embeddings=131072, rotary_base=150000.0,
    add_bias_linear=True, num_experts=128, moe_router_topk=4, softmax_type="learnable",
    window_size=127, window_attn_skip_freq="2", activation_func="quick_gelu", glu_linear_offset=1.0,
    activation_func_clamp_value=7.0, rope_type="yarn", rotary_scaling_factor=32.0,
    original_max_position_embeddings=4096, yarn_correction_range_round_to_int=False)
_GPT2 = ModelConfig(
    num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50257,
    max_position_embeddings=1024, normalization="LayerNorm",
    position_embedding_type="learned_absolute", activation_func="gelu_tanh",
    gated_linear_unit=False, add_bias_linear=True, untie_embeddings_and_output_weights=False,
    hidden_dropout=0.1, attention_dropout=0.1)
_GPT3_175B = replace(
    _GPT2, num_layers=96, hidden_size=12288, num_attention_heads=96, max_position_embeddings=2048)
# The GPT models of the Megatron-LM papers.
_GPT_1T = replace(
    _GPT3_175B, num_layers=128, hidden_size=25600, num_attention_heads=160, vocab_size=51200)
_NEMOTRON_8B = ModelConfig(
    num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=16384,
    vocab_size=256000, normalization="LayerNorm", apply_layernorm_1p=True,
    activation_func="squared_relu", gated_linear_unit=False, rotary_percent=0.5)
_NEMOTRON_H_8B = ModelConfig(
    num_layers=52, hidden_size=4096, num_attention_heads=32, num_query_groups=8, kv_channels=128,
    ffn_hidden_size=21504, vocab_size=131072, max_position_embeddings=8192,
    position_embedding_type="none", activation_func="squared_relu", gated_linear_unit=False,
    hybrid_override_pattern="M-M-M-M*" + 3 * "-M-M-M-M-M*" + "-M-M-M-M-M-", mamba_num_heads=128)
_NEMOTRON_H_56B = replace(
    _NEMOTRON_H_8B, num_layers=118, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=32768,
    hybrid_override_pattern="M-M-M-M*" + 9 * "-M-M-M-M-M*" + "-M-M-M-M-M-", mamba_num_heads=256,
    mamba_state_dim=256)
_NEMOTRON_3_NANO = replace(
    _NEMOTRON_H_8B, hidden_size=2688, num_query_groups=2, ffn_hidden_size=None,
    max_position_embeddings=262144,
    hybrid_override_pattern="MEMEM*" + 4 * "EMEMEM*" + "EMEMEMEM*EMEMEMEME", mamba_num_heads=64,
    num_experts=128, moe_router_topk=6, moe_router_score_function="sigmoid",
    moe_router_topk_scaling_factor=2.5, moe_router_enable_expert_bias=True,
    moe_ffn_hidden_size=1856, moe_shared_expert_intermediate_size=3712)
_DEMO_LLAMA = ModelConfig(
    num_layers=4, hidden_size=192, num_attention_heads=8, num_query_groups=4, ffn_hidden_size=512,
    vocab_size=2048, max_position_embeddings=2048)

_DEBUG: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 192,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "make_vocab_size_divisible_by": 128,
}

_INDEXER: dict[str, Any] = {"experimental_attention_variant": "dsa", **V32_SIZES}
PRESETS: Mapping[str, ModelConfig] = {
    "gpt2": _GPT2,
    "gpt-22b": replace(_GPT_1T, num_layers=48, hidden_size=6144, num_attention_heads=64),
    "gpt3-5b": replace(_GPT3_175B, num_layers=24, hidden_size=4096, num_attention_heads=32),
    "gpt3-20b": replace(_GPT3_175B, num_layers=44, hidden_size=6144, num_attention_heads=48),
    "gpt3-175b": _GPT3_175B,
    "gpt-530b": replace(_GPT_1T, num_layers=105, hidden_size=20480, num_attention_heads=128),
    "gpt-1t": _GPT_1T,
    "llama2-7b": _LLAMA2_7B,
    "llama2-13b": replace(
        _LLAMA2_7B, num_layers=40, hidden_size=5120, num_attention_heads=40, num_query_groups=40,
        ffn_hidden_size=13824),
    "llama2-70b": replace(
        _LLAMA2_7B, num_layers=80, hidden_size=8192, num_attention_heads=64, num_query_groups=8,
        ffn_hidden_size=28672),
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": replace(
        _LLAMA3_8B, num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672),
    "llama3-405b": replace(
        _LLAMA3_8B, num_layers=126, hidden_size=16384, num_attention_heads=128,
        ffn_hidden_size=53248),
    "llama3.2-1b": replace(
        _LLAMA3_8B, num_layers=16, hidden_size=2048, kv_channels=64, ffn_hidden_size=8192,
        rope_scaling_factor=32.0, untie_embeddings_and_output_weights=False),
    "llama3.2-3b": replace(
        _LLAMA3_8B, num_layers=28, hidden_size=3072, num_attention_heads=24, kv_channels=128,
        ffn_hidden_size=8192, rope_scaling_factor=32.0, untie_embeddings_and_output_weights=False),
    "llama4-scout": _LLAMA4_SCOUT,
    "llama4-maverick": replace(
        _LLAMA4_SCOUT, max_position_embeddings=1048576, use_rope_scaling=False,
        rope_scaling_factor=8.0, rope_high_freq_factor=4.0, qk_l2_norm=False, num_experts=128,
        moe_layer_freq="([0]*1+[1]*1)*24"),
    "mistral-7b": ModelConfig(
        num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8,
        ffn_hidden_size=14336, vocab_size=32768, max_position_embeddings=32768,
        rotary_base=1000000.0),
    "ministral-3-3b": replace(
        _MINISTRAL3_8B, num_layers=26, hidden_size=3072, ffn_hidden_size=9216,
        untie_embeddings_and_output_weights=False),
    "ministral-3-8b": _MINISTRAL3_8B,
    "hunyuan-mt-7b": ModelConfig(
        num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8,
        kv_channels=128, ffn_hidden_size=14336, vocab_size=128256, max_position_embeddings=32768,
        rotary_base=10000.0 * 100000.0 ** (128 / 126), qk_layernorm=True,
        qk_layernorm_after_rope=True, untie_embeddings_and_output_weights=False),
    "phi-4": ModelConfig(
        num_layers=40, hidden_size=5120, num_attention_heads=40, num_query_groups=10,
        ffn_hidden_size=17920, vocab_size=100352, max_position_embeddings=16384,
        rotary_base=250000.0),
    "phi-3.5-mini": _PHI35_MINI,
    "phi-4-mini": replace(
        _PHI35_MINI, num_attention_heads=24, num_query_groups=8, vocab_size=200064,
        rotary_percent=0.75, longrope_short_factor=(1.0,) * 48, longrope_long_factor=_PHI4_LONG,
        untie_embeddings_and_output_weights=False),
    "command-r": _COMMAND_R,
    "command-r7b": replace(
        _COMMAND_R, num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8,
        kv_channels=128, ffn_hidden_size=14336, rotary_base=50000.0, no_rope_freq="4",
        window_size=4095, window_attn_skip_freq="4", logits_scaling=4.0),
    "smollm3-3b": ModelConfig(
        num_layers=36, hidden_size=2048, num_attention_heads=16, num_query_groups=4,
        ffn_hidden_size=11008, vocab_size=128256, max_position_embeddings=65536, norm_epsilon=1e-6,
        rotary_base=5000000.0, no_rope_freq="4", untie_embeddings_and_output_weights=False),
    "gemma3-1b": replace(
        _GEMMA3_4B, num_layers=26, hidden_size=1152, num_attention_heads=4, num_query_groups=1,
        ffn_hidden_size=6912, vocab_size=262144, max_position_embeddings=32768,
        embedding_multiplier=1152**0.5, rotary_seq_len_interpolation_factor=None, window_size=511),
    "gemma3-4b": _GEMMA3_4B,
    "gemma3-12b": replace(
        _GEMMA3_4B, num_layers=48, hidden_size=3840, num_attention_heads=16, num_query_groups=8,
        ffn_hidden_size=15360, embedding_multiplier=3840**0.5),
    "gemma3-27b": replace(
        _GEMMA3_4B, num_layers=62, hidden_size=5376, num_attention_heads=32, num_query_groups=16,
        kv_channels=128, ffn_hidden_size=21504, embedding_multiplier=5376**0.5,
        softmax_scale=168**-0.5),
    "gemma4-12b": _GEMMA4_12B,
    "gemma4-26b-a4b": _GEMMA4_26B_A4B,
    "gemma4-31b": replace(
        _GEMMA4_12B, num_layers=60, hidden_size=5376, num_attention_heads=32, num_query_groups=4,
        ffn_hidden_size=21504, embedding_multiplier=5376**0.5, num_query_groups_local=16),
    "gpt-j-6b": ModelConfig(
        num_layers=28, hidden_size=4096, num_attention_heads=16, vocab_size=50400,
        max_position_embeddings=2048, normalization="LayerNorm", rotary_percent=0.25,
        parallel_residual=True, parallel_residual_one_norm=True, activation_func="gelu_tanh",
        gated_linear_unit=False, mlp_bias=True, lm_head_bias=True),
    "phi-2": ModelConfig(
        num_layers=32, hidden_size=2560, num_attention_heads=32, num_query_groups=32,
        ffn_hidden_size=10240, vocab_size=51200, max_position_embeddings=2048,
        normalization="LayerNorm", rotary_percent=0.4, parallel_residual=True,
        parallel_residual_one_norm=True, activation_func="gelu_tanh", gated_linear_unit=False,
        add_bias_linear=True, lm_head_bias=True, hidden_dropout=0.1, embedding_dropout=0.0),
    "olmo-7b": ModelConfig(
        num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=32,
        ffn_hidden_size=11008, vocab_size=50304, max_position_embeddings=2048,
        normalization="LayerNorm", norm_elementwise_affine=False),
    "olmo2-7b": _OLMO2_7B,
    "olmo2-13b": replace(
        _OLMO2_7B, num_layers=40, hidden_size=5120, num_attention_heads=40, num_query_groups=40,
        ffn_hidden_size=13824),
    "olmo2-32b": replace(
        _OLMO2_7B, num_layers=64, hidden_size=5120, num_attention_heads=40, num_query_groups=8,
        ffn_hidden_size=27648),
    "olmoe-1b-7b": ModelConfig(
        num_layers=16, hidden_size=2048, num_attention_heads=16, num_query_groups=16,
        ffn_hidden_size=1024, vocab_size=50304, qk_layernorm=True, qk_layernorm_type="all_heads",
        num_experts=64, moe_router_topk=8, moe_router_pre_softmax=True),
    "qwen3-0.6b": replace(
        _QWEN3_8B, num_layers=28, hidden_size=1024, num_attention_heads=16, ffn_hidden_size=3072,
        untie_embeddings_and_output_weights=False),
    "qwen3-1.7b": replace(
        _QWEN3_8B, num_layers=28, hidden_size=2048, num_attention_heads=16, ffn_hidden_size=6144,
        untie_embeddings_and_output_weights=False),
    "qwen3-4b": replace(
        _QWEN3_8B, hidden_size=2560, ffn_hidden_size=9728,
        untie_embeddings_and_output_weights=False),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-14b": replace(
        _QWEN3_8B, num_layers=40, hidden_size=5120, num_attention_heads=40, ffn_hidden_size=17408),
    "qwen3-32b": replace(
        _QWEN3_8B, num_layers=64, hidden_size=5120, num_attention_heads=64, ffn_hidden_size=25600),
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-235b-a22b": replace(
        _QWEN3_30B_A3B, num_layers=94, hidden_size=4096, num_attention_heads=64,
        ffn_hidden_size=12288, moe_ffn_hidden_size=1536),
    "qwen3-next-80b-a3b": replace(
        _QWEN3_30B_A3B, num_attention_heads=16, num_query_groups=2, kv_channels=256,
        ffn_hidden_size=5120, max_position_embeddings=262144, rotary_base=10000000.0,
        rotary_percent=0.25, apply_layernorm_1p=True, attention_output_gate=True,
        experimental_attention_variant="gated_delta_net", linear_attention_freq="4",
        num_experts=512, moe_router_topk=10, moe_ffn_hidden_size=512,
        moe_shared_expert_intermediate_size=512, moe_shared_expert_gate=True),
    "qwen3.5-27b": replace(  # its text model
        _QWEN3_8B, num_layers=64, hidden_size=5120, num_attention_heads=24, num_query_groups=4,
        kv_channels=256, ffn_hidden_size=17408, vocab_size=248320, max_position_embeddings=262144,
        rotary_base=10000000.0, rotary_percent=0.25, apply_layernorm_1p=True,
        attention_output_gate=True, experimental_attention_variant="gated_delta_net",
        linear_attention_freq="4", linear_num_value_heads=48),
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "mixtral-8x22b": replace(
        _MIXTRAL_8X7B, num_layers=56, hidden_size=6144, num_attention_heads=48,
        ffn_hidden_size=16384, max_position_embeddings=65536),
    "mimo-v2-flash": ModelConfig(
        num_layers=48, hidden_size=4096, num_attention_heads=64, num_query_groups=4,
        kv_channels=192, v_channels=128, value_multiplier=0.707, ffn_hidden_size=16384,
        vocab_size=152576, max_position_embeddings=131072, rotary_base=5000000.0,
        rotary_base_local=10000.0, rotary_percent=0.334, window_size=128,
        window_attn_skip_freq=runs([n > 0 and (n + 1) % 6 != 0 for n in range(48)]),
        num_query_groups_local=8, softmax_type_local="learnable", num_experts=256,
        moe_router_topk=8, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_ffn_hidden_size=2048, moe_layer_freq="[0]*1+[1]*47"),
    "minimax-m2": ModelConfig(
        num_layers=62, hidden_size=3072, num_attention_heads=48, num_query_groups=8,
        kv_channels=128, ffn_hidden_size=1536, vocab_size=200064, max_position_embeddings=196608,
        norm_epsilon=1e-6, rotary_base=5000000.0, rotary_percent=0.5, qk_layernorm=True,
        qk_layernorm_type="all_heads", num_experts=256, moe_router_topk=8,
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    "nemotron-8b": _NEMOTRON_8B,
    "nemotron-22b": replace(
        _NEMOTRON_8B, num_layers=40, hidden_size=6144, num_attention_heads=48,
        ffn_hidden_size=24576),
    "nemotron-340b": replace(
        _NEMOTRON_8B, num_layers=96, hidden_size=18432, num_attention_heads=96, num_query_groups=8,
        ffn_hidden_size=73728),
    "nemotron-h-8b": _NEMOTRON_H_8B,
    "nemotron-h-47b": replace(
        _NEMOTRON_H_56B, num_layers=98, ffn_hidden_size=30720, hybrid_override_pattern=8 * "M-" +
        "M*" + 10 * "-M" + "*" + 2 * "-M-M-M-M-M*" + 7 * "-M" + "---MM---M-M*-M-M-M-M-M-"),
    "nemotron-h-56b": _NEMOTRON_H_56B,
    "nemotron-3-nano-30b-a3b": _NEMOTRON_3_NANO,
    "nemotron-3-super-120b-a12b": replace(
        _NEMOTRON_3_NANO, num_layers=88, hidden_size=4096,
        hybrid_override_pattern="MEMEMEM*" + 2 * "EMEMEMEM*" + 4 * "EMEMEMEMEM*" +
        "EMEMEMEM*EMEMEMEME", mamba_num_heads=128, num_experts=512, moe_router_topk=22,
        moe_router_topk_scaling_factor=5.0, moe_ffn_hidden_size=2688, moe_latent_size=1024,
        moe_shared_expert_intermediate_size=5376, mtp_num_layers=1,
        mtp_hybrid_override_pattern="*E"),
    "deepseek-v2-lite": replace(
        _DEEPSEEK_V2, num_layers=27, hidden_size=2048, num_attention_heads=16,
        ffn_hidden_size=10944, num_experts=64, moe_router_num_groups=None,
        moe_router_group_topk=None, moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2 * 1408, moe_layer_freq="[0]*1+[1]*26",
        moe_router_group_scores=None, moe_router_topk_scaling_factor=None, q_lora_rank=None),
    "deepseek-v2": _DEEPSEEK_V2,
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3.2": replace(_DEEPSEEK_V3, **_INDEXER),
    "kimi-k2": replace(
        _DEEPSEEK_V3, num_attention_heads=64, vocab_size=163840, max_position_embeddings=131072,
        rotary_base=50000.0, num_experts=384, moe_router_num_groups=None,
        moe_router_group_topk=None, moe_layer_freq="[0]*1+[1]*60", mtp_num_layers=0,
        moe_router_group_scores=None, moe_router_topk_scaling_factor=2.827,
        rotary_scaling_factor=32.0, beta_fast=1.0),
    "kimi-linear-48b-a3b": ModelConfig(
        num_layers=27, hidden_size=2304, num_attention_heads=32, ffn_hidden_size=9216,
        vocab_size=163840, max_position_embeddings=1048576, norm_epsilon=1e-5,
        position_embedding_type="none", num_experts=256, moe_router_topk=8,
        moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.446,
        moe_router_enable_expert_bias=True, moe_ffn_hidden_size=1024,
        moe_shared_expert_intermediate_size=1024, moe_layer_freq="[0]*1+[1]*26",
        multi_latent_attention=True, qk_head_dim=128, v_head_dim=128, latent_norm_epsilon=1e-6,
        experimental_attention_variant="kimi_delta_attention",
        linear_attention_freq=f"{'[1]*3+[0]*1+' * 6}[1]*2+[0]*1", linear_num_key_heads=32),
    "glm-4.5-air": _GLM45_AIR,
    "glm-4.5": replace(
        _GLM45_AIR, num_layers=92, hidden_size=5120, ffn_hidden_size=12288, num_experts=160,
        moe_ffn_hidden_size=1536, moe_shared_expert_intermediate_size=1536,
        moe_layer_freq="[0]*3+[1]*89", moe_router_topk_scaling_factor=2.5, qk_layernorm=True),
    "glm-4.7-flash": ModelConfig(
        num_layers=47, hidden_size=2048, num_attention_heads=20, ffn_hidden_size=10240,
        vocab_size=154880, max_position_embeddings=202752, rotary_base=1000000.0, num_experts=64,
        moe_router_topk=4, moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=1.8,
        moe_router_enable_expert_bias=True, moe_ffn_hidden_size=1536,
        moe_shared_expert_intermediate_size=1536, moe_layer_freq="[0]*1+[1]*46",
        multi_latent_attention=True, q_lora_rank=768, qk_head_dim=192, v_head_dim=256,
        latent_norm_epsilon=1e-6, mtp_num_layers=1),
    "glm-5": ModelConfig(
        num_layers=78, hidden_size=6144, num_attention_heads=64, ffn_hidden_size=12288,
        vocab_size=154880, max_position_embeddings=202752, rotary_base=1000000.0, num_experts=256,
        moe_router_topk=8, moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True, moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048, moe_layer_freq="[0]*3+[1]*75",
        multi_latent_attention=True, q_lora_rank=2048, qk_head_dim=192, v_head_dim=256,
        latent_norm_epsilon=1e-6, mtp_num_layers=1, **_INDEXER | {"dsa_indexer_n_heads": 32}),
    "solar-open-100b": ModelConfig(
        num_layers=48, hidden_size=4096, num_attention_heads=64, num_query_groups=8,
        kv_channels=128, vocab_size=196608, max_position_embeddings=131072, rotary_base=1000000.0,
        rope_type="yarn", rotary_scaling_factor=2.0, original_max_position_embeddings=65536,
        num_experts=128, moe_router_topk=8, moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True, moe_ffn_hidden_size=1280,
        moe_shared_expert_intermediate_size=1280),
    "k-exaone": ModelConfig(
        num_layers=48, hidden_size=6144, num_attention_heads=64, num_query_groups=8,
        kv_channels=128, ffn_hidden_size=18432, vocab_size=153600, max_position_embeddings=262144,
        rotary_base=1000000.0, no_rope_freq="4", qk_layernorm=True, window_size=127,
        window_attn_skip_freq="4", num_experts=128, moe_router_topk=8,
        moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True, moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048, moe_layer_freq="[0]*1+[1]*47"),
    "gpt-oss-20b": replace(_GPT_OSS_120B, num_layers=24, num_experts=32),
    "gpt-oss-120b": _GPT_OSS_120B,
    "demo-llama": _DEMO_LLAMA,
    "demo-moe": replace(_DEMO_LLAMA, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=256),
    "debug-llama": replace(
        _DEMO_LLAMA, num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=192, vocab_size=512, max_position_embeddings=512),
    "debug-gpt": replace(
        _GPT2, num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=500,
        max_position_embeddings=512),
    "debug-mixtral": replace(_MIXTRAL_8X7B, **_DEBUG, num_query_groups=2, moe_ffn_hidden_size=96),
    "debug-deepseek-v3": replace(
        _DEEPSEEK_V3, **_DEBUG, q_lora_rank=32, kv_lora_rank=16, qk_head_dim=16,
        qk_pos_emb_head_dim=8, v_head_dim=16, num_experts=16, moe_router_topk=4,
        moe_router_num_groups=4, moe_router_group_topk=2, moe_ffn_hidden_size=48,
        moe_shared_expert_intermediate_size=48, moe_layer_freq="[0]*1+[1]*3"),
    "debug-gpt-oss": replace(
        _GPT_OSS_120B, **_DEBUG, num_query_groups=2, kv_channels=16, window_size=15, num_experts=8,
        moe_router_topk=2, moe_ffn_hidden_size=96),
}
# fmt: on

# The Llama 3 presets are the 3.1 models, whose context is stretched to 131,072 tokens.
HUB_NAMES: Mapping[str, str] = {
    "gpt2": "gpt2",
    "openai-community/gpt2": "gpt2",
    "meta-llama/Llama-2-7b-hf": "llama2-7b",
    "meta-llama/Llama-2-13b-hf": "llama2-13b",
    "meta-llama/Llama-2-70b-hf": "llama2-70b",
    "meta-llama/Llama-3.1-8B": "llama3-8b",
    "meta-llama/Llama-3.1-70B": "llama3-70b",
    "meta-llama/Llama-3.1-405B": "llama3-405b",
    "meta-llama/Llama-3.2-1B": "llama3.2-1b",
    "meta-llama/Llama-3.2-3B": "llama3.2-3b",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4-scout",
    "meta-llama/Llama-4-Maverick-17B-128E": "llama4-maverick",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "llama4-maverick",
    "mistralai/Mistral-7B-v0.3": "mistral-7b",
    "mistralai/Ministral-3-3B-Base-2512": "ministral-3-3b",
    "mistralai/Ministral-3-8B-Base-2512": "ministral-3-8b",
    "tencent/Hunyuan-MT-7B": "hunyuan-mt-7b",
    "microsoft/phi-4": "phi-4",
    "microsoft/Phi-3.5-mini-instruct": "phi-3.5-mini",
    "microsoft/Phi-4-mini-instruct": "phi-4-mini",
    "CohereForAI/c4ai-command-r-v01": "command-r",
    "CohereForAI/c4ai-command-r7b-12-2024": "command-r7b",
    "HuggingFaceTB/SmolLM3-3B": "smollm3-3b",
    "google/gemma-3-1b-pt": "gemma3-1b",
    "google/gemma-3-1b-it": "gemma3-1b",
    "google/gemma-3-4b-pt": "gemma3-4b",
    "google/gemma-3-4b-it": "gemma3-4b",
    "google/gemma-3-12b-pt": "gemma3-12b",
    "google/gemma-3-12b-it": "gemma3-12b",
    "google/gemma-3-27b-pt": "gemma3-27b",
    "google/gemma-3-27b-it": "gemma3-27b",
    "EleutherAI/gpt-j-6b": "gpt-j-6b",
    "microsoft/phi-2": "phi-2",
    "allenai/OLMo-7B-hf": "olmo-7b",
    "allenai/OLMo-2-1124-7B": "olmo2-7b",
    "allenai/OLMo-2-1124-13B": "olmo2-13b",
    "allenai/OLMo-2-0325-32B": "olmo2-32b",
    "allenai/OLMoE-1B-7B-0924": "olmoe-1b-7b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-0.6B-Base": "qwen3-0.6b",
    "Qwen/Qwen3-1.7B": "qwen3-1.7b",
    "Qwen/Qwen3-1.7B-Base": "qwen3-1.7b",
    "Qwen/Qwen3-4B": "qwen3-4b",
    "Qwen/Qwen3-4B-Base": "qwen3-4b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-8B-Base": "qwen3-8b",
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b-a3b",
    "Qwen/Qwen3-Next-80B-A3B-Thinking": "qwen3-next-80b-a3b",
    "Qwen/Qwen3.5-27B": "qwen3.5-27b",
    "nvidia/Nemotron-H-8B-Base-8K": "nemotron-h-8b",
    "nvidia/Nemotron-H-56B-Base-8K": "nemotron-h-56b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": "nemotron-3-nano-30b-a3b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": "nemotron-3-super-120b-a12b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "mistralai/Mixtral-8x22B-v0.1": "mixtral-8x22b",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V2": "deepseek-v2",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-Base": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
    "deepseek-ai/DeepSeek-V3.2-Exp": "deepseek-v3.2",
    "moonshotai/Kimi-K2-Base": "kimi-k2",
    "moonshotai/Kimi-K2-Instruct": "kimi-k2",
    "moonshotai/Kimi-Linear-48B-A3B-Base": "kimi-linear-48b-a3b",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "kimi-linear-48b-a3b",
    "zai-org/GLM-4.5": "glm-4.5",
    "zai-org/GLM-4.5-Base": "glm-4.5",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "zai-org/GLM-4.5-Air-Base": "glm-4.5-air",
    "zai-org/GLM-4.7-Flash": "glm-4.7-flash",
    "zai-org/GLM-5": "glm-5",
    "upstage/Solar-Open-100B": "solar-open-100b",
    "LGAI-EXAONE/K-EXAONE-236B-A23B": "k-exaone",
    "MiniMaxAI/MiniMax-M2": "minimax-m2",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}


_NEAREST = 8  # presets named for a model that is not known


def resolve_model(name_or_path: str | Path) -> ModelConfig:
    """The architecture of a preset, the path of a Hugging Face model, or a model on the hub.

    Raises:
        ConfigError: the name is not known, or the model of that name is not supported.
    """
    name = str(name_or_path)
    preset = PRESETS.get(HUB_NAMES.get(name, name))
    if preset is not None:
        return preset
    if (path := _path(name)) is not None:
        if path.suffix == ".toml":
            what = f"{shown(name)} is a recipe, where a preset or a config.json is asked for"
            raise ConfigError(Mistake(what, ("a recipe is given without a flag",)))
        return from_hf_config(path)
    why = ["it is neither a preset, nor a path with a config.json, nor ORG/NAME of the hub"]
    if (named := model_named(name)) is not None:
        try:
            folder = fetched_model(named, CONFIG_ALONE, _log.info)
        except ConfigError as error:
            why = ["it is neither a preset nor a path with a config.json", *str(error).splitlines()]
        else:
            return from_hf_config(folder)
    what = f"unknown model {shown(name)}{did_you_mean(name, [*PRESETS, *HUB_NAMES])}"
    near = difflib.get_close_matches(name, PRESETS, _NEAREST) or PRESETS
    raise ConfigError(Mistake(what, tuple(why), works=tuple(near)))


def model_note(name: str) -> str | None:
    """A note about parts of a model that are not read, or about its origin; None: there is nothing
    to say."""
    if HUB_NAMES.get(name, name) in PRESETS:
        return None
    if (path := _path(name)) is not None:
        return None if path.suffix == ".toml" else text_model_note(path)
    if (named := model_named(name)) is None:
        return None
    folder = fetched_model(named, CONFIG_ALONE, _log.info)
    notes = (f"{name} is {named.page} at {folder.name[:8]}", text_model_note(folder))
    return "; ".join(filter(None, notes))


def _path(name: str) -> Path | None:
    with suppress(OSError):  # a name that is too long for a path
        if (path := Path(os.path.expanduser(name))).exists():
            return path
    return None
