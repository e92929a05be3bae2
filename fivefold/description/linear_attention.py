"""The operations of layers with linear attention (Gated DeltaNet), and their costs."""

from dataclasses import dataclass, field
from math import ceil

from fivefold.config.model import ModelConfig
from fivefold.description.operations import ColumnLinear, Kept, Operation, RowLinear
from fivefold.description.running import Running
from fivefold.description.weights import Weight, column, row

CHUNK = 64
"""Most tokens of a chunk, within which the delta rule is solved at once."""
_AGAIN = ("a2a_overlap_attn",)


@dataclass(frozen=True, kw_only=True)
class DeltaRule(Operation):
    """The convolution over queries, keys and values, and the gated delta rule.

    Attributes:
        model: gives the heads and their features.
    """

    model: ModelConfig = field(repr=False)

    @property
    def flops(self) -> int:
        """FLOPs of the forward of one token, as Megatron-LM counts them: four products of each
        value head's state with a key, a value or a query, and the taps of the convolution."""
        model = self.model
        state = model.linear_value_size * model.linear_key_head_dim
        return 2 * (4 * state + model.linear_conv_kernel_dim * model.linear_conv_size)

    @property
    def read_features(self) -> int:
        """Features per token of what it reads, over all ranks: queries, keys, values, rates."""
        return self.model.linear_conv_size + 2 * self.model.linear_num_value_heads

    def working(self, running: Running) -> float:
        """Most bytes per token of its backward, which makes all again that lies between: in the
        walk through chunks, before it, or in the convolution.

        Numbers are tensors that are alive at once, as autograd keeps them, with their gradients:
        of the size of a key for each key head, of one for each value head, and so on.
        """
        model, tp = self.model, running.tensor_parallel
        keys, values = model.linear_num_key_heads / tp, model.linear_num_value_heads / tp
        of_keys, of_each = keys * model.linear_key_head_dim, values * model.linear_key_head_dim
        of_values = values * model.linear_value_head_dim
        walk = 7 * of_keys + 7 * of_each + 8 * of_values + (5 * values + 2 * keys) * CHUNK
        before = 9 * of_keys + 4 * of_each + 8 * of_values + (7 * values + 2 * keys) * CHUNK
        taps = model.linear_conv_kernel_dim * (2 * of_keys + of_values)
        ends = 9 * of_keys + of_each + 8 * of_values, 14 * of_keys + of_each + 6 * of_values
        filled = ceil(running.seq_length / CHUNK) * CHUNK / running.seq_length
        most = max(filled * walk, filled * before, *(taps + end for end in ends))
        return max(running.element_bytes, 4) * most

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """What it reads, of which the backward makes all else again."""
        model = self.model
        sizes = model.linear_conv_size, 2 * model.linear_num_value_heads
        tensors = tuple(map(running.by_heads, sizes))
        return (Kept(self.name, tensors, _AGAIN, "core_attn"),)


@dataclass(frozen=True, kw_only=True)
class GatedHeads(Operation):
    """Heads times their gates: normalised heads of linear attention, or attention's output.

    Attributes:
        features: features of all heads.
    """

    features: int

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """Heads and gates."""
        return (Kept(self.name, (running.by_heads(self.features),) * 2, _AGAIN),)


def linear_attention(model: ModelConfig, remade_by: tuple[str, ...]) -> tuple[Operation, ...]:
    """Linear attention without the norms and the sum around it.

    `remade_by`: recomputed modules that make its input again.
    """
    h, heads, size = model.hidden_size, model.linear_num_value_heads, model.linear_value_size
    mixed = model.linear_conv_size
    projections = (
        *column("self_attn.in_proj_qkvz", h, mixed + size, False),
        *column("self_attn.in_proj_ba", h, 2 * heads, False),
    )
    of_heads = (
        Weight("self_attn.conv1d.weight", (mixed, 1, model.linear_conv_kernel_dim), split=0),
        Weight("self_attn.A_log", (heads,), split=0),
        Weight("self_attn.dt_bias", (heads,), split=0),
    )
    norm = Weight("self_attn.norm.weight", (model.linear_value_head_dim,), sees="heads")
    return (
        ColumnLinear(
            "linear_qkv",
            projections,
            _AGAIN,
            inputs=h,
            outputs=mixed + size + 2 * heads,
            remade_by=remade_by,
        ),
        DeltaRule("delta_rule", of_heads, _AGAIN, model=model),
        GatedHeads("gated_norm", (norm,), _AGAIN, features=size),
        RowLinear(
            "attn_proj",
            row("self_attn.out_proj", size, h, False),
            inputs=size,
            outputs=h,
            remade_by=_AGAIN,
        ),
    )
