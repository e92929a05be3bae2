"""The model's architecture: its settings, and what follows from them. `config.rules.model` checks
them."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

from fivefold.config.attention_sizes import AttentionSizes
from fivefold.config.lora import OF_ADAPTERS, LoraTarget

MAX_SIZE = (1 << 31) - 1  # of any dimension, so that products of two fit into 64 bits

INITIAL = ("init_method_std", "embedding_init_method_std")
"""Settings of initial weights alone."""
MAMBA_TAPS = 4
"""Tokens over which the convolution of Mamba-2 reaches, in Megatron-LM always."""


class IndexerShape(NamedTuple):
    """Sizes of dsa's indexer.

    Attributes:
        heads: its heads, which share a key.
        dim: features of a query head, and of the key.
        topk: tokens that are chosen for each.
    """

    heads: int
    dim: int
    topk: int

    @property
    def size(self) -> int:
        """Features of all query heads together."""
        return self.heads * self.dim


class StateShape(NamedTuple):
    """Sizes of layers that keep a state: linear attention, or Mamba-2.

    Attributes:
        groups: key heads, or groups of Mamba-2 or of a short convolution's features: what ranks
            split, with all heads that share it.
        heads: value heads, of which equally many share a key head; those of Mamba-2.
        key: features of a query or key, or of a B or C of Mamba-2; none of a short convolution.
        value: features of a head.
        taps: tokens over which the convolution reaches.
    """

    groups: int
    heads: int
    key: int
    value: int
    taps: int

    @property
    def size(self) -> int:
        """Features of all heads together."""
        return self.heads * self.value

    @property
    def mixed(self) -> int:
        """Features that the convolution runs over: queries, keys and values; or x, B and C; or
        x."""
        return 2 * self.groups * self.key + self.size


class _KeepsHash:
    """Room for a hash that is no setting, and that no other process gets: texts differ there."""

    __slots__ = ("_hash",)
    _hash: int

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


@dataclass(frozen=True)
class ModelConfig(_KeepsHash, AttentionSizes):
    """The architecture of a decoder-only transformer, and what follows from its settings."""

    def __hash__(self) -> int:
        """Of every setting, computed once: tens of thousands of things are looked up by models,
        which often differ in one setting alone."""
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash(tuple(vars(self).values())))
            return self._hash

    @property
    def norms_before(self) -> bool:
        """Whether attention and MLP read a normalised state."""
        return self.norm_placement != "after"

    @property
    def norms_after(self) -> bool:
        """Whether the results of attention and MLP are normalised before they join the residual
        stream."""
        return self.norm_placement != "before"

    @property
    def norms_together(self) -> bool:
        """Whether all query heads of a token, and all key heads, are normalised together."""
        return self.qk_layernorm and self.qk_layernorm_type == "all_heads"

    @property
    def ffn_size(self) -> int:
        """Inner features of the MLP."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    def spelt_out(self) -> "ModelConfig":
        """The same model with the sizes that follow from others filled in."""
        latent, experts = self.multi_latent_attention, self.num_experts is not None
        hybrid = self.hybrid_override_pattern is not None
        return replace(
            self,
            num_query_groups=None if latent else self.num_kv_heads,
            kv_channels=None if latent else self.head_dim,
            v_channels=None if latent else self.value_dim,
            ffn_hidden_size=self.ffn_size,
            moe_ffn_hidden_size=self.expert_ffn_size if experts else None,
            mamba_num_heads=self.states.heads if hybrid else None,
        )

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained, rather than adapters beside frozen weights."""
        return self.lora_rank is None

    @property
    def drops(self) -> bool:
        """Whether training drops anything."""
        rates = self.hidden_dropout, self.embedded_dropout, self.attention_dropout
        return max(*rates, self.lora_dropout) > 0

    @property
    def embedded_dropout(self) -> float:
        """Dropout of embeddings."""
        own = self.embedding_dropout
        return self.hidden_dropout if own is None else own

    @property
    def base(self) -> "ModelConfig":
        """The same model without adapters."""
        defaults: dict[str, Any] = {name: getattr(ModelConfig, name) for name in OF_ADAPTERS}
        return replace(self, lora_rank=None, **defaults)

    @property
    def without_predictions(self) -> "ModelConfig":
        """The same model without multi-token prediction."""
        off: dict[str, Any] = {"mtp_hybrid_override_pattern": None, "mtp_use_repeated_layer": False}
        return replace(self, mtp_num_layers=0, **off)

    @property
    def lora_scale(self) -> float:
        """Factor of the adapters' results."""
        assert self.lora_rank is not None, "a model without adapters"
        return self.lora_alpha / (self.lora_rank**0.5 if self.use_rslora else self.lora_rank)

    def adapts(self, linear: str) -> bool:
        """Whether linear layers of a name ("q_proj") have adapters; routers and heads never do."""
        chosen = self.lora_target_modules
        every = "all-linear" in chosen and linear in get_args(LoraTarget)
        return self.lora_rank is not None and (every or linear in chosen)

    def keeps_made(self, linear: str) -> bool:
        """Whether linear layers of this name save their results, to be scaled (DoRA)."""
        return self.use_dora and self.adapts(linear)

    def reads_shared(self, linear: str) -> bool:
        """Whether the adapter of linear layers of this name reads a tensor that others save
        anyway."""
        return self.adapts(linear) and not self.lora_dropout

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding; the same for every layout, so that checkpoints can be
        resharded."""
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple

    @property
    def latent_epsilon(self) -> float:
        """Number that norms of MLA's latents add to the variance."""
        return self.latent_norm_epsilon or self.norm_epsilon

    @property
    def states(self) -> StateShape:
        """Sizes of layers with linear attention, with Mamba-2, or with short convolutions, whose
        features are in as many groups as attention has heads."""
        if self.hybrid_override_pattern is not None:
            heads = self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim
            sizes = self.mamba_num_groups, heads, self.mamba_state_dim, self.mamba_head_dim
            return StateShape(*sizes, MAMBA_TAPS)
        if self.experimental_attention_variant == "short_convolution":
            groups = self.num_attention_heads
            size = self.hidden_size // groups
            return StateShape(groups, groups, 0, size, self.linear_conv_kernel_dim)
        heads, value = self.linear_num_value_heads, self.linear_value_head_dim
        sizes = self.linear_num_key_heads, heads, self.linear_key_head_dim, value
        return StateShape(*sizes, self.linear_conv_kernel_dim)

    @property
    def indexer(self) -> IndexerShape:
        """Sizes of dsa's indexer."""
        heads, dim = self.dsa_indexer_n_heads, self.dsa_indexer_head_dim
        topk = self.dsa_indexer_topk
        assert heads is not None and dim is not None and topk is not None, "a model without dsa"
        return IndexerShape(heads, dim, topk)

    @property
    def trains_indexer(self) -> bool:
        """Whether dsa's indexer has a loss."""
        return self.is_sparse and bool(self.dsa_indexer_loss_coeff)

    @property
    def expert_ffn_size(self) -> int:
        """Inner features of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def expert_features(self) -> int:
        """Features that experts read and produce, as do rows on their way to and from them."""
        return self.moe_latent_size or self.hidden_size

    @property
    def weighs_chosen(self) -> bool:
        """Whether expert weights are a softmax over the chosen experts' logits only."""
        return self.moe_router_score_function == "softmax" and not self.moe_router_pre_softmax

    @property
    def keeps_shared(self) -> bool:
        """Whether a gate or a norm saves the output of the shared experts."""
        return self.moe_shared_expert_gate or self.moe_branch_norms

    @property
    def shared_ffn_size(self) -> int:
        """Inner features of all shared experts together; 0 without them."""
        return self.moe_shared_expert_intermediate_size or 0

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def position_rows(self) -> int:
        """Rows of the table of learned positions."""
        return self.position_embedding_offset + self.max_position_embeddings

    @property
    def output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.add_bias_linear or self.attention_out_bias

    @property
    def inner_bias(self) -> bool:
        """Whether the linear layers of MLPs have a bias."""
        return self.add_bias_linear or self.mlp_bias
