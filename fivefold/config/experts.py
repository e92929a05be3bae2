"""How experts are trained: balance, limits and numbers of the router, under Megatron-LM's names."""

from dataclasses import dataclass
from typing import Literal

from fivefold.config.model import ModelConfig
from fivefold.config.parallel import option
from fivefold.errors import Mistakes

LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"]
AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True)
class ExpertsConfig:
    """Routing of tokens to experts while a model trains."""

    moe_router_load_balancing_type: tuple[LoadBalancing, ...] = option(
        ("none",),
        "what spreads tokens over experts: losses over a microbatch, each sequence, or the global "
        "batch so far, or Sinkhorn's assignment; several losses add up",
    )
    moe_aux_loss_coeff: tuple[float, ...] = option(
        (0.0,), "factor of the balancing losses: one for all, or one for each"
    )
    moe_z_loss_coeff: float | None = option(
        None,
        "factor of the squared log-sum-exp of the router's logits (z-loss); none: 0",
    )
    moe_router_bias_update_rate: float = option(
        1e-3, "how far a step moves an expert's bias towards an even load"
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = option(
        None,
        "type in which the router multiplies; none: the compute type; scores have fp32 at least",
    )
    moe_input_jitter_eps: float | None = option(
        None, "multiply the router's input by random factors in 1 +- this; none: leave it"
    )
    moe_router_force_load_balancing: bool = option(
        False, "send tokens to experts in turn, whatever the router says: for benchmarks only"
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "rows that an expert takes from a rank at most, over their even share; the rest are "
        "dropped; none: no limit",
    )
    moe_token_drop_policy: Literal["probs", "position"] = option(
        "probs", "which rows an expert keeps: those of the highest scores, or the first ones"
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False, "let every rank send every expert exactly its capacity, padded with zeros"
    )

    def capacity(self, tokens: int, model: ModelConfig) -> int | None:
        """Rows that an expert takes at most from a rank with so many tokens; None: all."""
        factor, experts = self.moe_expert_capacity_factor, model.num_experts
        if factor is None or experts is None:
            return None
        return -int(-tokens * model.moe_router_topk * factor // experts)

    @property
    def aux_losses(self) -> tuple[tuple[str, float], ...]:
        """The balancing losses that have an effect, with their factors."""
        kinds, factors = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if len(factors) == 1:
            factors *= len(kinds)
        pairs = zip(kinds, factors, strict=False)
        return tuple((kind, factor) for kind, factor in pairs if kind in AUX_LOSSES and factor)


def check_routing(experts: ExpertsConfig, model: ModelConfig, mistakes: Mistakes) -> None:
    """Add what contradicts itself, or has no effect on a model with experts."""
    kinds, factors = experts.moe_router_load_balancing_type, experts.moe_aux_loss_coeff
    alone = [kind for kind in kinds if kind not in AUX_LOSSES]
    if (len(kinds) > 1 and alone) or len(set(kinds)) < len(kinds):
        mistakes.add(
            f"moe_router_load_balancing_type {' '.join(kinds)}: only different losses add up",
            works=[f"--moe-router-load-balancing-type {kind}" for kind in dict.fromkeys(kinds)],
        )
    if len(factors) not in (1, len(kinds)):
        mistakes.add(
            f"{len(factors)} moe_aux_loss_coeff for {len(kinds)} balancing losses",
            "one for all is needed, or one for each",
            works=[f"--moe-aux-loss-coeff {factors[0]}"] if factors else [],
        )
    if any(factor < 0 for factor in factors):
        mistakes.add(f"moe_aux_loss_coeff must not be negative: {factors}")
    if "sinkhorn" in kinds and (model.moe_router_num_groups or model.moe_router_enable_expert_bias):
        mistakes.add(
            "sinkhorn assigns tokens by itself: groups of experts and biases have no effect on it",
            works=["--moe-router-load-balancing-type aux_loss"],
        )
    if experts.moe_pad_expert_input_to_capacity and experts.moe_expert_capacity_factor is None:
        mistakes.add(
            "moe_pad_expert_input_to_capacity needs moe_expert_capacity_factor, which says how far",
            works=[
                "--moe-expert-capacity-factor 1.0",
                "--no-moe-pad-expert-input-to-capacity",
            ],
        )
