"""The settings of a model's architecture; what follows from them is in `config.model`."""

from dataclasses import MISSING, dataclass
from typing import Literal

from fivefold.config.lora import LoraTarget
from fivefold.config.settings import Count, NonNegative, Positive, Share, Whole, option


@dataclass(frozen=True)
class Architecture:
    """The architecture of a decoder-only transformer, under Megatron-LM's names.

    Lengths are in tokens, sizes in features. The defaults of the optional fields are Llama's.
    """

    num_layers: Count = option(MISSING, "transformer layers")
    hidden_size: Count = option(MISSING, "features of the residual stream")
    num_attention_heads: Count = option(MISSING, "query heads")
    vocab_size: Count = option(MISSING, "entries of the vocabulary, before padding")
    num_query_groups: Count | None = option(None, "key/value heads (default: one per query head)")
    kv_channels: Count | None = option(None, "features of a head (default: hidden size / heads)")
    v_channels: Count | None = option(None, "features of a value head (default: those of a key's)")
    value_multiplier: Positive = option(1.0, "factor of values, as in MiMo-V2-Flash")
    ffn_hidden_size: Count | None = option(
        None, "inner features of the MLP (default: 4 x hidden size)"
    )
    max_position_embeddings: Count = option(4096, "longest supported sequence, in tokens")
    normalization: Literal["RMSNorm", "LayerNorm"] = option("RMSNorm", "normalisation layers")
    layernorm_bias: bool = option(
        True, "give LayerNorm a bias (Cohere's models have none); RMSNorm never has one"
    )
    norm_elementwise_affine: bool = option(
        True, "norms of the residual stream have weights; those of OLMo 1 and nanochat have none"
    )
    norm_epsilon: Positive = option(1e-5, "added to the variance by the normalisation layers")
    apply_layernorm_1p: bool = option(
        False, "multiply by 1 + the weight of a norm, which starts at 0, as Gemma does"
    )
    norm_placement: Literal["before", "after", "both"] = option(
        "before",
        "where attention and MLP are normalised: their inputs, their outputs (EXAONE 4), or "
        "both (GLM-4)",
    )
    embedding_multiplier: Positive = option(1.0, "factor of token embeddings, 12 in Granite")
    embed_layernorm: bool = option(
        False, "normalise the embeddings of tokens before the first layer, as nanochat does"
    )
    residual_multiplier: Positive = option(1.0, "factor of both branches' outputs, as in Granite")
    layer_scalar: Positive | None = option(
        None, "multiply each layer's output by an untrained factor, initially this (Gemma 4)"
    )
    logits_scaling: Positive = option(1.0, "logits are divided by this, as in Granite")
    softmax_scale: Positive | None = option(
        None, "factor of queries' products with keys; none: 1 / sqrt(features of a query)"
    )
    attn_logit_softcapping: Positive | None = option(
        None, "c: attention scores become c tanh(score / c), as in Gemma 2; none: as they are"
    )
    final_logit_softcapping: Positive | None = option(
        None, "c: logits become c tanh(logit / c), as in Gemma 2; none: as they are"
    )
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = option(
        "rope", "position encoding: rotary, a learned table, or none, as in Nemotron-H"
    )
    position_embedding_offset: Whole = option(0, "rows before that of the first position: 2 in OPT")
    rotary_base: Positive = option(10000.0, "base (theta) of RoPE")
    rotary_base_local: Positive | None = option(
        None,
        "RoPE's base in layers with a window, whose RoPE is unscaled, as in Gemma 3; none: "
        "rotary_base",
    )
    rotary_percent: Positive = option(
        1.0, "share of a head's features that RoPE rotates, counted from the first"
    )
    rotary_interleaved: bool = option(
        False,
        "RoPE rotates pairs of neighbouring features, not pairs across a head's halves",
    )
    rotary_seq_len_interpolation_factor: Positive | None = option(
        None, "RoPE divides positions by this, as in Gemma 3 from 4B on; none: no division"
    )
    no_rope_freq: str | None = option(
        None,
        "layers without RoPE: every Nth ('4': layers 3, 7, ...), or a list such as '[0]*3+[1]*1'; "
        "none: no layers",
    )
    use_rope_scaling: bool = option(False, "stretch low RoPE frequencies as Llama 3.1 does")
    rope_scaling_factor: Positive = option(
        8.0, "factor by which RoPE scaling stretches the longest wavelengths"
    )
    rope_low_freq_factor: Positive = option(
        1.0, "wavelengths above original length / this are stretched fully"
    )
    rope_high_freq_factor: Positive = option(
        4.0, "wavelengths below original length / this are not stretched"
    )
    rope_original_max_position_embeddings: Count = option(
        8192, "sequence length before RoPE scaling, in tokens"
    )
    rope_type: Literal["rope", "proportional", "yarn", "longrope", "dynamic"] = option(
        "rope",
        "rotary positions: unscaled; proportional: frequencies of whole heads, of which only the "
        "first rotary_percent rotate; or stretched to longer contexts: YaRN, LongRoPE, dynamic "
        "NTK",
    )
    rotary_scaling_factor: Positive = option(
        40.0,
        "factor by which YaRN stretches long wavelengths; dynamic NTK stretches the longest by 1 "
        "+ this x (seq_length / original length - 1)",
    )
    original_max_position_embeddings: Count = option(
        4096, "sequence length before YaRN, LongRoPE or dynamic NTK scaling, in tokens"
    )
    beta_fast: Positive = option(
        32.0, "YaRN keeps frequencies with more rotations than this in the original length"
    )
    beta_slow: Positive = option(
        1.0,
        "YaRN fully stretches frequencies with fewer rotations than this in the original length",
    )
    mscale: NonNegative = option(1.0, "YaRN scales rotary features by 1 + 0.1 mscale ln(factor)")
    mscale_all_dim: NonNegative = option(
        0.0, "YaRN's mscale for all features of MLA's scores; rotary features are divided by it"
    )
    yarn_correction_range_round_to_int: bool = option(
        True, "round the ends of YaRN's ramp to whole feature pairs"
    )
    longrope_short_factor: tuple[Positive, ...] = option(
        (), "LongRoPE divides frequencies of feature pairs by these, up to the original length"
    )
    longrope_long_factor: tuple[Positive, ...] = option(
        (), "LongRoPE divides them by these if seq_length is longer than the original"
    )
    longrope_attention_factor: Positive | None = option(
        None,
        "LongRoPE scales rotary features by this; none: sqrt(1 + ln(max_position_embeddings / "
        "original) / ln(original)), at least 1",
    )
    activation_func: Literal[
        "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "xielu"
    ] = option(
        "silu",
        "activation of the MLP; quick_gelu is x sigmoid(1.702 x), squared_relu is max(x, 0)^2; "
        "xielu has learned parameters, as in Apertus",
    )
    gated_linear_unit: bool = option(True, "gate the MLP: activation(gate) x up")
    glu_linear_offset: float = option(
        0.0, "added to the up projection of a gated MLP: activation(gate) x (up + this)"
    )
    activation_func_clamp_value: Positive | None = option(
        None, "clamp the gate from above and up on both sides, as gpt-oss does; none: no clamp"
    )
    add_bias_linear: bool = option(False, "give every linear layer of a block a bias")
    add_qkv_bias: bool = option(False, "give the query, key and value projections a bias")
    attention_out_bias: bool = option(False, "give the output projection of attention a bias")
    mlp_bias: bool = option(False, "give the linear layers of MLPs a bias, as GPT-J does")
    lm_head_bias: bool = option(False, "give the output layer a bias, as Phi-1 and 2 do")
    clip_qkv: Positive | None = option(None, "bound of queries, keys and values, as in OLMo 1.7")
    qk_layernorm: bool = option(
        False,
        "normalise each query and key head, as Qwen3 does (MLA always normalises latents)",
    )
    qk_layernorm_type: Literal["per_head", "all_heads"] = option(
        "per_head",
        "normalise each head by itself, or all heads of a token together, as OLMo 2 does",
    )
    qk_layernorm_after_rope: bool = option(
        False, "normalise query and key heads after RoPE, as Hunyuan does"
    )
    qk_l2_norm: bool = option(
        False,
        "divide each query and key head by its root mean square after RoPE, in layers with RoPE, "
        "as Llama 4 Scout does",
    )
    v_l2_norm: bool = option(
        False, "divide each value head by its root mean square, as Gemma 4 does"
    )
    untie_embeddings_and_output_weights: bool = option(True, "give the output layer its own weight")
    hidden_dropout: Share = option(0.0, "dropout of embeddings and of both residual branches")
    embedding_dropout: Share | None = option(None, "dropout of embeddings; none: hidden_dropout")
    attention_dropout: Share = option(0.0, "dropout of attention probabilities")
    softmax_type: Literal["vanilla", "learnable"] = option(
        "vanilla",
        "attention softmax: over keys only, or with a learned sink logit per head, as gpt-oss has",
    )
    window_size: Count | None = option(
        None, "sliding window: tokens before itself that each token attends to; none: all"
    )
    window_attn_skip_freq: str | None = option(
        None,
        "layers with the sliding window: all but every Nth ('2': layers 0, 2, ...), or a list such "
        "as '[1]*3+[0]*1'; none: all",
    )
    num_query_groups_local: Count | None = option(
        None, "key/value heads in layers with a window, as in MiMo-V2-Flash; none: as in others"
    )
    kv_channels_local: Count | None = option(
        None, "features of a head in layers with a window, as in Gemma 4; none: as in others"
    )
    keys_as_values: bool = option(
        False,
        "in layers without a window projected keys are also the values, as in Gemma 4",
    )
    softmax_type_local: Literal["vanilla", "learnable"] | None = option(
        None, "attention softmax in layers with a window; none: as in others"
    )
    attention_chunk_size: Count | None = option(
        None,
        "layers with RoPE attend within chunks of this many tokens, as in Llama 4, counted from "
        "the start of a document; none: to all of it",
    )
    attn_temperature_tuning: bool = option(
        False,
        "layers without RoPE multiply queries at position p by "
        "1 + attn_scale ln(1 + floor((p + 1) / floor_scale)), as in Llama 4",
    )
    attn_temperature_rotated: bool = option(
        False,
        "apply attn_temperature_tuning in layers with RoPE, by 1 + attn_scale ln(1 + floor(p / "
        "floor_scale)), as in Ministral 3",
    )
    attn_scale: Positive = option(0.1, "how fast attn_temperature_tuning grows")
    floor_scale: Count = option(8192, "tokens between two steps of attn_temperature_tuning")
    parallel_residual: bool = option(
        False, "feed attention and MLP of a layer the same hidden state, as GPT-NeoX does"
    )
    parallel_residual_one_norm: bool = option(
        False, "with parallel_residual: one norm for both, as in Cohere's models and Falcon 7B"
    )
    init_method_std: Positive = option(0.02, "standard deviation of initial weights")
    embedding_init_method_std: Positive | None = option(
        None,
        "standard deviation of initial embeddings and learned positions (default: init_method_std)",
    )
    make_vocab_size_divisible_by: Count = option(128, "pad the vocabulary to a multiple of this")
    num_experts: Count | None = option(
        None, "experts of a mixture-of-experts layer; none: dense MLPs"
    )
    moe_router_topk: Count = option(2, "experts per token")
    moe_router_num_groups: Count | None = option(
        None, "equal groups of experts; a token uses the best few groups; none: no groups"
    )
    moe_router_group_topk: Count | None = option(None, "groups of experts per token")
    moe_router_group_scores: Count | None = option(
        None,
        "number of best experts whose scores add up to their group's score (default: experts per "
        "token / groups per token)",
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = option(
        "softmax", "function from the router's logits to scores"
    )
    moe_router_pre_softmax: bool = option(
        False, "softmax over all experts, rather than only over the chosen ones"
    )
    moe_router_norm_epsilon: Positive = option(
        1e-20,
        "added to the sum of several experts' sigmoid scores, their divisor; 1e-6 in LFM2",
    )
    moe_router_topk_scaling_factor: Positive | None = option(
        None, "factor on the weights of the chosen experts; none: 1"
    )
    moe_router_enable_expert_bias: bool = option(
        False, "balance experts by biases that affect only the choice, without a loss (DeepSeek-V3)"
    )
    moe_ffn_hidden_size: Count | None = option(
        None, "inner features of an expert (default: ffn_hidden_size)"
    )
    moe_latent_size: Count | None = option(
        None,
        "project tokens to this many features for the experts, and the sum of outputs back, as in "
        "Nemotron 3 Super (LatentMoE); none: no projection",
    )
    moe_shared_expert_intermediate_size: Count | None = option(
        None, "inner features of all shared experts together (they process every token)"
    )
    moe_shared_expert_gate: bool = option(
        False, "weight the output of shared experts by a gate, as Qwen2-MoE does"
    )
    moe_branch_norms: bool = option(
        False,
        "separate norms before and after shared and routed experts, a norm before the router, and "
        "a learned factor for each expert's weight, as in Gemma 4 26B-A4B",
    )
    moe_apply_probs_on_input: bool = option(
        False,
        "apply the router's weight to an expert's input, not output, as in Llama 4",
    )
    moe_layer_freq: str = option(
        "1",
        "layers with experts: every Nth ('1' all, '2' layers 0, 2, ...), or a list such as "
        "'[0]*3+[1]*58'",
    )
    multi_latent_attention: bool = option(
        False, "compress queries, keys and values into latents, as DeepSeek-V2 does (MLA)"
    )
    q_lora_rank: Count | None = option(None, "features of MLA's query latent; none: no compression")
    kv_lora_rank: Count = option(512, "features of MLA's key/value latent")
    qk_head_dim: Count = option(128, "non-rotary features of an MLA query or key head")
    qk_pos_emb_head_dim: Count = option(64, "rotary features of an MLA query or key head")
    v_head_dim: Count = option(128, "features of an MLA value head")
    latent_norm_epsilon: Positive | None = option(
        None,
        "epsilon of the norms of MLA's latents and of dsa's indexer (default: norm_epsilon)",
    )
    attention_output_gate: bool = option(
        False, "multiply attention's output by sigmoid gates, which the query projection computes"
    )
    experimental_attention_variant: (
        Literal["gated_delta_net", "kimi_delta_attention", "short_convolution", "dsa"] | None
    ) = option(
        None,
        "linear attention in most layers (gated_delta_net as in Qwen3-Next, kimi_delta_attention "
        "as in Kimi Linear), gated short convolutions (short_convolution, as in LFM2), or "
        "attention to tokens chosen by an indexer (dsa, as in DeepSeek-V3.2, with MLA); none: "
        "neither",
    )
    dsa_indexer_n_heads: Count | None = option(None, "heads of dsa's indexer")
    dsa_indexer_head_dim: Count | None = option(
        None, "features of a head of dsa's indexer; the first qk_pos_emb_head_dim are rotary"
    )
    dsa_indexer_topk: Count | None = option(
        None, "with dsa: tokens to attend to, those with the indexer's highest scores"
    )
    dsa_indexer_loss_coeff: NonNegative | None = option(
        None,
        "factor of the loss of dsa's indexer; none or 0: the indexer is not trained",
    )
    dsa_indexer_use_sparse_loss: bool = option(
        False, "compute this loss over the chosen tokens only, not over all"
    )
    linear_attention_freq: str | None = option(
        None,
        "layers with linear attention or short convolutions: all but every Nth ('4': layers 0, 1, "
        "2, 4, ...), or a list such as '([1]*3+[0]*1)*12'",
    )
    linear_conv_kernel_dim: Count = option(
        4, "tokens that the causal convolution of these layers covers"
    )
    linear_key_head_dim: Count = option(128, "features of a query or key head of linear attention")
    linear_value_head_dim: Count = option(128, "features of a value head of linear attention")
    linear_num_key_heads: Count = option(16, "query and key heads of linear attention")
    linear_num_value_heads: Count = option(
        32, "value heads of linear attention; a multiple of the key heads"
    )
    hybrid_override_pattern: str | None = option(
        None,
        "one mixer a layer: M (Mamba-2), * (attention), - (MLP) or E (experts), as in 'M-M-M-M*-' "
        "of Nemotron-H; none: attention and an MLP in each",
    )
    mamba_state_dim: Count = option(128, "features of a Mamba-2 state for each feature of its head")
    mamba_head_dim: Count = option(64, "features of a head of Mamba-2")
    mamba_num_groups: Count = option(
        8, "groups of Mamba-2's heads; each group shares B, C and a norm"
    )
    mamba_num_heads: Count | None = option(
        None, "heads of Mamba-2 (default: 2 x hidden size / mamba_head_dim)"
    )
    mtp_num_layers: Whole = option(
        0, "tokens predicted after the next one, by a module each (multi-token prediction)"
    )
    mtp_hybrid_override_pattern: str | None = option(
        None,
        "layers of each MTP module of a hybrid model, in the letters of hybrid_override_pattern",
    )
    mtp_use_repeated_layer: bool = option(
        False,
        "share one set of weights among all prediction depths, as in Nemotron 3 Super",
    )
    first_last_layers_bf16: bool = option(
        False, "with fp8_format: linear layers of the first and last layers stay in bf16"
    )
    num_layers_at_start_in_bf16: Whole = option(
        1, "layers at the beginning that first_last_layers_bf16 keeps in bf16"
    )
    num_layers_at_end_in_bf16: Whole = option(
        1,
        "layers at the end that first_last_layers_bf16 keeps in bf16, before those of "
        "multi-token prediction",
    )
    lora_rank: int | None = option(
        None,
        "rank of adapters (LoRA); only adapters are trained; none: no adapters, all weights "
        "are trained",
    )
    lora_alpha: Positive = option(32.0, "adapters are multiplied by this / rank")
    lora_target_modules: tuple[LoraTarget, ...] = option(
        ("all-linear",), "linear layers with adapters, by their names in PEFT; all-linear: all"
    )
    use_rslora: bool = option(
        False, "multiply adapters by lora_alpha / sqrt(rank) instead (rank-stabilised LoRA)"
    )
    use_dora: bool = option(
        False, "also train the length of each row of a weight with its adapter (DoRA)"
    )
    lora_dropout: Share = option(0.0, "dropout of the inputs of adapters, each with its own mask")
    unmodelled: tuple[str, ...] = option(
        (),
        "features of the original that are missing here; such a model can be planned, not trained",
    )
