"""How the layers of a model differ."""

from dataclasses import dataclass
from functools import lru_cache

from fivefold.config.architecture import Architecture
from fivefold.config.layer_pattern import Mixer, layers_of, letters, mixers
from fivefold.config.reach import Reach

OF_CONVOLUTIONS = ("linear_attention_freq", "linear_conv_kernel_dim")
"""Settings that say something of layers with linear attention or short convolutions only."""
OF_DELTA_NET = (
    *("linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
"""Settings that say something of layers with linear attention only."""
OF_LINEAR_ATTENTION = (*OF_CONVOLUTIONS, *OF_DELTA_NET)
"""Settings of linear attention."""
LINEAR_VARIANTS = "gated_delta_net", "kimi_delta_attention"
"""Values of experimental_attention_variant with which there is some."""
OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Settings that say something of latent attention only, and that Megatron-LM has, too."""
OF_INDEXER = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
"""Settings of the indexer of DeepSeek Sparse Attention (dsa)."""
OF_ITS_LOSS = ("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss")
"""Settings that say how it is trained."""
OF_MAMBA = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")
"""Settings that say something of layers with Mamba-2 only."""
OF_WINDOWS = ("num_query_groups_local", "kv_channels_local", "softmax_type_local")
"""Settings of attention in layers with a window; without `_local` they are of other layers."""
IN_BF16 = (
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
)
"""Settings of layers that keep bf16 where others multiply in 8 or 4 bits."""


@dataclass(frozen=True)
class ByLayer(Architecture):
    """An architecture, with what each of its layers has."""

    def _at(self, layer: int, name: str, pattern: str) -> bool:
        """The value of a setting for a layer; prediction layers are like the last layer."""
        return layers_of(name, pattern, self.num_layers)[min(layer, self.num_layers - 1)]

    def mixer_of(self, layer: int) -> Mixer | None:
        """The one mixer of a layer; None: it has attention and an MLP."""
        if self.hybrid_override_pattern is None:
            return None
        further = self.mtp_hybrid_override_pattern
        if further and layer >= self.num_layers:
            which = (layer - self.num_layers) % len(further)
            return letters("mtp_hybrid_override_pattern", further)[which]
        return mixers(self.hybrid_override_pattern, self.num_layers)[
            min(layer, self.num_layers - 1)
        ]

    @property
    def mixers_used(self) -> str:
        """The letters of all layers of a hybrid model, those of a prediction depth once."""
        return (self.hybrid_override_pattern or "") + (self.mtp_hybrid_override_pattern or "")

    @property
    def prediction_size(self) -> int:
        """Layers of one prediction depth: one for each letter of its pattern, else one."""
        return len(self.mtp_hybrid_override_pattern or "*")

    @property
    def prediction_layers(self) -> range:
        """The layers of all multi-token predictions, numbered after the model's own layers."""
        first = self.num_layers
        return range(first, first + self.mtp_num_layers * self.prediction_size)

    @property
    def num_all_layers(self) -> int:
        """Layers of the model and of all multi-token predictions."""
        return self.num_layers + len(self.prediction_layers)

    @property
    def prediction_sets(self) -> int:
        """Sets of prediction weights: one per depth, or one that all depths share."""
        return min(self.mtp_num_layers, 1) if self.mtp_use_repeated_layer else self.mtp_num_layers

    def layers_like(self, layer: int) -> range:
        """The layers that share this one's weights, itself included: those of other depths, if all
        depths share them."""
        behind = layer >= self.num_layers and self.mtp_use_repeated_layer
        end = self.prediction_layers.stop if behind else layer + 1
        return range(layer, end, self.prediction_size)

    def starts_prediction(self, layer: int) -> bool:
        """Whether a layer is the first one of a prediction depth."""
        behind = layer - self.num_layers
        return behind >= 0 and behind % self.prediction_size == 0

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has linear attention, a short convolution or Mamba-2: a state, and no
        softmax."""
        if self.hybrid_override_pattern is not None:
            return self.mixer_of(layer) == "M"
        freq = self.linear_attention_freq
        return freq is not None and self._at(layer, "linear_attention_freq", freq)

    def is_softmax(self, layer: int) -> bool:
        """Whether a layer has attention with a softmax."""
        return self.mixer_of(layer) in (None, "*") and not self.is_linear(layer)

    @property
    def has_linear_layers(self) -> bool:
        """Whether layers have linear attention, short convolutions or Mamba-2."""
        convolves = self.experimental_attention_variant == "short_convolution"
        hybrid = self.hybrid_override_pattern is not None
        return self.has_linear_attention or convolves or hybrid

    @property
    def has_linear_attention(self) -> bool:
        """Whether layers have linear attention, of one kind or another."""
        return self.experimental_attention_variant in LINEAR_VARIANTS

    @property
    def fades_features(self) -> bool:
        """Whether states of linear attention forget each feature at its own rate."""
        return self.experimental_attention_variant == "kimi_delta_attention"

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        """The layers whose attention has a softmax, without prediction layers."""
        return _softmax_layers(self)

    @property
    def is_sparse(self) -> bool:
        """Whether attention sees only the tokens that an indexer chooses (dsa)."""
        return self.experimental_attention_variant == "dsa"

    def window_of(self, layer: int) -> int | None:
        """Number of earlier tokens that a token of a layer attends to; None: all."""
        if self.window_size is None or self.window_attn_skip_freq is None:
            return self.window_size
        limited = self._at(layer, "window_attn_skip_freq", self.window_attn_skip_freq)
        return self.window_size if limited else None

    @property
    def has_local_sizes(self) -> bool:
        """Whether attention has other weights in layers with a window than in others."""
        return self.keys_as_values or any(getattr(self, name) is not None for name in OF_WINDOWS)

    def is_local(self, layer: int) -> bool:
        """Whether a layer has a window and, for that, attention sizes or RoPE of its own."""
        own = self.rotary_base_local is not None or self.has_local_sizes
        return own and self.window_of(layer) is not None

    def reach_of(self, layer: int) -> Reach:
        """How far back the tokens of a layer attend."""
        chunk = self.attention_chunk_size if self.rotates(layer) else None
        return Reach(self.window_of(layer), chunk)

    def rotates(self, layer: int) -> bool:
        """Whether RoPE turns queries and keys of a layer."""
        if self.position_embedding_type != "rope" or not self.is_softmax(layer):
            return False
        freq = self.no_rope_freq
        return freq is None or not self._at(layer, "no_rope_freq", freq)

    def tempers(self, layer: int) -> bool:
        """Whether a layer multiplies queries by factors that depend on their positions."""
        if not self.is_softmax(layer):
            return False
        return self.attn_temperature_tuning and (
            self.rotates(layer) == self.attn_temperature_rotated
        )

    @property
    def rotated_share(self) -> float:
        """Share of the layers with a softmax in which RoPE turns queries and keys."""
        layers = self.softmax_layers
        return sum(map(self.rotates, layers)) / max(len(layers), 1)

    @property
    def widest_window(self) -> int | None:
        """The window if every layer has it; None if any layer attends to everything."""
        return None if self.window_attn_skip_freq is not None else self.window_size

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        if self.hybrid_override_pattern is not None:
            return self.mixer_of(layer) == "E"
        has = self.num_experts is not None
        return has and self._at(layer, "moe_layer_freq", self.moe_layer_freq)

    def is_wide(self, layer: int) -> bool:
        """Whether the linear layers of a layer stay in bf16 while others multiply in 8 bits: those
        of the first and last layers, if asked for. As in Megatron-LM, prediction layers do not stay
        in bf16."""
        if not self.first_last_layers_bf16:
            return False
        at_end = self.num_layers - self.num_layers_at_end_in_bf16 <= layer < self.num_layers
        return layer < self.num_layers_at_start_in_bf16 or at_end

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has an MLP instead of experts; `ffn_hidden_size` is its width."""
        if self.hybrid_override_pattern is not None:
            return "-" in self.mixers_used
        return not all(map(self.is_moe, range(self.num_layers)))


@lru_cache(maxsize=64)
def _softmax_layers(model: ByLayer) -> tuple[int, ...]:
    """Cached `ByLayer.softmax_layers`: a search asks often, about few models."""
    return tuple(filter(model.is_softmax, range(model.num_layers)))
