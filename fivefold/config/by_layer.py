"""What differs between the layers of a model."""

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
"""Settings that say what dsa's indexer is."""
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
    """An architecture, and which of its layers have what."""

    def _at(self, layer: int, name: str, pattern: str) -> bool:
        """What the value of a setting says of a layer; those of further predictions are like the
        last one."""
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
        """The letters of all layers of a hybrid model, those of a further prediction once."""
        return (self.hybrid_override_pattern or "") + (self.mtp_hybrid_override_pattern or "")

    @property
    def prediction_size(self) -> int:
        """Layers of one further prediction: a letter of its pattern each, else one."""
        return len(self.mtp_hybrid_override_pattern or "*")

    @property
    def prediction_layers(self) -> range:
        """The layers of all further predictions, whose numbers follow those of the model's."""
        first = self.num_layers
        return range(first, first + self.mtp_num_layers * self.prediction_size)

    @property
    def num_all_layers(self) -> int:
        """Layers of the model and of all further predictions."""
        return self.num_layers + len(self.prediction_layers)

    @property
    def prediction_sets(self) -> int:
        """Sets of weights of further predictions: one each, or one of all."""
        return min(self.mtp_num_layers, 1) if self.mtp_use_repeated_layer else self.mtp_num_layers

    def layers_like(self, layer: int) -> range:
        """The layers with the weights of this one, the first of them, itself included: those of
        other predictions, if all have the same."""
        behind = layer >= self.num_layers and self.mtp_use_repeated_layer
        end = self.prediction_layers.stop if behind else layer + 1
        return range(layer, end, self.prediction_size)

    def starts_prediction(self, layer: int) -> bool:
        """Whether a layer is the first one of a further prediction."""
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
        """Whether states of linear attention forget each feature at a rate of its own."""
        return self.experimental_attention_variant == "kimi_delta_attention"

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        """The layers whose attention has a softmax, without those of further predictions."""
        return _softmax_layers(self)

    @property
    def is_sparse(self) -> bool:
        """Whether attention is to the tokens that an indexer chooses (dsa)."""
        return self.experimental_attention_variant == "dsa"

    def window_of(self, layer: int) -> int | None:
        """How many tokens before itself a token of a layer attends to; None: all."""
        if self.window_size is None or self.window_attn_skip_freq is None:
            return self.window_size
        limited = self._at(layer, "window_attn_skip_freq", self.window_attn_skip_freq)
        return self.window_size if limited else None

    @property
    def has_local_sizes(self) -> bool:
        """Whether attention has other weights in layers with a window than in others."""
        return self.keys_as_values or any(getattr(self, name) is not None for name in OF_WINDOWS)

    def is_local(self, layer: int) -> bool:
        """Whether a layer has a window, and attention of its own for that: sizes, or RoPE."""
        own = self.rotary_base_local is not None or self.has_local_sizes
        return own and self.window_of(layer) is not None

    def reach_of(self, layer: int) -> Reach:
        """How far back the tokens of a layer attend."""
        chunk = self.attention_chunk_size if self.rotates(layer) else None
        return Reach(self.window_of(layer), chunk)

    def rotates(self, layer: int) -> bool:
        """Whether RoPE turns queries and keys of a layer."""
        if not self.is_softmax(layer):
            return False
        if self.no_rope_freq is None:
            return self.position_embedding_type == "rope"
        return not self._at(layer, "no_rope_freq", self.no_rope_freq)

    def tempers(self, layer: int) -> bool:
        """Whether a layer multiplies queries by factors of their positions."""
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
        """Whether linear layers of a layer keep bf16 where those of others have 8 bits: of the
        first and last ones, if that is asked for. Megatron-LM has further predictions in 8 bits."""
        if not self.first_last_layers_bf16:
            return False
        at_end = self.num_layers - self.num_layers_at_end_in_bf16 <= layer < self.num_layers
        return layer < self.num_layers_at_start_in_bf16 or at_end

    @property
    def has_dense_layers(self) -> bool:
        """Whether a layer has an MLP in place of experts: `ffn_hidden_size` is its width."""
        if self.hybrid_override_pattern is not None:
            return "-" in self.mixers_used
        return not all(map(self.is_moe, range(self.num_layers)))


@lru_cache(maxsize=64)
def _softmax_layers(model: ByLayer) -> tuple[int, ...]:
    """As `ByLayer.softmax_layers` has them: a search asks often, and of few models."""
    return tuple(filter(model.is_softmax, range(model.num_layers)))
