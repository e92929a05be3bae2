"""What the model is: its architecture and the rules it must keep by itself."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args, get_origin, get_type_hints

from fivefold.config.layer_pattern import MAX_LAYERS, expert_layers
from fivefold.config.parallel import option
from fivefold.errors import Mistakes, did_you_mean

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
    activation_func: Literal["silu", "gelu", "gelu_tanh"] = option("silu", "activation of the MLP")
    gated_linear_unit: bool = option(True, "gate the MLP: activation(gate) x up")
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

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts; layers of multi-token prediction are like the last one."""
        if self.num_experts is None:
            return False
        return expert_layers(self.moe_layer_freq, self.num_layers)[min(layer, self.num_layers - 1)]

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return self.add_bias_linear or self.add_qkv_bias


_POSITIVE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "max_position_embeddings",
    "norm_epsilon",
    "rotary_base",
    "rope_scaling_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_max_position_embeddings",
    "window_size",
    "init_method_std",
    "make_vocab_size_divisible_by",
)
_AT_MOST = {
    name: MAX_LAYERS if name in ("num_layers", "mtp_num_layers") else MAX_SIZE
    for name, kind in get_type_hints(ModelConfig).items()
    if kind in (int, int | None)
}
_OF_EXPERTS = (
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_group_scores",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_layer_freq",
)
_OF_LATENTS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)
_CHOICES = {
    name: get_args(kind)
    for name, kind in get_type_hints(ModelConfig).items()
    if get_origin(kind) is Literal
}


def check_model(model: ModelConfig, mistakes: Mistakes) -> None:
    """Add everything that is wrong with the architecture by itself to `mistakes`."""
    not_positive = [
        name for name in _POSITIVE if (value := getattr(model, name)) is not None and not value > 0
    ]
    for name in not_positive:
        mistakes.add(f"{name} must be positive, not {getattr(model, name)}")
    too_large = [
        (name, most) for name, most in _AT_MOST.items() if (getattr(model, name) or 0) > most
    ]
    for name, most in too_large:
        mistakes.add(f"{name} must be at most {most}, not {getattr(model, name)}")
    if too_large:
        return
    for name, choices in _CHOICES.items():
        value = getattr(model, name)
        if value not in choices:
            mistakes.add(f"unknown {name} {value!r}{did_you_mean(value, choices)}", works=choices)
    for name in ("hidden_dropout", "attention_dropout"):
        value = getattr(model, name)
        if not 0.0 <= value < 1.0:
            mistakes.add(f"{name} must be in [0, 1), not {value}")
    if not not_positive:
        _check_heads(model, mistakes)
        _check_experts(model, mistakes)
    _check_latents(model, mistakes)
    if model.use_rope_scaling and model.rope_high_freq_factor <= model.rope_low_freq_factor:
        mistakes.add(
            "rope_high_freq_factor must be larger than rope_low_freq_factor",
            f"{model.rope_high_freq_factor} <= {model.rope_low_freq_factor}",
        )
    if model.use_rope_scaling and model.position_embedding_type != "rope":
        mistakes.add("use_rope_scaling needs position_embedding_type rope")


def _check_heads(model: ModelConfig, mistakes: Mistakes) -> None:
    heads, groups, hidden = model.num_attention_heads, model.num_kv_heads, model.hidden_size
    if model.kv_channels is None and hidden % heads and not model.multi_latent_attention:
        mistakes.add(
            f"hidden_size {hidden} cannot be split over {heads} heads",
            f"{hidden} / {heads} = {hidden / heads:.2f} (must be whole, or set kv_channels)",
            works=[f"--num-attention-heads {n}" for n in _near_divisors(hidden, heads)],
        )
    if heads % groups:
        mistakes.add(
            f"{heads} query heads cannot share {groups} key/value heads",
            f"{heads} / {groups} = {heads / groups:.2f} (must be whole)",
            works=[f"--num-query-groups {n}" for n in _near_divisors(heads, groups)],
        )
    turned = model.qk_pos_emb_head_dim if model.multi_latent_attention else model.head_dim
    if model.position_embedding_type == "rope" and turned % 2:
        mistakes.add(f"RoPE turns pairs of features, and head size {turned} is odd")


def _check_experts(model: ModelConfig, mistakes: Mistakes) -> None:
    if model.num_experts is None:
        _check_unused(model, _OF_EXPERTS, "--num-experts", "--num-experts 8", mistakes)
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
    with mistakes.collecting():
        if not any(expert_layers(model.moe_layer_freq, model.num_layers)):
            mistakes.add(
                f"moe_layer_freq {model.moe_layer_freq!r} gives none of the layers experts",
                works=("--moe-layer-freq 1", "--num-experts none"),
            )


def _check_latents(model: ModelConfig, mistakes: Mistakes) -> None:
    if not model.multi_latent_attention:
        flag = "--multi-latent-attention"
        _check_unused(model, _OF_LATENTS, flag, flag, mistakes)
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
    if model.position_embedding_type != "rope":
        mistakes.add("multi_latent_attention needs position_embedding_type rope")


def _check_groups(model: ModelConfig, experts: int, mistakes: Mistakes) -> None:
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None and chosen is None:
        return
    if groups is None or chosen is None:
        mistakes.add(
            f"moe_router_num_groups is {groups} and moe_router_group_topk is {chosen}",
            "a router that chooses among groups needs both",
        )
    elif experts % groups or chosen > groups:
        mistakes.add(
            f"{experts} experts in {groups} groups, of which {chosen} are chosen",
            f"{experts} / {groups} = {experts / groups:.2f} must be whole",
            f"{chosen} must be at most {groups}",
            works=[f"--moe-router-num-groups {n}" for n in _near_divisors(experts, groups)],
        )
    elif model.moe_router_topk > chosen * experts // groups:
        held = chosen * experts // groups
        mistakes.add(
            f"moe_router_topk {model.moe_router_topk} exceeds the experts of {chosen} groups",
            f"{chosen} x {experts} / {groups} = {held}",
            works=[f"--moe-router-topk {held}"],
        )
    elif not 1 <= (model.moe_router_group_scores or 1) <= experts // groups:
        mistakes.add(
            f"moe_router_group_scores {model.moe_router_group_scores} exceeds the experts of a "
            f"group, {experts} / {groups} = {experts // groups}",
            works=[f"--moe-router-group-scores {experts // groups}"],
        )


def _check_unused(
    model: ModelConfig, names: tuple[str, ...], needs: str, add: str, mistakes: Mistakes
) -> None:
    """Settings that say something about a part that the model does not have: `add` gives it."""
    for name in names:
        default, value = getattr(ModelConfig, name), getattr(model, name)
        if value != default:
            shown = "none" if default is None else default
            flag = f"--{name.replace('_', '-')}"
            mistakes.add(f"{name} = {value} needs {needs}", works=[add, f"{flag} {shown}"])


def _near_divisors(n: int, wanted: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    divisors = {*small, *(n // d for d in small)}
    return sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:3])
