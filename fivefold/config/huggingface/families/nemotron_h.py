"""Nemotron-H and Nemotron 3 Nano: layers of one mixer each, Mamba-2 among them."""

from typing import Any

from fivefold.config.huggingface.family import EACH, Family, Fields, Tensors
from fivefold.config.huggingface.fields import activation_name, size_fields
from fivefold.config.huggingface.generic import refuse_one_expert
from fivefold.config.huggingface.llama_like import activation
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import MAX_LAYERS
from fivefold.config.model import MAMBA_TAPS, ModelConfig

_TYPES = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""Mixers by their names in lists, which transformers has had others for before."""


def _read(reader: Reader) -> ModelConfig:
    """Squared ReLUs without gates, attention without positions, and no biases."""
    _read_unused(reader)
    pattern, further = _pattern(reader), _further(reader)
    heads, size = (
        reader.size("num_attention_heads", default=32),
        reader.size("head_dim", default=128),
    )
    reader.fixed("attention_head_dim", size)
    return ModelConfig(
        num_layers=len(pattern),
        hidden_size=reader.size("hidden_size", default=4096),
        num_attention_heads=heads,
        num_query_groups=reader.optional_size("num_key_value_heads", default=8),
        kv_channels=size,
        ffn_hidden_size=reader.size("intermediate_size", default=21504),
        vocab_size=reader.size("vocab_size", default=131072),
        max_position_embeddings=reader.size("max_position_embeddings", default=4096),
        norm_epsilon=reader.number("layer_norm_epsilon", 1e-5),
        position_embedding_type="none",
        activation_func=activation(reader, "mlp_hidden_act", "relu2"),
        gated_linear_unit=False,
        attention_dropout=reader.number("attention_dropout", 0.0),
        init_method_std=reader.number("initializer_range", 0.02),
        hybrid_override_pattern=pattern,
        mamba_state_dim=reader.size("ssm_state_size", default=128),
        mamba_head_dim=reader.size("mamba_head_dim", default=64),
        mamba_num_groups=reader.size("n_groups", "mamba_n_groups", default=8),
        mamba_num_heads=reader.size("mamba_num_heads", default=128),
        **further,
        **_experts(reader, "E" in pattern + further.get("mtp_hybrid_override_pattern", "")),
    )


def _further(reader: Reader) -> dict[str, Any]:
    """Number of MTP modules, and the mixers of each: a list of names that is not the usual
    one goes before letters."""
    usual, names = "*E", "mtp_layers_block_type"
    words = reader.texts(names, tuple(_TYPES)) or ()
    if words and reader.fields[names] == []:
        reader.unsupported(names, [], [["attention", "moe"]])
    pattern = "".join(_TYPES[word] for word in words) or usual
    if pattern != usual:
        reader.without_effect("mtp_hybrid_override_pattern")
    else:
        pattern = reader.letters("mtp_hybrid_override_pattern", "M*-E", default=usual)
    predictions = reader.size("num_nextn_predict_layers", default=0, least=0, most=MAX_LAYERS)
    if not predictions:
        return {}
    return {"mtp_num_layers": predictions, "mtp_hybrid_override_pattern": pattern}


def _pattern(reader: Reader) -> str:
    """The mixers: a list of names, which goes before a pattern of letters."""
    listed: dict[str, str] = {}
    for name, empty in (("layers_block_type", [[]]), ("layer_types", [[], None])):
        if words := reader.texts(name, tuple(_TYPES)):
            listed[name] = "".join(_TYPES[word] for word in words)
        elif reader.fields.get(name, "") in empty:
            why = "transformers lists no layers then, whatever hybrid_override_pattern says"
            reader.unsupported(name, reader.fields[name], [["mamba", "mlp"]], why)
    if len({*listed.values()}) > 1:
        reader.contradict({name: reader.fields[name] for name in listed})
    if listed:
        pattern = next(iter(listed.values()))
        reader.without_effect("hybrid_override_pattern")
    else:
        pattern = reader.letters("hybrid_override_pattern", "M*-E", default="ME*-")
    reader.fixed("num_hidden_layers", len(pattern), None)
    return pattern


def _experts(reader: Reader, has: bool) -> dict[str, Any]:
    """DeepSeek-V3's router over experts without gates."""
    groups, chosen = reader.size("n_group", default=1), reader.size("topk_group", default=1)
    found: dict[str, Any] = {
        "num_experts": reader.size("n_routed_experts", "num_local_experts", default=8),
        "moe_router_topk": reader.size("num_experts_per_tok", default=2),
        "moe_ffn_hidden_size": reader.size("moe_intermediate_size", default=7688),
        "moe_shared_expert_intermediate_size": reader.size(
            "moe_shared_expert_intermediate_size", default=7688
        ),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    scale = reader.number("routed_scaling_factor", 1.0)
    if scale != 1.0:
        found["moe_router_topk_scaling_factor"] = scale
    if chosen > groups:
        reader.unsupported("topk_group", chosen, [groups], f"there are n_group = {groups}")
    if groups > 1:
        of_groups = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
        found |= of_groups | {"moe_router_group_scores": 2}
    reader.fixed("n_shared_experts", 1)
    reader.fixed("norm_topk_prob", True)
    if latent := reader.optional_size("moe_latent_size", default=None):
        found["moe_latent_size"] = latent
    reader.without_effect("moe_shared_expert_overlap", "output_router_logits")
    if has:
        refuse_one_expert(reader, found["moe_router_topk"])
    return found if has else {}


def _read_unused(reader: Reader) -> None:
    """Read what has one value here, and what transformers has no use for."""
    for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"):
        reader.fixed(name, False)
    reader.fixed("use_conv_bias", True)
    reader.fixed("mamba_conv_bias", True)
    reader.fixed("conv_kernel", MAMBA_TAPS)
    reader.fixed("mamba_d_conv", MAMBA_TAPS)
    reader.fixed("mamba_hidden_act", "silu")
    reader.fixed("sliding_window", None)
    reader.fixed("hidden_dropout", 0.0)
    # transformers takes no smaller steps, which those who train these models do.
    reader.fixed("time_step_min", 0.001)
    unlimited = float("inf"), {"__float__": "Infinity"}
    reader.fixed("time_step_limit", *([0.0, limit] for limit in unlimited))
    reader.fixed("tie_word_embeddings", False, why="transformers ties none of this family")
    reader.without_effect("time_step_max", "time_step_floor", "time_step_rank", "expand")
    reader.without_effect("chunk_size", "mamba_ssm_cache_dtype", "use_mamba_kernels", "auto_map")
    reader.without_effect("num_logits_to_keep", "rescale_prenorm_residual", "norm_eps")
    reader.without_effect("rms_norm_eps", "rope_theta", "partial_rotary_factor")
    reader.fixed("quantization_config", None, {})


def _write(model: ModelConfig) -> Fields:
    sizes = size_fields(model)
    del sizes["num_hidden_layers"]
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    states, experts, further = model.states, {}, {}
    if model.mtp_num_layers:
        letters = model.mtp_hybrid_override_pattern or ""
        further = {
            "num_nextn_predict_layers": model.prediction_sets,
            "mtp_layers_block_type": [names[letter] for letter in letters],
        }
    if model.num_experts is not None:
        experts = {
            "n_routed_experts": model.num_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "moe_intermediate_size": model.expert_ffn_size,
            "moe_shared_expert_intermediate_size": model.shared_ffn_size,
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            "n_group": model.moe_router_num_groups or 1,
            "topk_group": model.moe_router_group_topk or 1,
        }
        if model.moe_latent_size is not None:
            experts["moe_latent_size"] = model.moe_latent_size
    return {
        **sizes,
        "layers_block_type": [names[letter] for letter in model.hybrid_override_pattern or ""],
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_size,
        "mlp_hidden_act": activation_name(model),
        "layer_norm_epsilon": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
        "ssm_state_size": states.key,
        "mamba_head_dim": states.value,
        "n_groups": states.groups,
        "mamba_num_heads": states.heads,
        "rescale_prenorm_residual": False,
        **experts,
        **further,
    }


_TENSORS = Tensors(
    {
        "embed_tokens.": "embeddings.",
        ".input_layernorm.": ".norm.",
        ".post_attention_layernorm.": ".norm.",
        ".self_attn.in_proj_xbcz.": ".mixer.in_proj.",
        ".self_attn.in_proj_dt.": ".mixer.in_proj.",
        ".self_attn.": ".mixer.",
        ".mlp.router.expert_bias": ".mixer.gate.e_score_correction_bias",
        ".mlp.router.": ".mixer.gate.",
        ".mlp.": ".mixer.",
        **EACH,
    },
    base="backbone.",
    last="norm_f.",
    predicts=True,
    further="mtp.",
)
FAMILIES = (Family("nemotron_h", "NemotronHForCausalLM", _read, _write, _TENSORS),)
