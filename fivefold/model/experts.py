"""A mixture of experts in the place of an MLP: router, routed experts, and shared ones.

Shapes: T tokens of this rank, H features, K experts of a token, R rows that reach this rank's
experts, E of its experts, F inner features of this rank's part of an expert.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from fivefold.config.experts import ExpertsConfig
from fivefold.config.model import ModelConfig
from fivefold.model.activation import activated
from fivefold.model.context import Context
from fivefold.model.grouped import GroupedLinear
from fivefold.model.layers import LayerBlock, Linear
from fivefold.model.mlp import MLP
from fivefold.model.permutation import PlacedRows, Rows
from fivefold.model.routing import ExpertChoice, Router


class Experts(nn.Module):
    """Gated or plain MLPs, each on its own rows. All experts of a layer are one parameter.

    The weight of a row is applied before the last linear layer, which gives the same result, so
    that the router's gradient needs no output of an expert.

    Attributes:
        second: seam around the activation and the last linear layer.
        adds_bias: whether the bias of the results is added here: where ranks split every expert,
            only the first one adds it.
    """

    gate_proj: GroupedLinear | None

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.num_experts is not None, "a model without experts"
        sizes = model.num_experts, model.hidden_size, model.expert_ffn_size
        experts, hidden, inner = sizes
        gated, bias = model.gated_linear_unit, model.add_bias_linear
        self.gate_proj = GroupedLinear(experts, hidden, inner, bias) if gated else None
        self.up_proj = GroupedLinear(experts, hidden, inner, bias)
        self.down_proj = GroupedLinear(experts, inner, hidden, bias)
        self.model = model
        self.second: Second = plain_second
        self.adds_bias = True

    def forward(self, x_RH: Tensor, weights_R: Tensor, rows_E: Tensor) -> Tensor:
        """[R, H] -> [R, H], weighted.

        Args:
            x_RH: rows sorted by expert.
            weights_R: weights of their results.
            rows_E: int64, how many rows each expert has; some may have none.
        """
        inner = [linear(x_RH, rows_E) for linear in self.into]
        return self.second(self, inner, weights_R, rows_E)

    @property
    def into(self) -> tuple[GroupedLinear, ...]:
        """The linear layers into the inner features."""
        return (self.up_proj,) if self.gate_proj is None else (self.gate_proj, self.up_proj)

    def activate(self, inner: Sequence[Tensor], weights_R: Tensor) -> Tensor:
        """Weighted activation of [R, F] each: [R, F]."""
        return activated(self.model, inner, weights_R)

    def last(self, x_RF: Tensor, weights_R: Tensor, rows_E: Tensor) -> Tensor:
        """[R, F] -> [R, H]."""
        return self.down_proj(x_RF, rows_E, weights_R, adds_bias=self.adds_bias)


Second = Callable[[Experts, Sequence[Tensor], Tensor, Tensor], Tensor]
"""The activation of inner features and the last linear layer, with the rows' weights."""


def plain_second(
    experts: Experts, inner: Sequence[Tensor], weights_R: Tensor, rows_E: Tensor
) -> Tensor:
    """One after the other: the seam of an activation that is made again."""
    return experts.last(experts.activate(inner, weights_R), weights_R, rows_E)


class Dispatcher(Protocol):
    """Brings tokens to the experts that they chose, and sums the results at home."""

    def __call__(
        self,
        x_TH: Tensor,
        choice: ExpertChoice,
        run: "RunExperts",
        beside: "tuple[Beside, Beside] | None" = None,
        /,
    ) -> Tensor:
        """[T, H] -> [T, H].

        Args:
            x_TH: tokens.
            choice: their experts.
            run: the experts.
            beside: what to run while rows travel there, and while results travel back.
        """


RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows sorted by expert, their weights and the rows of each expert -> weighted results."""


Beside = Callable[[], None]
"""Something to compute while messages are under way."""


def plain_dispatch(
    x_TH: Tensor,
    choice: ExpertChoice,
    run: RunExperts,
    beside: tuple[Beside, Beside] | None = None,
) -> Tensor:
    """All experts are here: the seam of experts on other ranks."""
    assert beside is None, "nothing travels"
    rows, rows_E = by_expert(choice)
    return rows.collect(run(rows.spread(x_TH), rows.take(choice.weights_TK), rows_E))


def by_expert(choice: ExpertChoice) -> tuple[Rows, Tensor]:
    """The rows that are kept, sorted by expert and then by token, and how many each expert has."""
    tokens, topk = choice.experts_TK.shape
    experts = choice.experts_TK
    if choice.kept_TK is not None:
        experts = experts.masked_fill(~choice.kept_TK, choice.num_experts)
    rows_E = torch.bincount(experts.flatten(), minlength=choice.num_experts)[: choice.num_experts]
    order = experts.flatten().argsort(stable=True)
    if choice.kept_TK is not None:
        order = order[: int(rows_E.sum())]
    return Rows(order, tokens, topk), rows_E


def by_expert_padded(choice: ExpertChoice, capacity: int) -> tuple[PlacedRows, Tensor]:
    """The rows that are kept in `capacity` places of each expert, and that number for each.

    Nothing waits for the device.
    """
    experts, chosen = choice.num_experts, choice.experts_TK
    if choice.kept_TK is not None:
        chosen = chosen.masked_fill(~choice.kept_TK, experts)
    sorted_R, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(len(order), device=order.device)
    first_E = torch.searchsorted(sorted_R, torch.arange(experts + 1, device=order.device))
    places = torch.empty_like(order)
    taken = sorted_R * capacity + numbers - first_E[sorted_R]
    places[order] = taken.masked_fill(sorted_R == experts, experts * capacity)
    rows = PlacedRows(places.view(chosen.shape), experts * capacity)
    return rows, torch.full_like(first_E[:-1], capacity)


Call = Callable[..., Tensor]
"""A function and its arguments -> its result."""


def plain_call(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """The call itself: the seam of what is run again."""
    return function(*arguments)


class MoE(LayerBlock):
    """Each token through a few of many experts, and through those that see every token.

    Attributes:
        dispatch: seam around the way to the experts and back.
        call_routed: seam around the routed experts.
        call_shared: seam around the shared ones.
        overlaps: whether the shared experts run while rows are under way.
    """

    recomputed_as = "moe"
    compiles = False

    def __init__(
        self, model: ModelConfig, layer: int, settings: ExpertsConfig, global_batch_size: int
    ) -> None:
        super().__init__()
        self.router = Router(model, layer, settings, global_batch_size)
        self.experts = Experts(model)
        shared = model.shared_ffn_size
        self.shared_experts = MLP(model, shared) if shared else None
        gated = model.moe_shared_expert_gate
        self.shared_expert_gate = Linear(model.hidden_size, 1) if shared and gated else None
        self.dispatch: Dispatcher = plain_dispatch
        self.call_routed: Call = plain_call
        self.call_shared: Call = plain_call
        self.overlaps = False

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """[T, H] -> [T, H]."""
        run = partial(self.call_routed, self.experts)
        choice = self.router(x_TH, context)
        if self.shared_experts is None:
            return self.dispatch(x_TH, choice, run)
        if self.overlaps:
            shared = _SharedBeside(self.shared_experts, x_TH)
            y_TH = self.dispatch(x_TH, choice, run, (shared.first, shared.last))
            shared_TH = shared.result
        else:
            y_TH = self.dispatch(x_TH, choice, run)
            shared_TH = self.call_shared(self.shared_experts, x_TH)
        if self.shared_expert_gate is not None:
            shared_TH = shared_TH * self.shared_expert_gate(x_TH).sigmoid()
        return y_TH + shared_TH


class _SharedBeside:
    """Shared experts in two halves: into their inner features, and out of them."""

    def __init__(self, experts: MLP, x_TH: Tensor) -> None:
        self._experts = experts
        self.result = x_TH  # then the inner features, then the result

    def first(self) -> None:
        self.result = self._experts.inner(self.result)

    def last(self) -> None:
        self.result = self._experts.outer(self.result)
