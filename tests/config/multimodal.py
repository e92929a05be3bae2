"""Small multimodal models of transformers, which get text alone."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fivefold.config.huggingface.multimodal import text_name
from tests.config.families import TINY as OF_TEXTS
from tests.config.oracle import built, config_of

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "vocab_size": 100,
}
_VISION = {
    "hidden_size": 16,
    "image_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 8,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}
_HOTTER = {"original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.3}
_LINEAR = {
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_key_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 10,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
        "rope_theta": 100.0,
        "rope_type": "default",
    },
}
_LATENTS = {n: v for n, v in OF_TEXTS["deepseek_v3"].items() if n not in _TEXT} | {
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
}
_SECTIONS = {"mrope_section": [1, 2, 1]}
TINY: Mapping[str, dict[str, Any]] = {
    "gemma3": {
        "mm_tokens_per_image": 4,
        "text_config": _TEXT
        | {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 8,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 5,
            "sliding_window_pattern": 2,
        },
        "vision_config": _VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
    },
    "gemma4": {
        "text_config": _TEXT
        | {"head_dim": 8, "global_head_dim": 12, "num_hidden_layers": 3, "sliding_window": 5}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "pad_token_id": 0}
        | {"num_global_key_value_heads": 1},
        "vision_config": _VISION | {"head_dim": 8, "num_key_value_heads": 2},
    },
    "gemma4_unified": {
        "text_config": _TEXT
        | {"head_dim": 8, "global_head_dim": 12, "num_hidden_layers": 3, "sliding_window": 5}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        | {"pad_token_id": 0},
        "vision_config": {"patch_size": 4, "mm_embed_dim": 32, "output_proj_dims": 32},
    },
    "idefics3": {"text_config": _TEXT, "vision_config": _VISION},
    "smolvlm": {"text_config": _TEXT | {"rms_norm_eps": 0.1}, "vision_config": _VISION},
    "llama4": {
        "text_config": _TEXT
        | {"head_dim": 12, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2}
        | {"num_local_experts": 4, "attention_chunk_size": 7, "no_rope_layer_interval": 2}
        | {"floor_scale": 5},
        "vision_config": _VISION
        | {"num_channels": 3, "vision_output_dim": 16, "projector_input_dim": 16}
        | {"projector_output_dim": 16},
    },
    "mistral3": {
        "text_config": _TEXT
        | {"model_type": "ministral3", "head_dim": 12}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0} | _HOTTER},
        "tie_word_embeddings": False,
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8},
    },
    "exaone4_5": {
        "text_config": _TEXT
        | {"model_type": "exaone4_5_text", "num_hidden_layers": 4, "sliding_window": 5}
        | {"sliding_window_pattern": 2},
        "vision_config": _QWEN_VISION | {"fullatt_block_indexes": [0], "num_key_value_heads": 2},
    },
    "kimi_k25": {
        "text_config": _TEXT | {"model_type": "kimi_k2"} | _LATENTS,
        "tie_word_embeddings": False,
        "vision_config": _VISION | {"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
    },
    "llava": {"text_config": _TEXT, "vision_config": _VISION},
    "llava_next": {
        "text_config": _TEXT | {"model_type": "mistral", "sliding_window": 5},
        "vision_config": _VISION,
    },
    "llava_onevision": {"text_config": _TEXT, "vision_config": _VISION},
    "internvl": {
        "text_config": _TEXT | {"model_type": "qwen3", "head_dim": 12},
        "tie_word_embeddings": False,
        "vision_config": _VISION,
    },
    "qwen2_vl": {
        "text_config": _TEXT
        | {"rope_scaling": {"type": "mrope", **_SECTIONS}, "use_sliding_window": True}
        | {"sliding_window": 5, "max_window_layers": 1},
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    },
    "qwen2_5_vl": {
        "text_config": _TEXT | {"rope_scaling": {"type": "mrope", **_SECTIONS}},
        "vision_config": _QWEN_VISION | {"fullatt_block_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "text_config": _TEXT
        | {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "num_hidden_layers": 3, "mlp_only_layers": [1]},
        "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {"text_config": _TEXT | _LINEAR, "vision_config": _QWEN_VISION},
    "qwen3_5_moe": {
        "text_config": {n: v for n, v in _TEXT.items() if n != "intermediate_size"}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 20, **_LINEAR},
        "vision_config": _QWEN_VISION,
    },
    "qwen3_vl": {
        "text_config": _TEXT
        | {"head_dim": 12, "rope_scaling": {"rope_type": "default", "mrope_interleaved": True}}
        | {"rope_theta": 50.0},
        "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]},
    },
}
"""The smallest of each family, with what its text model can have."""


def multimodal(fields: Mapping[str, Any], *, meta: bool = False) -> nn.Module:
    """transformers' model of a config.json, with random fp64 weights."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as CLASSES

    config = config_of(fields)
    config.text_config._experts_implementation = "eager"
    model = built(CLASSES[type(config)], config, meta=meta)
    if fields["model_type"] == "llama4":  # which looks for outputs of images, given text alone
        model.forward = model.language_model.forward
    return model


def text_parameters(whole: nn.Module) -> int:
    """Parameters of the text model alone."""
    held = whole.named_parameters()
    return sum(p.numel() for n, p in held if text_name(n) != n or n.startswith("lm_head."))
