"""Gated DeltaNet: linear attention in place of attention with a softmax (Yang et al. 2024).

Queries, keys and values pass a short causal convolution and a SiLU. Of each key head, the
projections make its query, its key, the values that share it, and their gates one after the other,
so that ranks that split key heads split all of them. Shapes: T tokens, B rows, S tokens of a row,
L >= S with those before them, G key heads of this rank, F features of one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fivefold.config.model import ModelConfig
from fivefold.model.attention.blocks import Span
from fivefold.model.context import Context
from fivefold.model.dropout import Dropout
from fivefold.model.layers import LayerBlock, Linear
from fivefold.model.leaves import local
from fivefold.model.linear_attention.chunks import DocumentChunks
from fivefold.model.linear_attention.delta_rule import Parameters, StateSizes, attend
from fivefold.model.linear_attention.gated_norm import GatedNorm
from fivefold.model.shards import MicrobatchShare


class Within(NamedTuple):
    """Which tokens a state remembers.

    Attributes:
        documents: documents of all tokens; a state begins anew in each.
        part: the tokens this rank holds, if rows are split over ranks; None if it holds all.
    """

    documents: DocumentChunks
    part: MicrobatchShare | None


class StateKernel(Protocol):
    """The convolution and the delta rule within each document."""

    def __call__(
        self,
        mixed_BLGF: Tensor,
        rates_BLGR: Tensor,
        layer: "GatedDeltaNet",
        within: Within,
        /,
    ) -> Tensor:
        """What queries read, [B, L, G, r V]; `layer` has what its heads have learned."""


def plain_states(
    mixed_BLGF: Tensor, rates_BLGR: Tensor, layer: "GatedDeltaNet", within: Within
) -> Tensor:
    """The kernel of one rank's tokens."""
    return attend(mixed_BLGF, rates_BLGR, layer.learned(), layer.sizes, within.documents)


class Convolution(nn.Module):
    """The taps of each feature's causal convolution; the last is that of the token itself."""

    def __init__(self, features: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, 1, taps))


class GatedDeltaNet(LayerBlock):
    """Projections, the kernel, a gated norm of each value head, and the output projection.

    Attributes:
        kernel: seam around the convolution and the delta rule.
        layer: index of the layer in the model.
    """

    recomputed_with_norm = "a2a_overlap_attn"

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, size = model.hidden_size, model.linear_value_size
        keys, values = model.linear_num_key_heads, model.linear_num_value_heads
        self.sizes = StateSizes(
            model.linear_key_head_dim, model.linear_value_head_dim, values // keys
        )
        self.in_proj_qkvz = Linear(hidden, model.linear_conv_size + size)
        self.in_proj_ba = Linear(hidden, 2 * values)
        self.conv1d = Convolution(model.linear_conv_size, model.linear_conv_kernel_dim)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(values)) for _ in range(2))
        self.norm = GatedNorm(self.sizes.value, model.norm_epsilon)
        self.out_proj = Linear(size, hidden)
        self.kernel: StateKernel = plain_states
        self.layer, self.site = layer, f"layers.{layer}.self_attn.states"

    def wrap_kernel(self, wrap: Callable[[Any], Any]) -> None:
        """Wrap the kernel in use, for example to exclude it from compilation."""
        self.kernel = wrap(self.kernel)

    def head_dropout(self, dropout: Dropout) -> None:
        """None: there are no probabilities to drop."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """[T, H] -> [T, H]; reads within the rows and documents of `context`."""
        drops, sizes = context.layer.adapters, self.sizes
        projected = self.project(x_TH, self.in_proj_qkvz, self.in_proj_ba, drops=drops)
        made, rates = (
            x.view(context.rows, x.shape[0] // context.rows, -1, features)
            for x, features in zip(projected, self._features, strict=True)
        )
        # Copies, so that neither keeps the other's memory alive.
        mixed, gate = (x.contiguous() for x in made.tensor_split([sizes.mixed], dim=-1))
        if context.sequence is not None:
            mixed, rates = context.sequence.join(self.site, mixed, rates)
        within = Within(context.recurrence, context.part)
        read = self.kernel(mixed, rates, self, within)[:, -gate.shape[1] :]
        normed = self.norm(*(x.unflatten(3, (sizes.shared, sizes.value)) for x in (read, gate)))
        return self.project_back(normed.flatten(2).flatten(0, 1), self.out_proj, drops)

    def learned(self, heads: Span | None = None) -> Parameters:
        """What key heads of this rank have learned beside projections; None: all of them."""
        taps, *rates = map(local, (self.conv1d.weight, self.A_log, self.dt_bias))
        every = Parameters(taps.flatten(1), *rates)
        if heads is None:
            return every
        sizes = self.sizes.mixed, self.sizes.shared, self.sizes.shared
        spans = (slice(heads[0] * size, heads[1] * size) for size in sizes)
        return Parameters(*(x[span] for x, span in zip(every, spans, strict=True)))

    @property
    def _features(self) -> tuple[int, int]:
        """What both projections make of each key head."""
        sizes = self.sizes
        return sizes.mixed + sizes.shared * sizes.value, 2 * sizes.shared
