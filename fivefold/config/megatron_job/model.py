"""Translates the model of a Megatron-LM job into settings."""

from fivefold.config.by_layer import (
    OF_INDEXER,
    OF_ITS_LOSS,
    OF_LATENTS,
    OF_LINEAR_ATTENTION,
    OF_MAMBA,
)
from fivefold.config.layer_pattern import runs
from fivefold.config.megatron import HYBRID_EPSILON, HYBRID_SPEC, NEVER
from fivefold.config.megatron_job.arguments import MegatronJob
from fivefold.config.model import INITIAL
from fivefold.config.settings import flag_of
from fivefold.config.translation import Named
from fivefold.errors import Mistakes, shown


def of_model(job: MegatronJob, mistakes: Mistakes, lost: list[str]) -> Named:
    """Sizes, norms, activation, positions and attention."""
    yield from needed(job, "num_layers", mistakes, "encoder_num_layers")
    for name in ("hidden_size", "num_attention_heads"):
        yield from needed(job, name, mistakes)
    for name in filter(job.__getitem__, NEVER):
        mistakes.add(f"{name} = {shown(job[name])}: no model here has that")
    groups = job["num_query_groups"]
    yield "num_query_groups", groups if job["group_query_attention"] else None
    yield from job.same("kv_channels", "normalization", "softmax_type", "softmax_scale")
    yield "norm_epsilon", job["layernorm_epsilon"]
    yield "apply_layernorm_1p", job["layernorm_zero_centered_gamma"]
    yield from job.same("add_bias_linear", "untie_embeddings_and_output_weights")
    yield "add_qkv_bias", False if job["add_bias_linear"] else job["add_qkv_bias"]
    yield from job.same("hidden_dropout", "attention_dropout", *INITIAL, "seed")
    yield from _activation(job)
    yield from _positions(job, mistakes)
    yield from _normalised_heads(job, mistakes, lost)
    if job["window_size"] is not None:
        window = job["window_size"]
        first = window[0] if isinstance(window, list) else str(window).strip("()").split(",")[0]
        yield "window_size", first
        yield "window_attn_skip_freq", _pattern(job["window_attn_skip_freq"])
    yield from job.same("attention_output_gate", "experimental_attention_variant")
    if job["experimental_attention_variant"] == "dsa":
        yield from job.same(*OF_INDEXER, *OF_ITS_LOSS)
        job.mention("linear_attention_freq")
        if job["reset_attention_mask"]:
            lost.append("reset_attention_mask: its dsa attends to earlier documents")
    elif job["experimental_attention_variant"] is not None:
        yield "linear_attention_freq", _pattern(job["linear_attention_freq"])
        yield from job.same(*OF_LINEAR_ATTENTION[1:])
    yield from _mixers(job, mistakes, lost)
    if job["multi_latent_attention"]:
        yield from job.same("multi_latent_attention", *OF_LATENTS)
    yield from _further(job, lost)


def _further(job: MegatronJob, lost: list[str]) -> Named:
    """Multi-token prediction: release 0.16 has none in hybrid models, later ones describe it by a
    pattern of layers."""
    depths, pattern = job["mtp_num_layers"] or 0, job["mtp_hybrid_override_pattern"]
    hybrid = job["hybrid_override_pattern"] is not None or job["is_hybrid_model"]
    if depths and hybrid and not pattern:
        lost.append(
            f"mtp_num_layers = {depths}: a hybrid model has no multi-token prediction without "
            "mtp_hybrid_override_pattern"
        )
        depths = 0
    yield "mtp_num_layers", depths
    job.mention("mtp_use_repeated_layer")
    if depths:
        yield from job.same("mtp_loss_scaling_factor")
        yield "mtp_hybrid_override_pattern", pattern if hybrid else None
    if depths > 1:
        yield "mtp_use_repeated_layer", bool(job["mtp_use_repeated_layer"])


