"""How files of others name our tensors: substitutions in our names, by the kind of the files."""

from collections.abc import Mapping
from types import MappingProxyType

BASES: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": "transformer.",
        "falcon": "transformer.",
        "gpt_neox": "gpt_neox.",
        "megatron": "",
        "nemotron_h": "backbone.",
    }
)
_APART = {
    "in_proj_qkvz.": ("in_proj_qkv.", "in_proj_z."),
    "in_proj_ba.": ("in_proj_b.", "in_proj_a."),
}
JOINED: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"qwen3_5_text": _APART, "qwen3_5_moe_text": _APART}
)
"""Of kinds that have several linear layers where one is here: that one, and theirs in order."""
HEADS = ("lm_head.", "embed_out.")
_EACH = {".experts.": ".experts.{e}."}
_DEEPSEEK = {
    ".kv_a_proj.": ".kv_a_proj_with_mqa.",
    ".mlp.router.expert_bias": ".mlp.gate.e_score_correction_bias",
    ".mlp.router.": ".mlp.gate.",
    **_EACH,
}
_TOGETHER = {
    ".mlp.experts.gate_proj.weight": ".mlp.experts.gate_up_proj",
    ".mlp.experts.up_proj.weight": ".mlp.experts.gate_up_proj",
    ".mlp.experts.down_proj.weight": ".mlp.experts.down_proj",
}
_QWEN_MOE = {
    ".mlp.router.": ".mlp.gate.",
    ".mlp.shared_experts.": ".mlp.shared_expert.",
    **_EACH,
}
_MIXTRAL = {
    ".mlp.router.": ".block_sparse_moe.gate.",
    ".mlp.experts.gate_proj.": ".block_sparse_moe.experts.{e}.w1.",
    ".mlp.experts.down_proj.": ".block_sparse_moe.experts.{e}.w2.",
    ".mlp.experts.up_proj.": ".block_sparse_moe.experts.{e}.w3.",
}
_HUNYUAN = {
    ".self_attn.q_norm.": ".self_attn.query_layernorm.",
    ".self_attn.k_norm.": ".self_attn.key_layernorm.",
}
_GRANITE_MOE = {
    ".mlp.router.": ".block_sparse_moe.router.layer.",
    ".mlp.experts.gate_proj.": ".block_sparse_moe.input_linear.",
    ".mlp.experts.up_proj.": ".block_sparse_moe.input_linear.",
    ".mlp.experts.down_proj.": ".block_sparse_moe.output_linear.",
}
_GATE_UP = {".mlp.gate_proj.": ".mlp.gate_up_proj.", ".mlp.up_proj.": ".mlp.gate_up_proj."}
_AFTER = {
    ".post_self_attn_layernorm.": ".post_attention_layernorm.",
    ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
}
_AROUND = {".post_attention_layernorm.": ".pre_feedforward_layernorm.", **_AFTER}
_MEGATRON_MLPS = {
    ".mlp": ".mlp",
    ".mlp.shared_experts": ".mlp.shared_experts",
    ".mlp.experts": ".mlp.experts.experts",
}
NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt2": {
            "embed_tokens.": "wte.",
            "embed_positions.": "wpe.",
            ".input_layernorm.": ".ln_1.",
            ".post_attention_layernorm.": ".ln_2.",
            "layers.": "h.",
            ".self_attn.q_proj.": ".attn.c_attn.",
            ".self_attn.k_proj.": ".attn.c_attn.",
            ".self_attn.v_proj.": ".attn.c_attn.",
            ".self_attn.o_proj.": ".attn.c_proj.",
            ".mlp.up_proj.": ".mlp.c_fc.",
            ".mlp.down_proj.": ".mlp.c_proj.",
        },
        "gpt_neox": {
            "embed_tokens.": "embed_in.",
            "lm_head.": "embed_out.",
            ".self_attn.q_proj.": ".attention.query_key_value.",
            ".self_attn.k_proj.": ".attention.query_key_value.",
            ".self_attn.v_proj.": ".attention.query_key_value.",
            ".self_attn.o_proj.": ".attention.dense.",
            ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
            ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
        },
        "falcon": {
            "embed_tokens.": "word_embeddings.",
            "layers.": "h.",
            ".self_attn.q_proj.": ".self_attention.query_key_value.",
            ".self_attn.k_proj.": ".self_attention.query_key_value.",
            ".self_attn.v_proj.": ".self_attention.query_key_value.",
            ".self_attn.o_proj.": ".self_attention.dense.",
            ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
            ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
        },
        "megatron": {
            "embed_tokens.": "embedding.word_embeddings.",
            "embed_positions.": "embedding.position_embeddings.",
            "lm_head.": "output_layer.",
            ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
            ".post_attention_layernorm.": ".mlp.linear_fc1.layer_norm_",
            "layers.": "decoder.layers.",
            ".self_attn.q_proj.": ".self_attention.linear_qkv.",
            ".self_attn.k_proj.": ".self_attention.linear_qkv.",
            ".self_attn.v_proj.": ".self_attention.linear_qkv.",
            ".self_attn.o_proj.": ".self_attention.linear_proj.",
            ".self_attn.q_norm.": ".self_attention.q_layernorm.",
            ".self_attn.k_norm.": ".self_attention.k_layernorm.",
            ".self_attn.sinks.weight": ".self_attention.core_attention.softmax_offset",
            ".mlp.shared_expert_gate.weight": ".mlp.shared_experts.gate_weight",
            **{f"{of}.gate_proj.": f"{to}.linear_fc1." for of, to in _MEGATRON_MLPS.items()},
            **{f"{of}.up_proj.": f"{to}.linear_fc1." for of, to in _MEGATRON_MLPS.items()},
            **{f"{of}.down_proj.": f"{to}.linear_fc2." for of, to in _MEGATRON_MLPS.items()},
        },
        "mixtral": _MIXTRAL,
        "minimax_m2": {
            ".mlp.router.expert_bias": ".block_sparse_moe.e_score_correction_bias",
            **_MIXTRAL,
        },
        "granitemoe": _GRANITE_MOE,
        "granitemoehybrid": {
            ".mlp.gate_proj.": ".shared_mlp.input_linear.",
            ".mlp.up_proj.": ".shared_mlp.input_linear.",
            ".mlp.down_proj.": ".shared_mlp.output_linear.",
        },
        "granitemoeshared": {
            ".mlp.shared_experts.gate_proj.": ".shared_mlp.input_linear.",
            ".mlp.shared_experts.up_proj.": ".shared_mlp.input_linear.",
            ".mlp.shared_experts.down_proj.": ".shared_mlp.output_linear.",
            **_GRANITE_MOE,
        },
        "qwen2_moe": _QWEN_MOE,
        "qwen3_moe": _QWEN_MOE,
        "qwen3_next": _QWEN_MOE,
        "qwen3_5_moe_text": _QWEN_MOE,
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
        "glm4_moe_lite": _DEEPSEEK,
        "kimi_k2": _DEEPSEEK,
        "glm4_moe": _DEEPSEEK,
        "solar_open": _DEEPSEEK,
        "hunyuan_v1_dense": _HUNYUAN,
        "hunyuan_v1_moe": {
            ".mlp.router.": ".mlp.gate.wg.",
            ".mlp.shared_experts.": ".mlp.shared_mlp.",
            **_EACH,
            **_HUNYUAN,
        },
        "exaone_moe": {
            ".mlp.router.expert_bias": ".mlp.e_score_correction_bias",
            ".mlp.router.": ".mlp.gate.",
            **_EACH,
        },
        "dots1": _DEEPSEEK,
        "ernie4_5_moe": {
            ".mlp.router.expert_bias": ".mlp.moe_statics.e_score_correction_bias",
            ".mlp.router.": ".mlp.gate.",
            **_EACH,
        },
        "phi3": {
            ".self_attn.q_proj.": ".self_attn.qkv_proj.",
            ".self_attn.k_proj.": ".self_attn.qkv_proj.",
            ".self_attn.v_proj.": ".self_attn.qkv_proj.",
            **_GATE_UP,
        },
        "glm": _GATE_UP,
        "glm4": _GATE_UP,
        "exaone4": _AFTER,
        "olmo2": _AFTER,
        "olmo3": _AFTER,
        "gemma2": _AROUND,
        "gemma3_text": _AROUND,
        "olmoe": _QWEN_MOE,
        "starcoder2": {
            ".mlp.up_proj.": ".mlp.c_fc.",
            ".mlp.down_proj.": ".mlp.c_proj.",
        },
        "gpt_oss": {
            ".self_attn.sinks.weight": ".self_attn.sinks",
            ".mlp.experts.gate_proj.bias": ".mlp.experts.gate_up_proj_bias",
            ".mlp.experts.up_proj.bias": ".mlp.experts.gate_up_proj_bias",
            ".mlp.experts.down_proj.bias": ".mlp.experts.down_proj_bias",
            **_TOGETHER,
        },
        "llama4_text": {
            ".mlp.shared_experts.": ".feed_forward.shared_expert.",
            ".mlp.experts.gate_proj.weight": ".feed_forward.experts.gate_up_proj",
            ".mlp.experts.up_proj.weight": ".feed_forward.experts.gate_up_proj",
            ".mlp.experts.down_proj.weight": ".feed_forward.experts.down_proj",
            ".mlp.": ".feed_forward.",
        },
        "nemotron_h": {
            "embed_tokens.": "embeddings.",
            ".input_layernorm.": ".norm.",
            ".post_attention_layernorm.": ".norm.",
            ".self_attn.in_proj_xbcz.": ".mixer.in_proj.",
            ".self_attn.in_proj_dt.": ".mixer.in_proj.",
            ".self_attn.": ".mixer.",
            ".mlp.router.expert_bias": ".mixer.gate.e_score_correction_bias",
            ".mlp.router.": ".mixer.gate.",
            ".mlp.": ".mixer.",
            **_EACH,
        },
        "qwen3_vl_moe_text": {".mlp.router.": ".mlp.gate.", **_TOGETHER},
    }
)
FALCON_NORMS = {
    ".input_layernorm.": ".ln_attn.",
    ".post_attention_layernorm.": ".ln_mlp.",
}
LAST: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": "ln_f.",
        "falcon": "ln_f.",
        "gpt_neox": "final_layer_norm.",
        "megatron": "decoder.final_layernorm.",
        "nemotron_h": "norm_f.",
    }
)
