"""Model architectures by name: presets, hub names, or the path of a Hugging Face model."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.config.huggingface import from_hf_config
from fivefold.config.model import ModelConfig
from fivefold.errors import ConfigError, Mistake, did_you_mean, shown

_LLAMA2_7B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=32,
    ffn_hidden_size=11008,
    vocab_size=32000,
)
_LLAMA3_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    vocab_size=128256,
    max_position_embeddings=131072,
    rotary_base=500000.0,
    use_rope_scaling=True,
)
_MIXTRAL_8X7B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    vocab_size=32000,
    max_position_embeddings=32768,
    rotary_base=1000000.0,
    num_experts=8,
    moe_router_topk=2,
)
_QWEN3_8B = ModelConfig(
    num_layers=36,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=12288,
    vocab_size=151936,
    max_position_embeddings=40960,
    norm_epsilon=1e-6,
    rotary_base=1000000.0,
    qk_layernorm=True,
)
_QWEN3_30B_A3B = replace(
    _QWEN3_8B,
    num_layers=48,
    hidden_size=2048,
    num_query_groups=4,
    ffn_hidden_size=6144,
    num_experts=128,
    moe_router_topk=8,
    moe_ffn_hidden_size=768,
)
_DEEPSEEK_V2 = ModelConfig(
    num_layers=60,
    hidden_size=5120,
    num_attention_heads=128,
    ffn_hidden_size=12288,
    vocab_size=102400,
    max_position_embeddings=163840,
    norm_epsilon=1e-6,
    num_experts=160,
    moe_router_topk=6,
    moe_router_num_groups=8,
    moe_router_group_topk=3,
    moe_ffn_hidden_size=1536,
    moe_shared_expert_intermediate_size=2 * 1536,
    moe_layer_freq="[0]*1+[1]*59",
    multi_latent_attention=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    moe_router_group_scores=1,
    moe_router_pre_softmax=True,
    moe_router_topk_scaling_factor=16.0,
    rope_type="yarn",
    rotary_scaling_factor=40.0,
    original_max_position_embeddings=4096,
    mscale=0.707,
    mscale_all_dim=0.707,
)
_DEEPSEEK_V3 = replace(
    _DEEPSEEK_V2,
    num_layers=61,
    hidden_size=7168,
    ffn_hidden_size=18432,
    vocab_size=129280,
    num_experts=256,
    moe_router_topk=8,
    moe_router_group_topk=4,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_layer_freq="[0]*3+[1]*58",
    mtp_num_layers=1,
    moe_router_group_scores=2,
    moe_router_score_function="sigmoid",
    moe_router_pre_softmax=False,
    moe_router_topk_scaling_factor=2.5,
    moe_router_enable_expert_bias=True,
    mscale=1.0,
    mscale_all_dim=1.0,
)
_GLM45_AIR = ModelConfig(
    num_layers=46,
    hidden_size=4096,
    num_attention_heads=96,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=10944,
    vocab_size=151552,
    max_position_embeddings=131072,
    rotary_base=1000000.0,
    rotary_percent=0.5,
    add_qkv_bias=True,
    num_experts=128,
    moe_router_topk=8,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_ffn_hidden_size=1408,
    moe_shared_expert_intermediate_size=1408,
    moe_layer_freq="[0]*1+[1]*45",
    mtp_num_layers=1,
)
_GPT_OSS_120B = ModelConfig(
    num_layers=36,
    hidden_size=2880,
    num_attention_heads=64,
    num_query_groups=8,
    kv_channels=64,
    ffn_hidden_size=2880,
    vocab_size=201088,
    max_position_embeddings=131072,
    rotary_base=150000.0,
    add_bias_linear=True,
    num_experts=128,
    moe_router_topk=4,
    softmax_type="learnable",
    window_size=127,
    window_attn_skip_freq="2",
    activation_func="quick_gelu",
    glu_linear_offset=1.0,
    activation_func_clamp_value=7.0,
    rope_type="yarn",
    rotary_scaling_factor=32.0,
    original_max_position_embeddings=4096,
    yarn_correction_range_round_to_int=False,
)
_GPT2 = ModelConfig(
    num_layers=12,
    hidden_size=768,
    num_attention_heads=12,
    vocab_size=50257,
    max_position_embeddings=1024,
    normalization="LayerNorm",
    position_embedding_type="learned_absolute",
    activation_func="gelu_tanh",
    gated_linear_unit=False,
    add_bias_linear=True,
    untie_embeddings_and_output_weights=False,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
_GPT3_175B = replace(
    _GPT2,
    num_layers=96,
    hidden_size=12288,
    num_attention_heads=96,
    max_position_embeddings=2048,
)
# The GPT models of the Megatron-LM papers.
_GPT_1T = replace(
    _GPT3_175B, num_layers=128, hidden_size=25600, num_attention_heads=160, vocab_size=51200
)
_NEMOTRON_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    ffn_hidden_size=16384,
    vocab_size=256000,
    normalization="LayerNorm",
    activation_func="gelu",
    gated_linear_unit=False,
    rotary_percent=0.5,
    unmodelled=("squared ReLU, for which stands GELU",),
)
_DEMO_LLAMA = ModelConfig(
    num_layers=4,
    hidden_size=192,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=512,
    vocab_size=2048,
    max_position_embeddings=2048,
)

_DEBUG: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 192,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "make_vocab_size_divisible_by": 128,
}

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
        _LLAMA2_7B,
        num_layers=40,
        hidden_size=5120,
        num_attention_heads=40,
        num_query_groups=40,
        ffn_hidden_size=13824,
    ),
    "llama2-70b": replace(
        _LLAMA2_7B,
        num_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        num_query_groups=8,
        ffn_hidden_size=28672,
    ),
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": replace(
        _LLAMA3_8B, num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672
    ),
    "llama3-405b": replace(
        _LLAMA3_8B,
        num_layers=126,
        hidden_size=16384,
        num_attention_heads=128,
        ffn_hidden_size=53248,
    ),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-14b": replace(
        _QWEN3_8B, num_layers=40, hidden_size=5120, num_attention_heads=40, ffn_hidden_size=17408
    ),
    "qwen3-32b": replace(
        _QWEN3_8B, num_layers=64, hidden_size=5120, num_attention_heads=64, ffn_hidden_size=25600
    ),
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-235b-a22b": replace(
        _QWEN3_30B_A3B,
        num_layers=94,
        hidden_size=4096,
        num_attention_heads=64,
        ffn_hidden_size=12288,
        moe_ffn_hidden_size=1536,
    ),
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "mixtral-8x22b": replace(
        _MIXTRAL_8X7B,
        num_layers=56,
        hidden_size=6144,
        num_attention_heads=48,
        ffn_hidden_size=16384,
        max_position_embeddings=65536,
    ),
    "nemotron-8b": _NEMOTRON_8B,
    "nemotron-22b": replace(
        _NEMOTRON_8B,
        num_layers=40,
        hidden_size=6144,
        num_attention_heads=48,
        ffn_hidden_size=24576,
    ),
    "nemotron-340b": replace(
        _NEMOTRON_8B,
        num_layers=96,
        hidden_size=18432,
        num_attention_heads=96,
        num_query_groups=8,
        ffn_hidden_size=73728,
    ),
    "deepseek-v2-lite": replace(
        _DEEPSEEK_V2,
        num_layers=27,
        hidden_size=2048,
        num_attention_heads=16,
        ffn_hidden_size=10944,
        num_experts=64,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2 * 1408,
        moe_layer_freq="[0]*1+[1]*26",
        moe_router_group_scores=None,
        moe_router_topk_scaling_factor=None,
        q_lora_rank=None,
    ),
    "deepseek-v2": _DEEPSEEK_V2,
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": replace(
        _DEEPSEEK_V3,
        num_attention_heads=64,
        vocab_size=163840,
        max_position_embeddings=131072,
        rotary_base=50000.0,
        num_experts=384,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_layer_freq="[0]*1+[1]*60",
        mtp_num_layers=0,
        moe_router_group_scores=None,
        moe_router_topk_scaling_factor=2.827,
        rotary_scaling_factor=32.0,
        beta_fast=1.0,
    ),
    "glm-4.5-air": _GLM45_AIR,
    "glm-4.5": replace(
        _GLM45_AIR,
        num_layers=92,
        hidden_size=5120,
        ffn_hidden_size=12288,
        num_experts=160,
        moe_ffn_hidden_size=1536,
        moe_shared_expert_intermediate_size=1536,
        moe_layer_freq="[0]*3+[1]*89",
        moe_router_topk_scaling_factor=2.5,
        qk_layernorm=True,
    ),
    "gpt-oss-20b": replace(
        _GPT_OSS_120B,
        num_layers=24,
        num_experts=32,
    ),
    "gpt-oss-120b": _GPT_OSS_120B,
    "demo-llama": _DEMO_LLAMA,
    "demo-moe": replace(_DEMO_LLAMA, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=256),
    "debug-llama": replace(
        _DEMO_LLAMA,
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=192,
        vocab_size=512,
        max_position_embeddings=512,
    ),
    "debug-gpt": replace(
        _GPT2,
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=500,
        max_position_embeddings=512,
    ),
    "debug-mixtral": replace(_MIXTRAL_8X7B, **_DEBUG, num_query_groups=2, moe_ffn_hidden_size=96),
    "debug-deepseek-v3": replace(
        _DEEPSEEK_V3,
        **_DEBUG,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        num_experts=16,
        moe_router_topk=4,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_ffn_hidden_size=48,
        moe_shared_expert_intermediate_size=48,
        moe_layer_freq="[0]*1+[1]*3",
    ),
    "debug-gpt-oss": replace(
        _GPT_OSS_120B,
        **_DEBUG,
        num_query_groups=2,
        kv_channels=16,
        window_size=15,
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=96,
    ),
}

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
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-8B-Base": "qwen3-8b",
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "mistralai/Mixtral-8x22B-v0.1": "mixtral-8x22b",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V2": "deepseek-v2",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-Base": "deepseek-v3",
    "moonshotai/Kimi-K2-Base": "kimi-k2",
    "moonshotai/Kimi-K2-Instruct": "kimi-k2",
    "zai-org/GLM-4.5": "glm-4.5",
    "zai-org/GLM-4.5-Base": "glm-4.5",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "zai-org/GLM-4.5-Air-Base": "glm-4.5-air",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}


def resolve_model(name_or_path: str | Path) -> ModelConfig:
    """The architecture of a preset, a hub name, or the path of a Hugging Face model.

    Raises:
        ConfigError: the name is not known, or the model at that path is not supported.
    """
    name = str(name_or_path)
    preset = PRESETS.get(HUB_NAMES.get(name, name))
    if preset is not None:
        return preset
    with suppress(OSError):  # a name that is too long for a path
        if (path := Path(os.path.expanduser(name))).exists():
            if path.suffix == ".toml":
                what = f"{shown(name)} is a recipe, where a preset or a config.json is asked for"
                raise ConfigError(Mistake(what, ("a recipe is given without a flag",)))
            return from_hf_config(path)
    raise ConfigError(
        Mistake(
            f"unknown model {shown(name)}{did_you_mean(name, [*PRESETS, *HUB_NAMES])}",
            why=("it is neither a preset, nor a hub name of one, nor a path with a config.json",),
            works=tuple(PRESETS),
        )
    )
