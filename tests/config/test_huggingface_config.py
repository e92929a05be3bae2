import json
from pathlib import Path

import pytest

from fivefold.config.huggingface import from_hf_config
from fivefold.config.presets import PRESETS, resolve_model
from fivefold.errors import ConfigError
from fivefold.model.shape import count_parameters

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
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN3_30B = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "type": "yarn"}
DEEPSEEK_V3 = {
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
DEEPSEEK_V2_LITE = {
    **{name: DEEPSEEK_V3[name] for name in DEEPSEEK_V3 if name != "num_nextn_predict_layers"},
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
GPT_OSS = {
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "rope_type": "yarn"},
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
PYTHIA_70M = {
    "attention_bias": True,
    "hidden_act": "gelu",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
MISTRAL = {k: v for k, v in LLAMA31_8B.items() if k != "rope_scaling"} | {
    "model_type": "mistral",
    "sliding_window": None,
}


def without(fields: dict, name: str) -> dict:
    return {key: value for key, value in fields.items() if key != name}


@pytest.mark.parametrize(
    ("fields", "preset"),
    [
        (LLAMA31_8B, "llama3-8b"),
        (QWEN3_8B, "qwen3-8b"),
        (GPT2, "gpt2"),
        (MIXTRAL, "mixtral-8x7b"),
        (QWEN3_30B, "qwen3-30b-a3b"),
        (DEEPSEEK_V2_LITE, "deepseek-v2-lite"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (KIMI_K2, "kimi-k2"),
        (GPT_OSS, "gpt-oss-120b"),
    ],
)
def test_published_configs_give_the_presets(fields: dict, preset: str) -> None:
    assert from_hf_config(fields) == PRESETS[preset]


def test_rope_parameters_of_transformers_5_mean_the_same() -> None:
    old = without(without(LLAMA31_8B, "rope_scaling"), "rope_theta")
    rope = {**LLAMA31_8B["rope_scaling"], "rope_theta": 500000.0}
    assert from_hf_config({**old, "rope_parameters": rope}) == PRESETS["llama3-8b"]


def test_what_version_5_leaves_out_of_a_router_is_known_by_its_family() -> None:
    v5 = without(without(without(DEEPSEEK_V3, "scoring_func"), "topk_method"), "norm_topk_prob")
    assert from_hf_config(v5) == PRESETS["deepseek-v3"]


def test_gpt_neox_counts_as_published_and_says_what_it_leaves_out() -> None:
    model = from_hf_config(PYTHIA_70M)
    assert count_parameters(model).total == 70_426_624
    assert model.unmodelled == (
        "rotary positions in 25% of a head's features",
        "attention and MLP side by side",
    )


def test_layers_without_experts_are_those_that_qwen_names() -> None:
    fields = {
        **QWEN3_30B,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    }
    model = from_hf_config({**fields, "num_hidden_layers": 6})
    assert [model.is_moe(i) for i in range(6)] == [False, False, False, True, False, True]
    assert model.moe_layer_freq == "[0]*3+[1]*1+[0]*1+[1]*1"
    assert model.unmodelled == ("router weights that are not normalised",)


def test_qwen2_has_qkv_biases_and_may_be_tied() -> None:
    model = from_hf_config({**QWEN3_8B, "model_type": "qwen2", "tie_word_embeddings": True})
    assert model.add_qkv_bias and not model.add_bias_linear and not model.qk_layernorm
    assert not model.untie_embeddings_and_output_weights


def test_absent_fields_take_the_defaults_of_their_family() -> None:
    assert from_hf_config(without(QWEN3_8B, "head_dim")).head_dim == 128
    assert from_hf_config(without(LLAMA31_8B, "num_key_value_heads")).num_kv_heads == 32
    assert from_hf_config(without(MISTRAL, "num_key_value_heads")).num_kv_heads == 8


def test_a_window_longer_than_the_model_is_no_window() -> None:
    assert from_hf_config({**MISTRAL, "sliding_window": 131072}).window_size is None


@pytest.mark.parametrize("fields", [MISTRAL, MIXTRAL])
def test_a_window_counts_the_tokens_before(fields: dict) -> None:
    assert from_hf_config({**fields, "sliding_window": 4096}).window_size == 4095


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (
            {**QWEN3_8B, "use_sliding_window": True, "sliding_window": 4096},
            "sliding_window = 4096",
        ),
        ({**QWEN3_8B, "layer_types": ["sliding_attention"]}, "layer_types"),
        ({**LLAMA31_8B, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ({**LLAMA31_8B, "rope_scaling": {"rope_type": "llama3"}}, "llama3 RoPE scaling needs"),
        ({**LLAMA31_8B, "hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({**LLAMA31_8B, "mlp_bias": True}, "mlp_bias = True"),
        ({**QWEN3_8B, "attention_bias": True}, "attention_bias = True"),
        ({**GPT2, "embd_pdrop": 0.0}, "embd_pdrop = 0.0"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**DEEPSEEK_V3, "attention_bias": True}, "attention_bias = True"),
        ({**MIXTRAL, "rope_scaling": YARN}, "rope_type = 'yarn'"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "moe_router_topk 9 exceeds num_experts 8"),
        ({**GPT_OSS, "attention_bias": False}, "attention_bias = False"),
        ({**PYTHIA_70M, "attention_bias": False}, "attention_bias = False"),
        ({**QWEN3_8B, "model_type": "qwen3moe"}, "did you mean 'qwen3_moe'"),
        ({**GPT2, "model_type": "mamba"}, "unsupported model_type 'mamba'"),
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