def _normalised_heads(job: MegatronJob, mistakes: Mistakes, lost: list[str]) -> Named:
    """With both switches on, Megatron-LM uses the norm without weights."""
    scales, whole = job["qk_layernorm"], job["qk_l2_norm"]
    if job["multi_latent_attention"]:
        if not scales:
            lost.append("qk_layernorm = False: latents are always normalised")
        yield "qk_l2_norm", whole
        return
    yield "qk_layernorm", scales and not whole
    yield "qk_l2_norm", whole
    turns = job["position_embedding_type"] == "rope" or job["use_rotary_position_embeddings"]
    if whole and (job["no_rope_freq"] is not None or not turns):
        mistakes.add(
            "qk_l2_norm = True: there it is of layers without RoPE, too, which no model here "
            "normalises so"
        )


def _mixers(job: MegatronJob, mistakes: Mistakes, lost: list[str]) -> Named:
    """Layers of one mixer each; without a pattern or ratios, all are Mamba-2."""
    pattern, hybrid = job["hybrid_override_pattern"], job["is_hybrid_model"]
    shares = {name: job[name] for name in ("hybrid_attention_ratio", "hybrid_mlp_ratio")}
    if pattern is None and any(shares.values()):
        given = " and ".join(f"{name} = {value}" for name, value in shares.items() if value)
        mistakes.add(
            f"{given}: which layers these are stands in the job's log, as its hybrid allocation",
            works=("--hybrid-override-pattern LETTERS",),
        )
    if pattern is None and not hybrid:
        return
    if not hybrid:
        lost.append(
            "is_hybrid_model = False: outputs of mixers start smaller there, as of layers with two"
        )
    if job["layernorm_epsilon"] != HYBRID_EPSILON:
        lost.append(f"norms of Mamba-2's heads add {HYBRID_EPSILON:g} there, whatever others do")
    if job["spec"] not in (None, [*HYBRID_SPEC]):
        mistakes.add(f"spec = {shown(job['spec'])}: no model here has such layers")
    yield "hybrid_override_pattern", pattern or "M" * (job["num_layers"] or 1)
    yield from job.same(*OF_MAMBA)


def _activation(job: MegatronJob) -> Named:
    """Megatron-LM's GELU uses tanh if it is fused with a bias, else erf."""
    hidden, inner = job["hidden_size"], job["ffn_hidden_size"]
    tanh = job["bias_gelu_fusion"] and job["add_bias_linear"]
    if job["swiglu"]:
        function = "silu"
        inner = inner or (hidden and int(8 * hidden / 3 / 64) * 64)
    elif job["squared_relu"]:
        function = "squared_relu"
    elif job["quick_geglu"]:
        function = "quick_gelu"
    else:
        function = "gelu_tanh" if tanh or job["openai_gelu"] else "gelu"
    yield "ffn_hidden_size", inner or (hidden and 4 * hidden)
    yield "activation_func", function
    yield "gated_linear_unit", function in ("silu", "quick_gelu")
    yield from job.same("glu_linear_offset", "activation_func_clamp_value")
    yield from job.same("bias_gelu_fusion", "bias_swiglu_fusion", "bias_dropout_fusion")


def _positions(job: MegatronJob, mistakes: Mistakes) -> Named:
    kind, rotates = job["position_embedding_type"], job["use_rotary_position_embeddings"]
    kind = "rope" if rotates else kind
    if not job["add_position_embedding"] and kind != "rope":
        kind = "none"
    if job["multi_latent_attention"] and kind == "none":
        kind = "rope"  # latent attention turns by itself there
    yield from needed(job, "max_position_embeddings", mistakes)
    yield "position_embedding_type", kind
    if kind != "rope":
        return
    yield from job.same("rotary_base", "rotary_percent", "rotary_interleaved")
    yield from job.same("rotary_seq_len_interpolation_factor")
    yield "rope_fusion", job["apply_rope_fusion"]
    yield "no_rope_freq", _pattern(job["no_rope_freq"])
    if job["use_rope_scaling"]:
        yield from job.same("use_rope_scaling", "rope_scaling_factor")
    if job["multi_latent_attention"]:
        kind = job["rope_type"] or "yarn"
        yield "rope_type", kind
        if kind == "yarn":
            yield from job.same("rotary_scaling_factor", "mscale", "mscale_all_dim")
    else:
        job.mention("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim")


def _pattern(value: object) -> str | None:
    """Which layers have something, as the flag has it."""
    if isinstance(value, list) and all(entry in (0, 1) for entry in value):
        return runs([bool(entry) for entry in value])
    return None if value is None else str(value)


