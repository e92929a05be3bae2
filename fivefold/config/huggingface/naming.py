"""Reports mistakes of an architecture in the words of the config.json that describes it."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from fivefold.config.foreign import name_of
from fivefold.errors import ConfigError, Mistake


def _in_rope(field: str) -> tuple[str, ...]:
    return f"rope_scaling.{field}", f"rope_parameters.{field}"


_THEIRS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_layers": ("num_hidden_layers", "n_layer"),
        "hidden_size": ("hidden_size", "n_embd"),
        "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
        "num_query_groups": (
            *("num_global_key_value_heads", "num_key_value_heads", "num_kv_heads"),
        ),
        "num_query_groups_local": ("num_key_value_heads",),
        "kv_channels": ("global_head_dim", "head_dim"),
        "kv_channels_local": ("head_dim",),
        "v_channels": ("v_head_dim",),
        "value_multiplier": ("attention_value_scale",),
        "ffn_hidden_size": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
        "max_position_embeddings": (
            *("max_position_embeddings", "n_positions", "model_max_length"),
        ),
        "norm_epsilon": (
            *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
        ),
        "embedding_multiplier": ("scale_emb",),
        "residual_multiplier": ("scale_depth",),
        "softmax_scale": ("attention_multiplier",),
        "init_method_std": ("initializer_range", "init_std"),
        "embedding_init_method_std": ("embedding_initializer_range",),
        "hidden_dropout": (
            *("hidden_dropout", "resid_pdrop", "residual_dropout", "resid_dropout", "dropout"),
        ),
        "embedding_dropout": ("embd_pdrop", "embedding_dropout", "embed_dropout"),
        "attention_dropout": ("attention_dropout", "attn_pdrop"),
        "activation_func_clamp_value": ("swiglu_limit",),
        "no_rope_freq": ("no_rope_layers", "no_rope_layer_interval"),
        "rotary_base": ("rope_theta", *_in_rope("rope_theta"), "rotary_emb_base"),
        "rotary_percent": ("rotary_pct", "partial_rotary_factor"),
        "rotary_scaling_factor": _in_rope("factor"),
        "rotary_seq_len_interpolation_factor": _in_rope("factor"),
        "rope_scaling_factor": _in_rope("factor"),
        "rope_low_freq_factor": _in_rope("low_freq_factor"),
        "rope_high_freq_factor": _in_rope("high_freq_factor"),
        "rope_original_max_position_embeddings": _in_rope("original_max_position_embeddings"),
        "original_max_position_embeddings": (
            "original_max_position_embeddings",
            *_in_rope("original_max_position_embeddings"),
        ),
        "beta_fast": _in_rope("beta_fast"),
        "beta_slow": _in_rope("beta_slow"),
        "mscale": _in_rope("mscale"),
        "mscale_all_dim": _in_rope("mscale_all_dim"),
        "longrope_short_factor": _in_rope("short_factor"),
        "longrope_long_factor": _in_rope("long_factor"),
        "longrope_attention_factor": _in_rope("attention_factor"),
        "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
        "qk_head_dim": ("qk_nope_head_dim",),
        "dsa_indexer_n_heads": ("index_n_heads",),
        "dsa_indexer_head_dim": ("index_head_dim",),
        "dsa_indexer_topk": ("index_topk",),
        "num_experts": (
            *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        ),
        "moe_router_topk": (
            *("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
        ),
        "moe_router_topk_scaling_factor": (
            *("routed_scaling_factor", "router_scaling_factor", "route_scale"),
        ),
        "moe_router_num_groups": ("n_group", "num_expert_group"),
        "moe_router_group_topk": ("topk_group",),
        "moe_ffn_hidden_size": ("moe_intermediate_size",),
        "attention_chunk_size": ("attention_chunk_size",),
        "hybrid_override_pattern": ("layers_block_type", "layer_types", "hybrid_override_pattern"),
        "mamba_state_dim": ("ssm_state_size",),
        "mamba_num_groups": ("n_groups", "mamba_n_groups"),
        "attn_scale": ("attn_scale", *_in_rope("llama_4_scaling_beta")),
        "floor_scale": ("floor_scale", *_in_rope("original_max_position_embeddings")),
    }
)
"""Names of a ModelConfig's fields, with those that families give them; a family has one."""
_OURS = re.compile(rf"\b({'|'.join(_THEIRS)})\b")


def in_words_of(error: ConfigError, fields: Collection[str], known: Collection[str]) -> ConfigError:
    """The same mistakes, with the names of fields, and with choices that the file can take.

    Args:
        error: what is wrong with the model, in this project's names and flags.
        fields: names of the file's fields.
        known: names that the family has.
    """

    def theirs(ours: str) -> str:
        names = _THEIRS.get(ours, ())
        for places in (fields, known):
            for name in names:
                if name.partition(".")[0] in places:
                    return name
        return ours

    def text(line: str) -> str:
        return _OURS.sub(lambda word: theirs(word[0]), line)

    def in_their_names(mistake: Mistake) -> Mistake:
        works = [
            f"{theirs(name_of(flag))} = {flag.split()[1]}"
            for flag in mistake.works
            if name_of(flag) in _THEIRS and len(flag.split()) == 2 and "none" not in flag.split()
        ]
        return replace(
            mistake,
            what=text(mistake.what),
            why=tuple(map(text, mistake.why)),
            works=tuple(works),
        )

    return ConfigError(*map(in_their_names, error.mistakes))
