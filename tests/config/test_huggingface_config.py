import json
from pathlib import Path

import pytest

from fivefold.config.huggingface import from_hf_config
from fivefold.config.presets import PRESETS, resolve_model
from fivefold.errors import ConfigError

LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_8B = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT2 = {
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}
MISTRAL = {k: v for k, v in LLAMA31_8B.items() if k != "rope_scaling"} | {
    "model_type": "mistral",
    "sliding_window": None,
}


def without(fields: dict, name: str) -> dict:
    return {key: value for key, value in fields.items() if key != name}


@pytest.mark.parametrize(
    ("fields", "preset"), [(LLAMA31_8B, "llama3-8b"), (QWEN3_8B, "qwen3-8b"), (GPT2, "gpt2")]
)
def test_published_configs_give_the_presets(fields: dict, preset: str) -> None:
    assert from_hf_config(fields) == PRESETS[preset]


def test_rope_parameters_of_transformers_5_mean_the_same() -> None:
    old = without(without(LLAMA31_8B, "rope_scaling"), "rope_theta")
    rope = {**LLAMA31_8B["rope_scaling"], "rope_theta": 500000.0}
    assert from_hf_config({**old, "rope_parameters": rope}) == PRESETS["llama3-8b"]


def test_qwen2_has_qkv_biases_and_may_be_tied() -> None:
    model = from_hf_config({**QWEN3_8B, "model_type": "qwen2", "tie_word_embeddings": True})
    assert model.add_qkv_bias and not model.add_bias_linear and not model.qk_layernorm
    assert not model.untie_embeddings_and_output_weights


def test_absent_fields_take_the_defaults_of_their_family() -> None:
    assert from_hf_config(without(QWEN3_8B, "head_dim")).head_dim == 128
    assert from_hf_config(without(LLAMA31_8B, "num_key_value_heads")).num_kv_heads == 32
    assert from_hf_config(without(MISTRAL, "num_key_value_heads")).num_kv_heads == 8


def test_a_window_longer_than_the_model_is_no_window() -> None:
    assert from_hf_config({**MISTRAL, "sliding_window": 131072}).num_layers == 32


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({**MISTRAL, "sliding_window": 4096}, "sliding_window = 4096"),
        ({**QWEN3_8B, "layer_types": ["sliding_attention"]}, "layer_types"),
        ({**LLAMA31_8B, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ({**LLAMA31_8B, "rope_scaling": {"rope_type": "llama3"}}, "llama3 RoPE scaling needs"),
        ({**LLAMA31_8B, "hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({**LLAMA31_8B, "mlp_bias": True}, "mlp_bias = True"),
        ({**QWEN3_8B, "attention_bias": True}, "attention_bias = True"),
        ({**GPT2, "embd_pdrop": 0.0}, "embd_pdrop = 0.0"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**GPT2, "model_type": "mixtral"}, "unsupported model_type 'mixtral'"),
        (without(LLAMA31_8B, "hidden_size"), "'hidden_size'"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_hf_config(fields)
    assert part in str(caught.value)


def test_several_unsupported_features_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        from_hf_config({**LLAMA31_8B, "hidden_act": "relu", "partial_rotary_factor": 0.5})
    assert len(caught.value.mistakes) == 2


def test_files_and_folders_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GPT2))
    assert resolve_model(tmp_path) == resolve_model(file) == PRESETS["gpt2"]
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        resolve_model(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        from_hf_config(tmp_path / "nowhere")
