"""Mamba-2: a state space in place of attention (Dao and Gu 2024), as Nemotron-H has it.

Of each group, the projections make the x of its heads, their B, their C, and the gates of the heads
one after the other; x, B and C pass a short causal convolution and a SiLU.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.config.model import ModelConfig
from fivefold.model.layers import Linear
from fivefold.model.linear_attention.gated_norm import GateThenNorm
from fivefold.model.linear_attention.recurrence import attend
from fivefold.model.linear_attention.state_layer import Convolution, StateLayer
from fivefold.model.linear_attention.state_space import STATE_SPACE


class Mamba(StateLayer):
    """Projections, the state space, a norm of each group's gated heads, and a projection back."""

    states = partial(attend, STATE_SPACE)

    def __init__(self, model: ModelConfig, layer: int) -> None:
        hidden, sizes = model.hidden_size, model.states
        super().__init__(sizes, 1, layer)
        self.in_proj_xbcz = Linear(hidden, sizes.mixed + sizes.size)
        self.in_proj_dt = Linear(hidden, sizes.heads)
        self.conv1d = Convolution(sizes.mixed, sizes.taps, bias=True)
        self.A_log, self.dt_bias, self.D = (
            nn.Parameter(torch.empty(sizes.heads)) for _ in range(3)
        )
        self.norm = GateThenNorm(sizes.size, model.norm_epsilon)
        self.out_proj = Linear(sizes.size, hidden)

    @property
    def projections(self) -> tuple[Linear, Linear]:
        """See `StateLayer`."""
        return self.in_proj_xbcz, self.in_proj_dt

    @property
    def by_head(self) -> Sequence[Tensor]:
        """For each head: the logarithm of its decay rate, the bias of its steps, and the factor of
        x that it adds."""
        return self.A_log, self.dt_bias, self.D
