"""Gated DeltaNet: linear attention in place of attention with a softmax (Yang et al. 2024).

Queries, keys and values pass a short causal convolution and a SiLU. Of each key head, the
projections make its query, its key, the values that share it, and their gates one after the other.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.config.model import ModelConfig
from fivefold.model.layers import Linear
from fivefold.model.linear_attention.delta_rule import DELTA_RULE
from fivefold.model.linear_attention.gated_norm import NormThenGate
from fivefold.model.linear_attention.recurrence import attend
from fivefold.model.linear_attention.state_layer import Convolution, StateLayer


class GatedDeltaNet(StateLayer):
    """Projections, the delta rule, a gated norm of each value head, and the output projection."""

    states = partial(attend, DELTA_RULE)

    def __init__(self, model: ModelConfig, layer: int) -> None:
        hidden, sizes = model.hidden_size, model.states
        super().__init__(sizes, 2, layer)
        self.in_proj_qkvz = Linear(hidden, sizes.mixed + sizes.size)
        self.in_proj_ba = Linear(hidden, 2 * sizes.heads)
        self.conv1d = Convolution(sizes.mixed, sizes.taps)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(sizes.heads)) for _ in range(2))
        self.norm = NormThenGate(sizes.value, model.norm_epsilon)
        self.out_proj = Linear(sizes.size, hidden)

    @property
    def projections(self) -> tuple[Linear, Linear]:
        """See `StateLayer`."""
        return self.in_proj_qkvz, self.in_proj_ba

    @property
    def by_head(self) -> Sequence[Tensor]:
        """For each head: the logarithm of its decay rate, and the bias of its step."""
        return self.A_log, self.dt_bias
