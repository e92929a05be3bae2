import json
from pathlib import Path

import pytest

from fivefold.config.huggingface import from_hf_config
from fivefold.config.presets import PRESETS, resolve_model
from fivefold.description.shape import count_parameters
from fivefold.errors import ConfigError
from tests.config.published import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT2,
    GPT_OSS_20B,
    GPT_OSS_120B,
    GPTJ_6B,
    KIMI_K2,
    LLAMA2_7B,
    LLAMA31_8B,
    MISTRAL_V01,
    MISTRAL_V03,
    MIXTRAL_8X7B,
    OF_PRESETS,
    OLMO_7B,
    PHI_2,
    PUBLISHED,
    PYTHIA_70M,
    QWEN2_7B,
    QWEN3_8B,
    QWEN3_30B,
    SMOLLM3_3B,
)

YARN = DEEPSEEK_V3["rope_scaling"]


def without(fields: dict, name: str) -> dict:
    return {key: value for key, value in fields.items() if key != name}


@pytest.mark.parametrize("preset", OF_PRESETS)
def test_published_configs_give_the_presets(preset: str) -> None:
    assert from_hf_config(OF_PRESETS[preset]) == PRESETS[preset]


def test_rope_parameters_of_transformers_5_mean_the_same() -> None:
    old = without(without(LLAMA31_8B, "rope_scaling"), "rope_theta")
    rope = {**LLAMA31_8B["rope_scaling"], "rope_theta": 500000.0}
    assert from_hf_config({**old, "rope_parameters": rope}) == PRESETS["llama3-8b"]


def test_what_version_5_leaves_out_of_a_router_is_known_by_its_family() -> None:
    v5 = without(without(without(DEEPSEEK_V3, "scoring_func"), "topk_method"), "norm_topk_prob")
    assert from_hf_config(v5) == PRESETS["deepseek-v3"]


@pytest.mark.parametrize("fields", [QWEN3_30B, MIXTRAL_8X7B, GPT_OSS_20B])
def test_experts_have_two_names(fields: dict) -> None:
    names = {"num_experts", "num_local_experts"}
    others = {name: value for name, value in fields.items() if name not in names}
    (count,) = [fields[name] for name in names if name in fields]
    assert len({from_hf_config({**others, name: count}) for name in names}) == 1


def test_a_long_list_of_unknown_fields_is_cut() -> None:
    with pytest.raises(ConfigError, match="and 980 more unknown fields") as caught:
        from_hf_config(GPT2 | {f"field_{i}": i for i in range(1000)})
    assert len(caught.value.mistakes) == 21


def test_gpt_neox_counts_as_published() -> None:
    model = from_hf_config(PYTHIA_70M)
    assert count_parameters(model).total == 70_426_624
    assert model.rotary_percent == 0.25 and model.parallel_residual


@pytest.mark.parametrize("fields", PUBLISHED.values(), ids=PUBLISHED)
def test_nothing_of_published_models_is_left_out(fields: dict) -> None:
    assert from_hf_config(fields).unmodelled == ()


def test_some_layers_have_a_window() -> None:
    fields = {**QWEN3_8B, "use_sliding_window": True, "sliding_window": 4096}
    model = from_hf_config(fields | {"max_window_layers": 9})
    assert [model.window_of(layer) for layer in (0, 8, 9, 35)] == [None, None, 4095, 4095]
    assert model.window_attn_skip_freq == "[0]*9+[1]*27"
    assert from_hf_config(GPT_OSS_20B).window_attn_skip_freq == "2"


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
    assert model.moe_router_pre_softmax


def test_qwen3_may_say_what_it_has_not() -> None:
    said = {"shared_expert_intermediate_size": 0, "qkv_bias": False, "use_qk_norm": True}
    assert from_hf_config({**QWEN3_30B, **said}) == from_hf_config(QWEN3_30B)
    with pytest.raises(ConfigError, match=r"shared_expert_intermediate_size = 512(.|\n)*qkv_bias"):
        from_hf_config({**QWEN3_30B, "shared_expert_intermediate_size": 512, "qkv_bias": True})


def test_qwen2_has_qkv_biases_and_may_be_tied() -> None:
    model = from_hf_config({**QWEN3_8B, "model_type": "qwen2", "tie_word_embeddings": True})
    assert model.add_qkv_bias and not model.add_bias_linear and not model.qk_layernorm
    assert not model.untie_embeddings_and_output_weights


@pytest.mark.parametrize("fields", [MISTRAL_V01, MIXTRAL_8X7B])
@pytest.mark.parametrize("window", [4096, 32768, 10**6])
def test_a_window_counts_the_tokens_before_however_long_it_is(fields: dict, window: int) -> None:
    assert from_hf_config({**fields, "sliding_window": window}).window_size == window - 1


