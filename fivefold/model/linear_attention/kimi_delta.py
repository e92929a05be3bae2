"""Kimi Delta Attention: linear attention whose states forget each feature by itself (Kimi Team,
"Kimi Linear", 2025).

As Gated DeltaNet, of as many values as keys, but what tokens say of decays, and their gates, come
through narrow projections that every rank holds whole: as many features as a value has.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.config.model import ModelConfig
from fivefold.model.context import Context
from fivefold.model.layers import Linear
from fivefold.model.linear_attention.gated_norm import NormThenGate
from fivefold.model.linear_attention.kimi_delta_rule import KIMI_DELTA_RULE
from fivefold.model.linear_attention.recurrence import attend
from fivefold.model.linear_attention.state_layer import Convolution, StateLayer


class KimiDeltaAttention(StateLayer):
    """Projections, its delta rule, a gated norm of each head, and the output projection."""

    states = partial(attend, KIMI_DELTA_RULE)

    def __init__(self, model: ModelConfig, layer: int) -> None:
        hidden, sizes = model.hidden_size, model.states
        super().__init__(sizes, 1 + sizes.key, layer)
        self.in_proj_qkv = Linear(hidden, sizes.mixed)
        self.b_proj = Linear(hidden, sizes.heads)
        self.f_a_proj, self.g_a_proj = (Linear(hidden, sizes.value) for _ in range(2))
        self.f_b_proj = Linear(sizes.value, sizes.heads * sizes.key)
        self.g_b_proj = Linear(sizes.value, sizes.size)
        self.conv1d = Convolution(sizes.mixed, sizes.taps)
        self.A_log = nn.Parameter(torch.empty(sizes.heads))
        self.dt_bias = nn.Parameter(torch.empty(sizes.heads * sizes.key))
        self.norm = NormThenGate(sizes.value, model.norm_epsilon, bare=True)
        self.out_proj = Linear(sizes.size, hidden)

    @property
    def by_head(self) -> Sequence[Tensor]:
        """For each head: the logarithm of its decay rate, and the bias of each feature's step."""
        return self.A_log, self.dt_bias

    def kernel_inputs(self, x_TH: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """See `StateLayer`."""
        drops = context.layer.adapters
        mixed, learn = self.project(x_TH, self.in_proj_qkv, self.b_proj, drops=drops)
        of_decays, of_gates = self.project_whole(x_TH, self.f_a_proj, self.g_a_proj, drops=drops)
        (decays,), (gate,) = (
            self.project(low, linear, drops=drops)
            for low, linear in ((of_decays, self.f_b_proj), (of_gates, self.g_b_proj))
        )
        heads = learn.shape[1]
        mixed, learn, decays, gate = (
            context.by_rows(x, heads) for x in (mixed, learn, decays, gate)
        )
        return mixed, torch.cat((learn, decays), dim=-1), gate