def of_vocabulary(job: MegatronJob, vocabulary: int | None, mistakes: Mistakes) -> Named:
    """Megatron-LM pads to a multiple of a number times tp, Fivefold to one of the number."""
    null = str(job["tokenizer_type"]) == "NullTokenizer"  # which counts its end of text besides
    given = job["vocab_size"] and job["vocab_size"] + null
    size = vocabulary or job.vocabulary or given or job["padded_vocab_size"]
    by, tp = job["make_vocab_size_divisible_by"] or 1, job["tensor_model_parallel_size"]
    if not size:
        mistakes.add(
            "the job does not say how many tokens its tokenizer has",
            works=("--vocab-size N",),
        )
        return
    padded = job["padded_vocab_size"] or -(-size // (by * tp)) * by * tp
    fits = (of for of in (by, by * tp, padded) if -(-size // of) * of == padded)
    yield "vocab_size", size
    yield "make_vocab_size_divisible_by", next(fits, padded)


def of_experts(job: MegatronJob) -> Named:
    """Experts, their routers, and how tokens reach them."""
    if not job["num_experts"]:
        return
    yield from job.same("num_experts", "moe_router_topk")
    yield from _weights_of_experts(job)
    yield "moe_ffn_hidden_size", job["moe_ffn_hidden_size"] or job["ffn_hidden_size"]
    yield "moe_layer_freq", _pattern(job["moe_layer_freq"])
    yield from job.same("moe_shared_expert_intermediate_size", "moe_shared_expert_gate")
    yield from job.same("moe_apply_probs_on_input", "moe_latent_size")
    yield from job.same("moe_shared_expert_overlap", "moe_router_dtype")
    yield from job.same("moe_router_num_groups", "moe_router_group_topk")
    yield from job.same("moe_router_enable_expert_bias", "moe_router_bias_update_rate")
    yield from job.same("moe_router_force_load_balancing", "moe_z_loss_coeff")
    yield from job.same("moe_input_jitter_eps", "moe_expert_capacity_factor")
    yield from job.same("moe_pad_expert_input_to_capacity", "moe_token_drop_policy")
    kinds, factors = map(job.listed, ("moe_router_load_balancing_type", "moe_aux_loss_coeff"))
    off = all(str(kind).endswith("aux_loss") for kind in kinds) and not any(factors)
    yield "moe_router_load_balancing_type", ["none"] if off else kinds
    yield "moe_aux_loss_coeff", [0.0] if off else factors
    dispatcher = job["moe_token_dispatcher_type"]
    yield "moe_token_dispatcher_type", dispatcher
    # Without the switch, its backend of the same name is a choice of kernels.
    if dispatcher == "flex" and job["moe_enable_deepep"]:
        yield "moe_enable_deepep", True
        yield from job.same("moe_deepep_num_sms")
    yield from job.same("expert_model_parallel_size", "overlap_moe_expert_parallel_comm")
    yield from job.same("delay_wgrad_compute")
    of_experts = job["expert_tensor_parallel_size"]
    yield "expert_tensor_parallel_size", of_experts or job["tensor_model_parallel_size"]


def _weights_of_experts(job: MegatronJob) -> Named:
    """With Sinkhorn's assignment there is only one way to weigh experts, as its router's code
    shows."""
    function, first = job["moe_router_score_function"], job["moe_router_pre_softmax"]
    factor = job["moe_router_topk_scaling_factor"]
    if "sinkhorn" in job.listed("moe_router_load_balancing_type"):
        alone = job["moe_router_topk"] == 1
        function, first, factor = "sigmoid" if alone else "softmax", True, None
    yield "moe_router_score_function", function
    yield "moe_router_pre_softmax", first and function == "softmax"
    yield "moe_router_topk_scaling_factor", factor


def needed(job: MegatronJob, name: str, mistakes: Mistakes, older: str = "") -> Named:
    """An argument that every job has, under this name or an older one."""
    found = {n: job[n] for n in (name, older) if n and job[n] is not None}
    if len({*found.values()}) > 1:
        mistakes.add(" and ".join(f"{n} is {value}" for n, value in found.items()))
    if not found:
        mistakes.add(f"the job does not say {name}", works=(f"its {flag_of(name)}",))
    else:
        yield name, next(iter(found.values()))
