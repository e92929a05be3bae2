"""Architectures by name: presets, their hub names, or the path of a Hugging Face model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fivefold.config.huggingface import from_hf_config
from fivefold.config.model import ModelConfig
from fivefold.errors import ConfigError, Mistake, did_you_mean

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
_DEMO_LLAMA = ModelConfig(
    num_layers=4,
    hidden_size=192,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=512,
    vocab_size=2048,
    max_position_embeddings=2048,
)

PRESETS: Mapping[str, ModelConfig] = {
    "gpt2": _GPT2,
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
    "qwen3-8b": ModelConfig(
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
    ),
    "demo-llama": _DEMO_LLAMA,
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
}

# The Llama 3 presets are the 3.1 models, whose context is stretched to 131,072 tokens.
HUB_NAMES: Mapping[str, str] = {
    "gpt2": "gpt2",
    "openai-community/gpt2": "gpt2",
    "meta-llama/Llama-3.1-8B": "llama3-8b",
    "meta-llama/Llama-3.1-70B": "llama3-70b",
    "meta-llama/Llama-3.1-405B": "llama3-405b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-8B-Base": "qwen3-8b",
}


def resolve_model(name_or_path: str | Path) -> ModelConfig:
    """The architecture that a preset, a hub name, or the path of a Hugging Face model names.

    Raises:
        ConfigError: nothing has that name, or the model at that path is not supported.
    """
    name = str(name_or_path)
    preset = PRESETS.get(HUB_NAMES.get(name, name))
    if preset is not None:
        return preset
    if Path(name).exists():
        return from_hf_config(Path(name))
    raise ConfigError(
        Mistake(
            f"unknown model {name!r}{did_you_mean(name, [*PRESETS, *HUB_NAMES])}",
            why=("it is neither a preset, nor a hub name of one, nor a path with a config.json",),
            works=tuple(PRESETS),
        )
    )
