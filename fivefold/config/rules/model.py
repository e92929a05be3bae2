"""Validation of a model's architecture on its own."""

from functools import lru_cache

from fivefold.config.by_layer import IN_BF16, OF_WINDOWS
from fivefold.config.config import SECTION_SETTINGS, SETTINGS
from fivefold.config.divisors import divisors, nearest
from fivefold.config.layer_pattern import MAX_LAYERS, layers_of
from fivefold.config.model import MAX_SIZE, ModelConfig
from fivefold.config.rules.experts import check_branch_norms
from fivefold.config.rules.lora import check_adapters
from fivefold.config.rules.rope import check_rope
from fivefold.config.rules.sparse import check_sparse
from fivefold.config.rules.states import check_states
from fivefold.config.rules.values import check_ranges
from fivefold.config.settings import flag_of
from fivefold.errors import Mistakes, did_you_mean


def check_model(model: ModelConfig, mistakes: Mistakes) -> None:
    """Report everything that is wrong with the architecture on its own."""
    if not _is_sound(model):
        _check_model(model, mistakes)


@lru_cache(maxsize=64)
def _is_sound(model: ModelConfig) -> bool:
    """Whether nothing is wrong: a search checks layout after layout of the same model."""
    mistakes = Mistakes()
    _check_model(model, mistakes)
    return not mistakes.found


def _check_model(model: ModelConfig, mistakes: Mistakes) -> None:
    out_of_range = check_ranges("model", model, mistakes)
    too_large = False
    for setting in SECTION_SETTINGS["model"]:
        name, value = setting.name, getattr(model, setting.name)
        most = MAX_LAYERS if name in ("num_layers", "mtp_num_layers") else MAX_SIZE
        if setting.kind is int and (value or 0) > most:
            mistakes.add(f"{name} must be at most {most}, not {value}")
            too_large = True
        elif setting.optional and value is None:
            continue
        elif setting.choices and not setting.many and value not in setting.choices:
            what = f"unknown {name} {value!r}{did_you_mean(value, setting.choices)}"
            mistakes.add(what, works=setting.choices)
    if too_large:
        return
    if model.parallel_residual and not model.norms_before:
        mistakes.add(
            "parallel_residual feeds attention and MLP the same state, normalised for each, and "
            f"norm_placement {model.norm_placement} has no norms before them",
            works=["--no-parallel-residual", "--norm-placement both"],
        )
    if not any(SETTINGS[name].kind is int for name in out_of_range):  # the checks divide by these
        _check_heads(model, mistakes)
        _check_experts(model, mistakes)
    _check_latents(model, mistakes)
    _check_values(model, mistakes)
    check_adapters(model, mistakes)
    check_rope(model, mistakes)
    _check_gate(model, mistakes)
    _check_ends(model, mistakes)
    _check_reach(model, mistakes)
    check_states(model, mistakes)
    check_sparse(model, mistakes)
    if model.window_attn_skip_freq is not None:
        with mistakes.collecting():
            if not any(
                layers_of("window_attn_skip_freq", model.window_attn_skip_freq, model.num_layers)
            ):
                mistakes.add(
                    f"window_attn_skip_freq {model.window_attn_skip_freq!r} gives none of the "
                    "layers a window",
                    works=("--window-attn-skip-freq none",),
                )


