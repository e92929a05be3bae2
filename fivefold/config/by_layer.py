"""What differs between the layers of a model."""

from collections.abc import Callable
from dataclasses import dataclass

from fivefold.config.architecture import Architecture
from fivefold.config.layer_pattern import (
    expert_layers,
    linear_layers,
    unrotated_layers,
    window_layers,
)
from fivefold.config.reach import Reach

OF_LINEAR_ATTENTION = (
    *("linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
)
"""Settings that say something of layers with linear attention only."""


@dataclass(frozen=True)
class ByLayer(Architecture):
    """An architecture, and which of its layers have what."""

    def _at(
        self, layer: int, layers_of: Callable[[str, int], tuple[bool, ...]], pattern: str
    ) -> bool:
        """What a pattern says of a layer; those of further predictions are like the last one."""
        return layers_of(pattern, self.num_layers)[min(layer, self.num_layers - 1)]

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has linear attention, in place of attention with a softmax."""
        freq = self.linear_attention_freq
        return freq is not None and self._at(layer, linear_layers, freq)

    @property
    def has_linear_layers(self) -> bool:
        """Whether layers have linear attention."""
        return self.experimental_attention_variant is not None

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        """The layers whose attention has a softmax, without those of further predictions."""
        return tuple(n for n in range(self.num_layers) if not self.is_linear(n))

    def window_of(self, layer: int) -> int | None:
        """How many tokens before itself a token of a layer attends to; None: all."""
        if self.window_size is None or self.window_attn_skip_freq is None:
            return self.window_size
        limited = self._at(layer, window_layers, self.window_attn_skip_freq)
        return self.window_size if limited else None

    def reach_of(self, layer: int) -> Reach:
        """How far back the tokens of a layer attend."""
        chunk = self.attention_chunk_size if self.rotates(layer) else None
        return Reach(self.window_of(layer), chunk)

    def rotates(self, layer: int) -> bool:
        """Whether RoPE turns queries and keys of a layer."""
        if self.is_linear(layer):
            return False
        if self.no_rope_freq is None:
            return self.position_embedding_type == "rope"
        return not self._at(layer, unrotated_layers, self.no_rope_freq)

    def tempers(self, layer: int) -> bool:
        """Whether a layer multiplies queries by factors of their positions."""
        if self.is_linear(layer):
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
        has = self.num_experts is not None
        return has and self._at(layer, expert_layers, self.moe_layer_freq)

    @property
    def has_dense_layers(self) -> bool:
        """Whether a layer has an MLP in place of experts: `ffn_hidden_size` is its width."""
        return not all(map(self.is_moe, range(self.num_layers)))
