"""Training settings of experts: balancing, capacity and router numerics (Megatron-LM's names)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fivefold.config.model import ModelConfig
from fivefold.config.settings import Allowed, NonNegative, Positive, option

LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"]
Jitter = Annotated[float, Allowed(lambda v: 0 < v < 1, "between 0 and 1")]
AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True)
class ExpertsConfig:
    """How tokens are routed to experts in training."""

    moe_router_load_balancing_type: tuple[LoadBalancing, ...] = option(
        ("none",),
        "load balancing of experts: by a loss over each microbatch (aux_loss), each sequence, "
        "or the global batch so far, or by Sinkhorn assignment; several losses add up",
    )
    moe_aux_loss_coeff: tuple[float, ...] = option(
        (0.0,), "coefficient of the balancing losses: one for all, or one for each"
    )
    moe_z_loss_coeff: NonNegative | None = option(
        None,
        "coefficient of the router's z-loss (squared log-sum-exp of its logits); none: no z-loss",
    )
    moe_router_bias_update_rate: NonNegative = option(
        1e-3, "amount by which an expert's bias changes per step, towards an even load"
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = option(
        None,
        "dtype of the router's matrix product; none: the compute dtype; scores are at least fp32",
    )
    moe_input_jitter_eps: Jitter | None = option(
        None, "multiply the router's input by random factors in 1 +- this; none: no jitter"
    )
    moe_router_force_load_balancing: bool = option(
        False, "send tokens to experts in turn and ignore the router: for benchmarks only"
    )
    moe_expert_capacity_factor: Positive | None = option(
        None,
        "rows that an expert accepts from a rank, as a multiple of an even share; the rest are "
        "dropped; none: no limit",
    )
    moe_expert_rank_capacity_factor: Positive | None = option(
        None,
        "rows that the experts of a rank together accept from a rank, as a multiple of an even "
        "share; the rest are dropped, and fewer are padded with zeros; none: no limit",
    )
    moe_token_drop_policy: Literal["probs", "position"] = option(
        "probs",
        "rows that an expert or a rank keeps: those with the highest weights, or the first ones",
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False, "pad the rows that every rank sends to every expert to exactly its capacity"
    )

    @property
    def limits_rows(self) -> bool:
        """Whether rows may be dropped."""
        factors = self.moe_expert_capacity_factor, self.moe_expert_rank_capacity_factor
        return any(factor is not None for factor in factors)

    def capacity(self, tokens: int, model: ModelConfig) -> int | None:
        """Rows that an expert accepts from a rank with `tokens` tokens; None: no limit."""
        factor, experts = self.moe_expert_capacity_factor, model.num_experts
        if factor is None or experts is None:
            return None
        return -int(-tokens * model.moe_router_topk * factor // experts)

    def rank_capacity(self, tokens: int, model: ModelConfig, ranks: int) -> int | None:
        """Rows that a rank with `tokens` tokens sends to each of `ranks` expert-parallel ranks.

        Includes padding; None: the number is not fixed.
        """
        factor = self.moe_expert_rank_capacity_factor
        if factor is None or model.num_experts is None:
            return None
        most = tokens * min(model.moe_router_topk, model.num_experts // ranks)
        return min(most, -int(-tokens * model.moe_router_topk * factor // ranks))

    def limits(self, tokens: int, model: ModelConfig, ranks: int) -> list[tuple[int, int]]:
        """Limits of what a rank sends: (rows, number of adjacent experts that share this limit).

        The limits apply in this order.

        Args:
            tokens: number of tokens of the sending rank.
            model: model with experts.
            ranks: number of ranks that hold the experts, equally many each.
        """
        each, of_rank = self.capacity(tokens, model), self.rank_capacity(tokens, model, ranks)
        pairs = (each, 1), (of_rank, (model.num_experts or 1) // ranks)
        return [(room, experts) for room, experts in pairs if room is not None]

    def fixed_share(self, model: ModelConfig, ranks: int) -> float | None:
        """Rows that each of `ranks` expert-parallel ranks gets, as a multiple of an even share.

        Includes padding; None: the number is not fixed.
        """
        factor, topk = self.moe_expert_rank_capacity_factor, model.moe_router_topk
        if factor is not None:
            return min(factor, ranks * min(topk, (model.num_experts or 1) // ranks) / topk)
        pads = self.moe_pad_expert_input_to_capacity
        return self.moe_expert_capacity_factor if pads else None

    @property
    def aux_losses(self) -> tuple[tuple[str, float], ...]:
        """The (kind, coefficient) of each balancing loss that has an effect."""
        kinds, factors = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if len(factors) == 1:
            factors *= len(kinds)
        pairs = zip(kinds, factors, strict=False)
        return tuple((kind, factor) for kind, factor in pairs if kind in AUX_LOSSES and factor)
