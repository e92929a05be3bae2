"""Layers that keep a state: projections, a kernel, a gated norm, and a projection back.

Of each group of heads, the projections make what the convolution mixes and gates one after the
other, so that ranks that split groups split all of them. Shapes: T tokens, B rows, S tokens of a
row, L >= S with those before them, G groups of this rank, F features of one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fivefold.config.model import StateShape
from fivefold.model.attention.blocks import Span
from fivefold.model.context import Context
from fivefold.model.dropout import Dropout
from fivefold.model.layers import LayerBlock, Linear
from fivefold.model.leaves import local
from fivefold.model.linear_attention.chunks import DocumentChunks
from fivefold.model.linear_attention.recurrence import StateGroup
from fivefold.model.shards import MicrobatchShare


class StateScope(NamedTuple):
    """Which tokens a state remembers.

    Attributes:
        documents: documents of all tokens; a state begins anew in each.
        part: the tokens this rank holds, if rows are split over ranks; None if it holds all.
    """

    documents: DocumentChunks
    part: MicrobatchShare | None


class States(Protocol):
    """How states learn, forget and answer within each document."""

    def __call__(
        self,
        mixed_BLGF: Tensor,
        rates_BLGR: Tensor,
        learned: Sequence[Tensor],
        group: StateGroup,
        of: DocumentChunks,
        /,
    ) -> Tensor:
        """What they answer, [B, L, G, r V]; `learned` are `StateLayer.learned`."""


class StateKernel(Protocol):
    """The convolution and the states within each document."""

    def __call__(
        self, mixed_BLGF: Tensor, rates_BLGR: Tensor, layer: "StateLayer", within: StateScope, /
    ) -> Tensor:
        """What states answer, [B, L, G, r V]; `layer` has what its heads have learned."""


def plain_states(
    mixed_BLGF: Tensor, rates_BLGR: Tensor, layer: "StateLayer", within: StateScope
) -> Tensor:
    """The kernel of one rank's tokens."""
    learned = layer.learned()
    return layer.states(mixed_BLGF, rates_BLGR, learned, layer.group, within.documents)


class Convolution(nn.Module):
    """The taps of each feature's causal convolution; the last is that of the token itself."""

    bias: nn.Parameter | None

    def __init__(self, features: int, taps: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, 1, taps))
        self.bias = nn.Parameter(torch.empty(features)) if bias else None


class StateLayer(LayerBlock):
    """Base of layers with linear attention, Mamba-2 or short convolutions; holds the convolution,
    the norm and the projections.

    Attributes:
        kernel: seam around the convolution and the states.
        layer: index of the layer in the model.
        states: how they learn, forget and answer.
    """

    recomputed_with_norm = "a2a_overlap_attn"
    states: States
    conv1d: Convolution
    out_proj: Linear
    norm: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, sizes: StateShape, rates: int, layer: int) -> None:
        super().__init__()
        self.group, self.rates = StateGroup.of(sizes), rates
        self.kernel: StateKernel = plain_states
        self.layer, self.site = layer, f"layers.{layer}.self_attn.states"

    @property
    def projections(self) -> tuple[Linear, Linear]:
        """The projection to what is mixed and the gates after it; and the projection to the
        rates."""
        raise NotImplementedError

    @property
    def by_head(self) -> Sequence[Tensor]:
        """Learned numbers for each head besides projections and norms."""
        raise NotImplementedError

    def wrap_kernel(self, wrap: Callable[[Any], Any]) -> None:
        """Wrap the kernel in use, for example to exclude it from compilation."""
        self.kernel = wrap(self.kernel)

    def head_dropout(self, dropout: Dropout) -> None:
        """None: there are no probabilities to drop."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """[T, H] -> [T, H]; reads within the rows and documents of `context`."""
        mixed, rates, gate = self.kernel_inputs(x_TH, context)
        if context.sequence is not None:
            mixed, rates = context.sequence.join(self.site, mixed, rates)
        within = StateScope(context.recurrence, context.part)
        read = self.kernel(mixed, rates, self, within)[:, -gate.shape[1] :]
        normed_TF = self.norm(read, gate).flatten(2).flatten(0, 1)
        return self.project_back(normed_TF, self.out_proj, context.layer.adapters)

    def kernel_inputs(self, x_TH: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """What is mixed, rates, and gates of what is read, [B, S, G, ...] each."""
        group, drops = self.group, context.layer.adapters
        projected = self.project(x_TH, *self.projections, drops=drops)
        features = group.mixed + group.shared * group.value, self.rates * group.shared
        made, rates = (
            x.view(context.rows, x.shape[0] // context.rows, -1, size)
            for x, size in zip(projected, features, strict=True)
        )
        # Copies, so that neither keeps the other's memory alive.
        mixed, gate = (x.contiguous() for x in made.tensor_split([group.mixed], dim=-1))
        return mixed, rates, gate

    def learned(self, groups: Span | None = None) -> tuple[Tensor, ...]:
        """Learned numbers of this rank's groups besides projections; None: those of all groups."""
        mixed = [local(self.conv1d.weight).flatten(1)]
        if self.conv1d.bias is not None:
            mixed.append(local(self.conv1d.bias))
        every = *mixed, *map(local, self.by_head)
        if groups is None:
            return every
        held, (first, last) = len(mixed[0]) // self.group.mixed, groups
        return tuple(x[first * len(x) // held : last * len(x) // held] for x in every)