def _check_ends(model: ModelConfig, mistakes: Mistakes) -> None:
    """Check that some layers keep bf16, and that others remain."""
    first, last = model.num_layers_at_start_in_bf16, model.num_layers_at_end_in_bf16
    layers, names = model.num_layers, IN_BF16[1:]
    if not model.first_last_layers_bf16 or min(first, last) < 0:
        return
    if first + last == 0:
        mistakes.add(
            f"first_last_layers_bf16 keeps no layer in bf16: {names[0]} 0 + {names[1]} 0",
            works=[f"{flag_of(name)} 1" for name in names],
        )
    elif first + last >= layers:
        fewer = min(first, (layers - 1) // 2)
        works = f"{flag_of(names[0])} {fewer} {flag_of(names[1])} {min(last, layers - 1 - fewer)}"
        default = " ".join(SETTINGS[name].typed(SETTINGS[name].default) for name in IN_BF16)
        mistakes.add(
            f"first_last_layers_bf16 leaves no layer for fewer bits: of {layers}, {first} at the "
            f"start + {last} at the end keep bf16",
            works=[*([works] if layers > 1 else []), default],
        )


def _check_reach(model: ModelConfig, mistakes: Mistakes) -> None:
    """Check what limits the attention of layers with RoPE, and how their heads are normalised."""
    if model.attention_chunk_size is not None and model.window_size is not None:
        mistakes.add(
            f"attention_chunk_size {model.attention_chunk_size} and window_size "
            f"{model.window_size} both limit attention of layers with RoPE",
            works=("--attention-chunk-size none", "--window-size none"),
        )
    if model.qk_layernorm_after_rope and model.norms_together:
        mistakes.add(
            "qk_layernorm_after_rope normalises each head alone, and qk_layernorm_type all_heads "
            "normalises all heads together",
            works=("--qk-layernorm-type per_head", "--no-qk-layernorm-after-rope"),
        )
    for name, other in (
        ("qk_layernorm", model.qk_layernorm),
        ("multi_latent_attention", model.multi_latent_attention),
    ):
        if model.qk_l2_norm and other:
            mistakes.add(
                f"qk_l2_norm and {name} both normalise queries and keys",
                works=("--no-qk-l2-norm", f"--no-{flag_of(name)[2:]}"),
            )


def _check_gate(model: ModelConfig, mistakes: Mistakes) -> None:
    """Check that the activation supports the gate, its offset and its clamp, and MLPs a bias."""
    if model.activation_func == "xielu" and (model.gated_linear_unit or model.num_experts):
        of = "gated_linear_unit" if model.gated_linear_unit else "num_experts"
        none = "--no-gated-linear-unit" if model.gated_linear_unit else "--num-experts none"
        mistakes.add(
            f"activation_func xielu works only in dense MLPs without a gate, and {of} is "
            f"{getattr(model, of)}",
            works=(none, "--activation-func silu"),
        )
    if model.mlp_bias and model.num_experts:
        mistakes.add(
            f"mlp_bias is for dense MLPs, and num_experts is {model.num_experts}",
            works=("--no-mlp-bias", "--num-experts none"),
        )
    fused = model.gated_linear_unit and model.activation_func in ("silu", "quick_gelu")
    for name, default in (("glu_linear_offset", 0.0), ("activation_func_clamp_value", None)):
        value = getattr(model, name)
        if value != default and not fused:
            mistakes.add(
                f"{name} = {value} needs gated_linear_unit with activation_func silu or quick_gelu",
                works=(
                    "--gated-linear-unit --activation-func silu",
                    f"{flag_of(name)} {'none' if default is None else default}",
                ),
            )


def _check_heads(model: ModelConfig, mistakes: Mistakes) -> None:
    if model.hybrid_override_pattern is not None and "*" not in model.mixers_used:
        return  # no layer has any
    heads, hidden = model.num_attention_heads, model.hidden_size
    if model.kv_channels is None and hidden % heads and not model.multi_latent_attention:
        mistakes.add(
            f"hidden_size {hidden} cannot be split over {heads} heads",
            f"{hidden} / {heads} = {hidden / heads:.2f} (must be whole, or set kv_channels)",
            works=[f"--num-attention-heads {n}" for n in nearest(heads, divisors(hidden))],
        )
    for local in (False, True) if model.has_local_sizes else (False,):
        _check_attention(model.attention_of(local), "_local" * local, mistakes)


def _check_attention(model: ModelConfig, of: str, mistakes: Mistakes) -> None:
    """Check the heads of one kind of layers; `of`: how names of their settings end."""
    heads, groups = model.num_attention_heads, model.num_kv_heads
    if heads % groups and not model.multi_latent_attention:
        name = f"num_query_groups{of}"
        mistakes.add(
            f"{heads} query heads cannot share {groups} key/value heads",
            f"num_attention_heads / {name} = {heads} / {groups} = {heads / groups:.2f} "
            "(must be whole)",
            works=[f"{flag_of(name)} {n}" for n in nearest(groups, divisors(heads))],
        )
    if model.position_embedding_type == "rope" and (model.rotary_dim % 2 or not model.rotary_dim):
        size = f"{model.rotary_dim}"
        if model.rotary_dim != model.head_dim and not model.multi_latent_attention:
            size = f"{model.head_dim} x rotary_percent {model.rotary_percent} = {model.rotary_dim}"
        what = "odd" if model.rotary_dim else "nothing"
        whence = f"hidden_size {model.hidden_size} / num_attention_heads {heads}"
        if model.kv_channels is not None:
            whence = f"kv_channels{of} {model.kv_channels}"
        if model.multi_latent_attention:
            whence = f"qk_pos_emb_head_dim {model.qk_pos_emb_head_dim}"
        mistakes.add(f"RoPE turns pairs of features, and head size {size} is {what}", whence)


def _check_experts(model: ModelConfig, mistakes: Mistakes) -> None:
    if model.num_experts is None:
        return
    if model.moe_router_topk > model.num_experts:
        mistakes.add(
            f"moe_router_topk {model.moe_router_topk} exceeds num_experts {model.num_experts}",
            works=[
                f"--moe-router-topk {model.num_experts}",
                f"--num-experts {model.moe_router_topk}",
            ],
        )
    _check_groups(model, model.num_experts, mistakes)
    if model.moe_branch_norms:
        check_branch_norms(model, mistakes)
    if model.moe_router_pre_softmax and model.moe_router_score_function == "sigmoid":
        mistakes.add(
            "moe_router_pre_softmax has no effect on sigmoid scores",
            works=["--no-moe-router-pre-softmax", "--moe-router-score-function softmax"],
        )
    if model.moe_shared_expert_gate and not model.shared_ffn_size:
        mistakes.add(
            "moe_shared_expert_gate needs moe_shared_expert_intermediate_size",
            works=["--no-moe-shared-expert-gate"],
        )
    if model.moe_apply_probs_on_input and model.moe_router_topk != 1:
        mistakes.add(
            "moe_apply_probs_on_input multiplies a token by the weight of its only expert, and "
            f"moe_router_topk is {model.moe_router_topk}",
            works=["--moe-router-topk 1", "--no-moe-apply-probs-on-input"],
        )
    if model.moe_apply_probs_on_input and model.moe_latent_size:
        mistakes.add(
            "moe_apply_probs_on_input multiplies tokens, and with moe_latent_size experts read "
            "projections of them",
            works=["--moe-latent-size none", "--no-moe-apply-probs-on-input"],
        )
    if model.hybrid_override_pattern is not None:
        return
    with mistakes.collecting():
        if not any(layers_of("moe_layer_freq", model.moe_layer_freq, model.num_layers)):
            mistakes.add(
                f"moe_layer_freq {model.moe_layer_freq!r} gives none of the layers experts",
                works=("--moe-layer-freq 1", "--num-experts none"),
            )


def _check_latents(model: ModelConfig, mistakes: Mistakes) -> None:
    if not model.multi_latent_attention:
        return
    heads, groups = model.num_attention_heads, model.num_query_groups
    if groups not in (None, heads):
        mistakes.add(
            f"multi_latent_attention makes keys and values for each of {heads} query heads from "
            f"latents, and num_query_groups {groups} would share them",
            works=("--num-query-groups none", "--no-multi-latent-attention"),
        )
    if model.kv_channels is not None and {model.qk_head_dim, model.v_head_dim} != {
        model.kv_channels
    }:
        mistakes.add(
            f"kv_channels {model.kv_channels} has no effect on multi_latent_attention, whose heads "
            f"have qk_head_dim {model.qk_head_dim} and v_head_dim {model.v_head_dim}",
            works=("--kv-channels none",),
        )
    if model.norms_together:
        mistakes.add(
            "qk_layernorm_type all_heads has no effect on multi_latent_attention, which normalises "
            "its latents",
            works=("--qk-layernorm-type per_head",),
        )
    if model.qk_layernorm_after_rope:
        mistakes.add(
            "qk_layernorm_after_rope has no effect on multi_latent_attention, which normalises "
            "its latents",
            works=("--no-qk-layernorm-after-rope",),
        )
    for name in ("add_qkv_bias", "attention_out_bias"):
        if getattr(model, name) and not model.add_bias_linear:
            mistakes.add(
                f"{name} has no effect on multi_latent_attention, whose projections have a bias "
                "where all linear layers of a block do",
                works=(flag_of(f"no_{name}"), "--add-bias-linear"),
            )
    if model.clip_qkv is not None:
        mistakes.add(
            "clip_qkv clips queries, keys and values that are projected from hidden states, and "
            "multi_latent_attention projects them from latents",
            works=("--clip-qkv none", "--no-multi-latent-attention"),
        )
    if model.position_embedding_type == "learned_absolute":
        mistakes.add(
            "multi_latent_attention has no learned positions",
            works=("--position-embedding-type rope", "--position-embedding-type none"),
        )


def _check_values(model: ModelConfig, mistakes: Mistakes) -> None:
    """Check that attention has no latents or gates where heads have sizes of their own."""
    for name in ("v_channels", "value_multiplier", "v_l2_norm", "keys_as_values", *OF_WINDOWS):
        setting, value = SETTINGS[name], getattr(model, name)
        if model.multi_latent_attention and value != setting.default:
            mistakes.add(
                f"{name} {setting.words(value)} is for keys and values that are projected from "
                "hidden states, and multi_latent_attention projects them from latents",
                works=(setting.typed(setting.default), "--no-multi-latent-attention"),
            )
    if model.v_l2_norm and model.value_multiplier != 1.0:
        mistakes.add(
            f"v_l2_norm normalises values, and value_multiplier {model.value_multiplier} scales "
            "them",
            works=("--no-v-l2-norm", "--value-multiplier 1.0"),
        )
    if model.keys_as_values:
        _check_keys_as_values(model, mistakes)
    if model.v_channels is not None and model.attention_output_gate:
        mistakes.add(
            f"v_channels {model.v_channels} gives heads outputs of that size, and the gates of "
            "attention_output_gate have the size of queries",
            works=("--v-channels none", "--no-attention-output-gate"),
        )


def _check_keys_as_values(model: ModelConfig, mistakes: Mistakes) -> None:
    off = "--no-keys-as-values"
    if model.window_size is not None and model.window_attn_skip_freq is None:
        mistakes.add(
            "keys_as_values changes layers without a window, and window_size "
            f"{model.window_size} gives every layer a window",
            works=("--window-attn-skip-freq 2", off),
        )
    if not model.v_l2_norm:
        mistakes.add(
            "keys_as_values needs v_l2_norm: values are keys before their own norm",
            works=("--v-l2-norm", off),
        )
    if model.v_channels is not None:
        mistakes.add(
            f"keys_as_values gives values the size of keys, and v_channels is {model.v_channels}",
            works=("--v-channels none", off),
        )


def _check_groups(model: ModelConfig, experts: int, mistakes: Mistakes) -> None:
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None and chosen is None:
        return
    if groups is None or chosen is None:
        names = ["moe_router_num_groups", "moe_router_group_topk"]
        given, missing = names if chosen is None else reversed(names)
        mistakes.add(
            f"{given} = {groups if chosen is None else chosen} needs {missing}",
            "a router that chooses among groups needs both",
            works=[f"{flag_of(given)} none"],
        )
    elif experts % groups or chosen > groups:
        mistakes.add(
            f"{experts} experts in {groups} groups, of which {chosen} are chosen",
            f"num_experts {experts} / moe_router_num_groups {groups} = {experts / groups:.2f} "
            "must be whole",
            f"moe_router_group_topk {chosen} must be at most {groups}",
            works=[f"--moe-router-num-groups {n}" for n in nearest(groups, divisors(experts))],
        )
    elif model.moe_router_topk > chosen * experts // groups:
        held = chosen * experts // groups
        mistakes.add(
            f"moe_router_topk {model.moe_router_topk} exceeds the experts of {chosen} groups",
            f"{chosen} x {experts} / {groups} = {held}",
            works=[f"--moe-router-topk {held}"],
        )
    elif (model.moe_router_group_scores or 1) > experts // groups:
        mistakes.add(
            f"moe_router_group_scores {model.moe_router_group_scores} exceeds a group's experts",
            f"{experts} / {groups} = {experts // groups}",
            works=[f"--moe-router-group-scores {experts // groups}"],
        )
