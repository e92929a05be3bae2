"""Mixture of experts: router, routed experts and shared experts in place of an MLP.

Shapes: T tokens of this rank, H features, K experts per token, R rows dispatched to this rank's
experts, E experts of this rank, F inner features of this rank's part of an expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fivefold.config.experts import ExpertsConfig
from fivefold.config.model import ModelConfig
from fivefold.model.activation import activated
from fivefold.model.context import Context
from fivefold.model.dropout import Drops
from fivefold.model.layers import LayerBlock, Linear
from fivefold.model.mlp import MLP
from fivefold.model.moe.grouped import GroupedLinear
from fivefold.model.moe.permutation import PlacedRows, Rows, number_of_each
from fivefold.model.moe.routing import ExpertChoice, Router
from fivefold.model.norms import make_norm


class Experts(nn.Module):
    """Gated or ungated MLPs, each applied to its own rows; one parameter holds all experts.

    A row's weight is applied before the last linear layer. The result is the same, and the
    router's gradient then needs no output of an expert. Rows that were multiplied before they came
    (`moe_apply_probs_on_input`) are not multiplied again.

    Attributes:
        second: seam around the activation and the last linear layer.
        adds_bias: whether this rank adds the output bias: where ranks split each expert, only the
            first one does.
        fuses_gate: as in `model.fusions`.
    """

    gate_proj: GroupedLinear | None

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.num_experts is not None, "a model without experts"
        sizes = model.num_experts, model.expert_features, model.expert_ffn_size
        experts, hidden, inner = sizes
        gated, bias = model.gated_linear_unit, model.add_bias_linear
        self.gate_proj = GroupedLinear(experts, hidden, inner, bias) if gated else None
        self.up_proj = GroupedLinear(experts, hidden, inner, bias)
        self.down_proj = GroupedLinear(experts, inner, hidden, bias)
        self.model = model
        self.second: Second = plain_second
        self.fuses_gate = False
        self.adds_bias = True

    def forward(self, x_RH: Tensor, weights_R: Tensor, rows_E: Tensor) -> Tensor:
        """[R, H] -> [R, H], weighted.

        Args:
            x_RH: rows sorted by expert.
            weights_R: routing weight of each row.
            rows_E: int64 number of rows per expert, possibly 0.
        """
        given_R = None if self.model.moe_apply_probs_on_input else weights_R
        products = self.up_proj.multiply(x_RH, rows_E, *self.into)
        each = zip(self.into, products, strict=True)
        inner = [linear.biased(y_RF, rows_E) for linear, y_RF in each]
        return self.second(self, inner, given_R, rows_E)

    @property
    def into(self) -> tuple[GroupedLinear, ...]:
        """The linear layers that lead to the inner features."""
        return (self.up_proj,) if self.gate_proj is None else (self.gate_proj, self.up_proj)

    def activate(self, inner: Sequence[Tensor], weights_R: Tensor | None) -> Tensor:
        """Activation of [R, F] tensors, times the rows' weights, if there are any: [R, F]."""
        return activated(self.model, inner, weights_R, fused=self.fuses_gate)

    def last(self, x_RF: Tensor, weights_R: Tensor | None, rows_E: Tensor) -> Tensor:
        """The last linear layer: [R, F] -> [R, H]."""
        return self.down_proj(x_RF, rows_E, weights_R, adds_bias=self.adds_bias)


Second = Callable[[Experts, Sequence[Tensor], Tensor | None, Tensor], Tensor]
"""(experts, inner features, row weights or None, rows per expert) -> [R, H]: activation and last
linear."""


def plain_second(
    experts: Experts, inner: Sequence[Tensor], weights_R: Tensor | None, rows_E: Tensor
) -> Tensor:
    """Activation, then last linear layer; replaced when the activation is recomputed."""
    return experts.last(experts.activate(inner, weights_R), weights_R, rows_E)


class Dispatcher(Protocol):
    """Sends tokens to their experts and sums the results per token."""

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
            choice: experts of each token.
            run: computes the experts.
            beside: two callables to overlap, with the dispatch and with the combine.
        """


RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows sorted by expert, their weights, rows per expert) -> weighted results."""


Beside = Callable[[], None]
"""A computation to overlap with communication."""


def plain_dispatch(
    x_TH: Tensor, choice: ExpertChoice, run: RunExperts, beside: tuple[Beside, Beside] | None = None
) -> Tensor:
    """All experts on this rank; replaced under expert parallelism."""
    assert beside is None, "nothing travels"
    rows, rows_E = by_expert(choice)
    return rows.collect(run(rows.spread(x_TH), rows.take(choice.weights_TK), rows_E))


def by_expert(choice: ExpertChoice, kept: int | None = None) -> tuple[Rows, Tensor]:
    """The kept rows sorted by expert and then by token, and the number of rows per expert.

    Args:
        choice: chosen experts of the tokens.
        kept: number of kept rows; None: the host waits for it if rows may be dropped.
    """
    tokens, topk = choice.experts_TK.shape
    experts = choice.experts_TK
    if choice.kept_TK is not None:
        experts = experts.masked_fill(~choice.kept_TK, choice.num_experts)
    rows_E = number_of_each(experts, choice.num_experts)
    order = experts.flatten().argsort(stable=True)
    if choice.kept_TK is not None:
        order = order[: int(rows_E.sum()) if kept is None else kept]
    return Rows(order, tokens, topk), rows_E


def by_expert_padded(choice: ExpertChoice, capacity: int) -> tuple[PlacedRows, Tensor]:
    """The kept rows, padded to `capacity` rows per expert, and that number for each expert."""
    rows, rows_E = by_part_padded(choice, choice.num_experts, capacity)
    return rows, torch.full_like(rows_E, capacity)