def test_an_absent_window_is_that_of_the_family() -> None:
    assert from_hf_config(without(MISTRAL_V01, "sliding_window")).window_size == 4095
    assert from_hf_config(without(MIXTRAL_8X7B, "sliding_window")).window_size is None
    used = {**without(QWEN2_7B, "sliding_window"), "use_sliding_window": True}
    assert from_hf_config(used | {"max_window_layers": 0}).window_size == 4095
    assert from_hf_config(used).window_size is None  # from layer 28 on, of 28


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({**QWEN3_8B, "layer_types": ["sliding_attention"]}, "layer_types"),
        (
            {**LLAMA31_8B, "rope_scaling": {"type": "ntk", "factor": 4.0}},
            'rope_type = "ntk"',
        ),
        ({**LLAMA31_8B, "rope_scaling": {"type": "yarn"}}, "yarn RoPE scaling needs factor"),
        ({**DEEPSEEK_V3, "scoring_func": "softmax"}, 'scoring_func = "softmax"'),
        ({**DEEPSEEK_V2, "norm_topk_prob": True}, "norm_topk_prob = true"),
        ({**GPT_OSS_20B, "swiglu_alpha": 1.0}, "swiglu_alpha = 1.0"),
        ({**PYTHIA_70M, "rotary_pct": 0.02}, "rotary_pct = 0.02"),
        ({**LLAMA31_8B, "rope_scaling": {"rope_type": "llama3"}}, "llama3 RoPE scaling needs"),
        ({**LLAMA31_8B, "hidden_act": "mish"}, 'hidden_act = "mish"'),
        ({**OLMO_7B, "clip_qkv": -8.0}, "clip_qkv = -8.0"),
        ({**OLMO_7B, "rms_norm_eps": 1e-6}, "rms_norm_eps = 1e-06"),
        ({**PHI_2, "qk_layernorm": True}, "qk_layernorm = true"),
        ({**GPTJ_6B, "rotary_dim": 300}, "rotary_dim = 300"),
        ({**QWEN3_8B, "attention_bias": True}, "attention_bias = true"),
        ({**LLAMA31_8B, "model_type": "internlm3", "attention_bias": True}, "mlp_bias = false"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**DEEPSEEK_V3, "attention_bias": True}, "attention_bias = true"),
        ({**MIXTRAL_8X7B, "rope_scaling": {**YARN, "mscale": 0.7}}, "rope_scaling.mscale_all_dim"),
        (
            {**MIXTRAL_8X7B, "num_experts_per_tok": 9},
            "num_experts_per_tok 9 exceeds num_local",
        ),
        ({**GPT_OSS_120B, "attention_bias": False}, "attention_bias = false"),
        ({**SMOLLM3_3B, "no_rope_layers": []}, "one entry a layer: 0 entries, 36 layers"),
        ({**QWEN3_8B, "model_type": "qwen3moe"}, "did you mean 'qwen3_moe'"),
        ({**GPT2, "model_type": "mamba"}, "unsupported model_type 'mamba': layers have Mamba"),
        ({"model_type": "mamba2"}, "unsupported model_type 'mamba2'\n  works: llama"),
        (without(LLAMA31_8B, "hidden_size"), "a whole number for 'hidden_size'"),
        ({**MISTRAL_V03, "hiden_act": "gelu"}, '"hiden_act" of this mistral model, did you mean'),
        ({**GPT2, "hidden_size": 1024}, "n_embd = 768 and hidden_size = 1024 of this gpt2 model"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention = true"),
        ({**LLAMA31_8B, "is_causal": False}, "is_causal = false"),
        (
            {**LLAMA31_8B, "rope_parameters": {"rope_theta": 500000.0}},
            'rope_parameters = {"rope_theta": 500000.0} and rope_scaling = {',
        ),
        ({**MISTRAL_V01, "layer_types": ["full_attention"] * 32}, 'layer_types = ["full_att'),
        ({**MISTRAL_V01, "attention_bias": True, "mlp_bias": True}, "mlp_bias = true"),
        ({**PYTHIA_70M, "rope_theta": 1000000}, "rope_theta = 1000000"),
        ({**PYTHIA_70M, "rope_scaling": {"rope_theta": 5}}, "rope_theta = 5.0 and rotary_emb_ba"),
        ({**QWEN2_7B, "quantization_config": {"bits": 4}}, 'quantization_config = {"bits": 4}'),
        ({**LLAMA2_7B, "auto_map": {"AutoModel": "m.M"}}, 'auto_map = {"AutoModel": "m.M"}'),
        ({**GPT2, "pruned_heads": {"0": [1]}}, 'pruned_heads = {"0": [1]}'),
        ({**KIMI_K2, "num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ({**QWEN3_30B, "num_local_experts": 64}, "num_experts = 128 and num_local_experts = 64"),
        ({**LLAMA2_7B, "rms_norm_eps": "1e-5"}, "needs a number for 'rms_norm_eps', not \"1e-5\""),
        ({**LLAMA2_7B, "hidden_size": True}, "a whole number for 'hidden_size', not true"),
        ({**LLAMA2_7B, "hidden_size": 10**30}, "a number of at most 2147483647 for 'hidden_size'"),
        ({**LLAMA2_7B, "hidden_size": 10**5000}, "'hidden_size', not a int with a number of"),
        ({**LLAMA2_7B, "num_hidden_layers": 10**9}, "at most 100000 for 'num_hidden_layers'"),
        ({**LLAMA2_7B, "rope_theta": float("nan")}, "a finite number for 'rope_theta', not NaN"),
        ({**LLAMA2_7B, "vocab_size": -1}, "a number of at least 1 for 'vocab_size', not -1"),
        ({"hidden_size": 8}, "needs a text for 'model_type'"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_hf_config(fields)
    assert part in str(caught.value)


def test_several_unsupported_features_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        from_hf_config({**LLAMA31_8B, "hidden_act": "mish", "partial_rotary_factor": 0.5})
    assert len(caught.value.mistakes) == 2


def test_files_and_folders_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GPT2))
    assert resolve_model(tmp_path) == resolve_model(file) == PRESETS["gpt2"]
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is not JSON"):
        resolve_model(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        from_hf_config(tmp_path / "nowhere")
