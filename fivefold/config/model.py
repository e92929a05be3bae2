"""What the model is: its architecture. The rules it must keep are in `config.model_rules`."""

from dataclasses import dataclass, field
from typing import Literal

from fivefold.config.layer_pattern import expert_layers, window_layers
from fivefold.config.parallel import option

MAX_SIZE = (1 << 31) - 1  # of any dimension: products of two are exact in 64 bits


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder-only transformer, under Megatron-LM's names.

    Lengths are in tokens, sizes in features. The defaults of the optional fields are Llama's.
    """

    num_layers: int = field(metadata={"help": "transformer layers"})
    hidden_size: int = field(metadata={"help": "features of the residual stream"})
    num_attention_heads: int = field(metadata={"help": "query heads"})
    vocab_size: int = field(metadata={"help": "entries of the vocabulary, before padding"})
    num_query_groups: int | None = option(None, "key/value heads (default: as many as query heads)")
    kv_channels: int | None = option(None, "features of a head (default: hidden size / heads)")
    ffn_hidden_size: int | None = option(
        None, "inner features of the MLP (default: 4 x hidden size)"
    )
    max_position_embeddings: int = option(4096, "longest sequence the model is made for, in tokens")
    normalization: Literal["RMSNorm", "LayerNorm"] = option("RMSNorm", "normalisation layers")
    norm_epsilon: float = option(1e-5, "added to the variance by the normalisation layers")
    position_embedding_type: Literal["rope", "learned_absolute"] = option(
        "rope", "rotary positions, or a learned table of them"
    )
    rotary_base: float = option(10000.0, "base (theta) of RoPE")
    rotary_percent: float = option(
        1.0, "share of a head's features, the first ones, that RoPE turns"
    )
    use_rope_scaling: bool = option(False, "stretch low RoPE frequencies as Llama 3.1 does")
    rope_scaling_factor: float = option(
        8.0, "how far RoPE scaling stretches the lowest frequencies"
    )
    rope_low_freq_factor: float = option(
        1.0, "wavelengths above original length / this are stretched fully"
    )
    rope_high_freq_factor: float = option(
        4.0, "wavelengths below original length / this are left alone"
    )
    rope_original_max_position_embeddings: int = option(
        8192, "sequence length before RoPE scaling, in tokens"
    )
    rope_type: Literal["rope", "yarn"] = option(
        "rope", "rotary positions as they are, or stretched to longer contexts as YaRN does"
    )
    rotary_scaling_factor: float = option(40.0, "how far YaRN stretches the lowest frequencies")
    original_max_position_embeddings: int = option(
        4096, "sequence length before YaRN stretches it, in tokens"
    )
    beta_fast: float = option(
        32.0, "frequencies of more turns than this in the original length are left alone by YaRN"
    )
    beta_slow: float = option(
        1.0, "frequencies of fewer turns than this in the original length are stretched fully"
    )
    mscale: float = option(1.0, "YaRN's factor of rotary features is 1 + 0.1 mscale ln(scaling)")
    mscale_all_dim: float = option(
        0.0, "the same of all features of MLA's scores, by which rotary ones are divided"
    )
    yarn_correction_range_round_to_int: bool = option(
        True, "let YaRN's ramp between both begin and end with whole pairs of features"
    )
    activation_func: Literal["silu", "gelu", "gelu_tanh", "quick_gelu"] = option(
        "silu", "activation of the MLP; quick_gelu is x sigmoid(1.702 x)"
    )
    gated_linear_unit: bool = option(True, "gate the MLP: activation(gate) x up")
    glu_linear_offset: float = option(
        0.0, "added to what the gate multiplies: activation(gate) x (up + this)"
    )
    activation_func_clamp_value: float | None = option(
        None, "bound of the gate from above and of up on both sides, as gpt-oss has; none: none"
    )
    add_bias_linear: bool = option(False, "give every linear layer of a block a bias")
    add_qkv_bias: bool = option(False, "give the query, key and value projections a bias")
    qk_layernorm: bool = option(
        False,
        "normalise each query and key head, as Qwen3 does (MLA's latents are normalised always)",
    )
    untie_embeddings_and_output_weights: bool = option(True, "give the output layer its own weight")
    hidden_dropout: float = option(0.0, "dropout of embeddings and of both residual branches")
    attention_dropout: float = option(0.0, "dropout of attention probabilities")
    softmax_type: Literal["vanilla", "learnable"] = option(
        "vanilla",
        "softmax of attention: over the keys alone, or with a learned sink of each head beside "
        "them, as gpt-oss has",
    )
    window_size: int | None = option(
        None, "tokens before itself that each token attends to (sliding window); none: all"
    )
    window_attn_skip_freq: str | None = option(
        None,
        "which layers have the window: all but every Nth ('2': layers 0, 2, ...), or a list such "
        "as '[1]*3+[0]*1'; none: all",
    )
    parallel_residual: bool = option(
        False, "let attention and MLP of a layer read the same hidden state, as GPT-NeoX does"
    )
    init_method_std: float = option(0.02, "standard deviation of initial weights")
    make_vocab_size_divisible_by: int = option(128, "pad the vocabulary to a multiple of this")
    num_experts: int | None = option(
        None, "experts of a mixture-of-experts layer; none: dense MLPs"
    )
    moe_router_topk: int = option(2, "experts that each token is sent to")
    moe_router_num_groups: int | None = option(
        None, "equal groups of experts, of which each token goes to a few; none: no groups"
    )
    moe_router_group_topk: int | None = option(None, "groups that each token goes to")
    moe_router_group_scores: int | None = option(
        None,
        "best experts of a group whose scores add up to the group's (default: experts of a token / "
        "groups of a token)",
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = option(
        "softmax", "what makes scores of the router's logits"
    )
    moe_router_pre_softmax: bool = option(
        False, "softmax over all experts, not over the chosen ones alone"
    )
    moe_router_topk_scaling_factor: float | None = option(
        None, "factor of the chosen experts' weights; none: 1"
    )
    moe_router_enable_expert_bias: bool = option(
        False, "balance experts by biases that only affect the choice, without a loss (DeepSeek-V3)"
    )
    moe_ffn_hidden_size: int | None = option(
        None, "inner features of an expert (default: ffn_hidden_size)"
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None, "inner features of the experts that see every token, all together"
    )
    moe_shared_expert_gate: bool = option(
        False, "weight what the shared experts add by a gate of their own, as Qwen2-MoE does"
    )
    moe_layer_freq: str = option(
        "1",
        "which layers have experts: every Nth ('1' all, '2' layers 0, 2, ...), or a list such as "
        "'[0]*3+[1]*58'",
    )
    multi_latent_attention: bool = option(
        False, "compress queries, keys and values into latents, as DeepSeek-V2 does (MLA)"
    )
    q_lora_rank: int | None = option(None, "features of MLA's query latent; none: not compressed")
    kv_lora_rank: int = option(512, "features of MLA's key/value latent")
    qk_head_dim: int = option(128, "features of an MLA query or key head without positions")
    qk_pos_emb_head_dim: int = option(64, "rotary features of an MLA query or key head")
    v_head_dim: int = option(128, "features of an MLA value head")
    mtp_num_layers: int = option(0, "layers that predict further tokens (multi-token prediction)")
    unmodelled: tuple[str, ...] = option(
        (),
        "what the original has and this description leaves out; to be planned with, not trained",
    )

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Inner features of the MLP."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the same for every layout, so that checkpoints reshard."""
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple

    @property
    def query_dim(self) -> int:
        """Features of a query or key head as they are multiplied."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Features of a value head, and of a head's output."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Features of a query or key head that RoPE turns."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.head_dim * self.rotary_percent)

    @property
    def q_size(self) -> int:
        """Features of all query heads together."""
        return self.num_attention_heads * self.query_dim

    @property
    def k_size(self) -> int:
        """Features of all key heads together."""
        return self.num_kv_heads * self.query_dim

    @property
    def v_size(self) -> int:
        """Features of all value heads together."""
        return self.num_kv_heads * self.value_dim

    @property
    def attention_size(self) -> int:
        """Features of the outputs of all heads together."""
        return self.num_attention_heads * self.value_dim

    @property
    def kv_size(self) -> int:
        """Features of all key (or value) heads together, of attention without latents."""
        return self.num_kv_heads * self.head_dim

    @property
    def expert_ffn_size(self) -> int:
        """Inner features of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def shared_ffn_size(self) -> int:
        """Inner features of the experts that see every token, all together; 0 without them."""
        return self.moe_shared_expert_intermediate_size or 0

    def window_of(self, layer: int) -> int | None:
        """Tokens before itself that a token of a layer attends to; None: all. Layers of multi-token
        prediction are like the last one."""
        if self.window_size is None or self.window_attn_skip_freq is None:
            return self.window_size
        limited = window_layers(self.window_attn_skip_freq, self.num_layers)
        return self.window_size if limited[min(layer, self.num_layers - 1)] else None

    @property
    def widest_window(self) -> int | None:
        """The window of all layers; None if any layer sees everything."""
        return None if self.window_attn_skip_freq is not None else self.window_size

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts; layers of multi-token prediction are like the last one."""
        if self.num_experts is None:
            return False
        return expert_layers(self.moe_layer_freq, self.num_layers)[min(layer, self.num_layers - 1)]

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return self.add_bias_linear or self.add_qkv_bias