def by_part_padded(choice: ExpertChoice, parts: int, room: int) -> tuple[PlacedRows, Tensor]:
    """The kept rows, padded to `room` rows per part, and the number of kept rows per expert.

    Within a part, rows are sorted by expert and then by token, with the padding last. Runs without
    synchronising with the device.

    Args:
        choice: chosen experts of the tokens.
        parts: number of equal parts of the experts.
        room: number of rows per part, including padding.
    """
    experts, chosen = choice.num_experts, choice.experts_TK
    if choice.kept_TK is not None:
        chosen = chosen.masked_fill(~choice.kept_TK, experts)
    sorted_R, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(len(order), device=order.device)
    bounds = torch.arange(0, experts + 1, experts // parts, device=order.device)
    first = torch.searchsorted(sorted_R, bounds)
    part_R = sorted_R // (experts // parts)
    places = torch.empty_like(order)
    taken = part_R * room + numbers - first[part_R]
    places[order] = taken.masked_fill(part_R == parts, parts * room)
    return PlacedRows(places.view(chosen.shape), parts * room), number_of_each(chosen, experts)


Call = Callable[..., Any]
"""(function, *arguments) -> the function's result."""


def plain_call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function; replaced when it is to be recomputed."""
    return function(*arguments)


class MoE(LayerBlock):
    """Mixture of experts: each token passes its routed experts and all shared experts.

    With latents (LatentMoE, NVIDIA 2025) the routed experts read a projection of the token, and the
    sum of their results is projected back. Routers and shared experts read the token itself. With
    branch norms, the input and the output of each branch pass a norm of their own.

    Attributes:
        dispatch: seam around dispatch, experts and combine.
        call_router: seam around the router.
        call_routed: seam around the routed experts.
        call_shared: seam around the shared experts.
        overlaps: whether shared experts run during dispatch and combine.
    """

    recomputed_as = "moe"
    discards_norm = frozenset({"layernorm", "a2a_overlap_post_attn"})
    compiles = False

    def __init__(self, model: ModelConfig, layer: int, settings: ExpertsConfig) -> None:
        super().__init__()
        self.router = Router(model, layer, settings)
        self.experts = Experts(model)
        hidden, latent, bias = model.hidden_size, model.moe_latent_size, model.add_bias_linear
        self.fc1_latent_proj = Linear(hidden, latent, bias) if latent else None
        self.fc2_latent_proj = Linear(latent, hidden, bias) if latent else None
        shared = model.shared_ffn_size
        self.shared_experts = MLP(model, shared) if shared else None
        gated = model.moe_shared_expert_gate
        self.shared_expert_gate = Linear(model.hidden_size, 1) if shared and gated else None
        norms = (make_norm(model) if model.moe_branch_norms else None for _ in range(4))
        self.routed_norm, self.routed_output_norm, self.shared_norm, self.shared_output_norm = norms
        self.dispatch: Dispatcher = plain_dispatch
        self.call_router: Call = plain_call
        self.call_routed: Call = plain_call
        self.call_shared: Call = plain_call
        self.overlaps = False

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """[T, H] -> [T, H]."""
        run = partial(self.call_routed, self.experts)
        choice: ExpertChoice = self.call_router(self.router, x_TH, context)
        routed_TH = _through(self.fc1_latent_proj, _through(self.routed_norm, x_TH))
        if self.experts.model.moe_apply_probs_on_input:
            routed_TH, choice = _multiplied(routed_TH, choice)
        shared = None
        if self.shared_experts is not None and self.overlaps:
            read_TH, drops = _through(self.shared_norm, x_TH), context.layer.adapters
            shared = _SharedBeside(self.shared_experts, read_TH, drops)
        beside = None if shared is None else (shared.first, shared.last)
        y_TH = _through(self.fc2_latent_proj, self.dispatch(routed_TH, choice, run, beside))
        y_TH = _through(self.routed_output_norm, y_TH)
        if self.shared_experts is None:
            return y_TH
        if shared is not None:
            shared_TH = shared.result
        else:
            run_shared, drops = self.shared_experts.run, context.layer.adapters
            shared_TH = self.call_shared(run_shared, _through(self.shared_norm, x_TH), drops)
        if self.shared_expert_gate is not None:
            shared_TH = shared_TH * self.shared_expert_gate(x_TH).sigmoid()
        return y_TH + _through(self.shared_output_norm, shared_TH)


def _through(module: Callable[[Tensor], Tensor] | None, x_TH: Tensor) -> Tensor:
    return x_TH if module is None else module(x_TH)


def _multiplied(x_TH: Tensor, choice: ExpertChoice) -> tuple[Tensor, ExpertChoice]:
    """Tokens times the weight of their one expert, in the tokens' type, as in transformers.

    This happens before they travel, so that no rank holds rows that are still to be multiplied.
    """
    weights_TK = choice.weights_TK
    return x_TH * weights_TK.to(x_TH.dtype), replace(choice, weights_TK=torch.ones_like(weights_TK))


class _SharedBeside:
    """Shared experts in two halves, one to overlap with dispatch and one with combine."""

    def __init__(self, experts: MLP, x_TH: Tensor, drops: Drops) -> None:
        self._experts, self._drops = experts, drops
        self.result = x_TH  # then the inner features, then the result

    def first(self) -> None:
        self.result = self._experts.inner(self.result, self._drops)

    def last(self) -> None:
        self.result = self._experts.outer(self.result, self._drops)
