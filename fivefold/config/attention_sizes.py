"""Sizes of attention, which may differ between layers with a window and others."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self, TypeVar

from fivefold.config.by_layer import OF_WINDOWS, ByLayer


@dataclass(frozen=True)
class AttentionSizes(ByLayer):
    """An architecture, and the sizes of its attention.

    Where sizes differ by layer, these are the sizes of layers without a window; `attention_of`
    gives the others.
    """

    def attention_of(self, local: bool) -> Self:
        """The same model with the attention of one kind of its layers in all of them.

        The only place that knows how layers differ: whoever needs a size of attention asks the
        model of the layer's kind for it.

        Args:
            local: whether the layers are those of `is_local`; else the others.
        """
        own = self.rotary_base_local is not None or self.has_local_sizes
        return _attention_of(self, local) if own else self

    def as_in(self, layer: int) -> Self:
        """`attention_of` the kind of a layer."""
        return self.attention_of(self.is_local(layer))

    @property
    def attentions(self) -> tuple[Self, ...]:
        """The model with the attention of each kind of its layers that has a softmax."""
        kinds = dict.fromkeys(map(self.is_local, self.softmax_layers))
        return tuple(map(self.attention_of, kinds)) or (self,)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    def kv_heads_of(self, ranks: int) -> int:
        """Key/value heads on each of `ranks` ranks that split the heads: one at least."""
        return max(self.num_kv_heads // ranks, 1)

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_dim(self) -> int:
        """Features of a query or key head, including rotary ones."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Features of a value head, and of a head's output."""
        if self.multi_latent_attention:
            return self.v_head_dim
        return self.v_channels or self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Features of a query or key head that RoPE rotates; proportional RoPE rotates some of them
        by 0."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        if self.rope_type == "proportional":
            return self.head_dim
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
    def value_outputs(self) -> int:
        """Features that the value projection makes; 0 if keys serve as values."""
        return 0 if self.keys_as_values else self.v_size

    @property
    def query_outputs(self) -> int:
        """Features that the query projection makes: the queries, followed in each head by its gate
        (`attention_output_gate`)."""
        return self.q_size * (1 + self.attention_output_gate)

    @property
    def attention_size(self) -> int:
        """Features of the outputs of all heads together."""
        return self.num_attention_heads * self.value_dim


Sizes = TypeVar("Sizes", bound=AttentionSizes)


@lru_cache(maxsize=64)
def _attention_of(model: Sizes, local: bool) -> Sizes:
    """Cached `AttentionSizes.attention_of`, since every layer asks."""
    sizes: dict[str, Any] = {}
    for name in OF_WINDOWS if local else ():
        size = getattr(model, name)
        if size is not None:
            sizes[name.removesuffix("_local")] = size
    if local:
        sizes["keys_as_values"] = False
    if local and model.rotary_base_local is not None:
        whole = model.rope_type == "proportional"
        sizes |= {
            "rotary_base": model.rotary_base_local,
            "rotary_percent": 1.0 if whole else model.rotary_percent,
            "rope_type": "rope",
            "use_rope_scaling": False,
            "rotary_seq_len_interpolation_factor": None,
        }
    none: dict[str, Any] = dict.fromkeys((*OF_WINDOWS, "rotary_base_local"))
    return replace(model, **sizes, **none)
