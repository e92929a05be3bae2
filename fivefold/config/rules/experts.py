"""Checks which settings of routers can be combined."""

from fivefold.config.experts import AUX_LOSSES, ExpertsConfig
from fivefold.config.model import ModelConfig
from fivefold.errors import Mistakes


def check_routing(experts: ExpertsConfig, model: ModelConfig, mistakes: Mistakes) -> None:
    """Report routing settings that conflict, or have no effect on a model with experts."""
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
            "moe_router_load_balancing_type sinkhorn assigns tokens to experts by itself: groups "
            "and biases of experts have no effect on it",
            works=["--moe-router-load-balancing-type aux_loss"],
        )
    padded = experts.moe_pad_expert_input_to_capacity
    if padded and experts.moe_expert_rank_capacity_factor is not None:
        mistakes.add(
            "moe_pad_expert_input_to_capacity pads the rows of every expert, and "
            "moe_expert_rank_capacity_factor those of every rank",
            works=[
                "--no-moe-pad-expert-input-to-capacity",
                "--moe-expert-rank-capacity-factor none",
            ],
        )
    if padded and experts.moe_expert_capacity_factor is None:
        mistakes.add(
            "moe_pad_expert_input_to_capacity needs moe_expert_capacity_factor, which says how far",
            works=[
                "--moe-expert-capacity-factor 1.0",
                "--no-moe-pad-expert-input-to-capacity",
            ],
        )


def check_branch_norms(model: ModelConfig, mistakes: Mistakes) -> None:
    """Report features that models with norms in each branch of a mixture cannot have."""
    off = "--no-moe-branch-norms"
    if not model.shared_ffn_size:
        mistakes.add(
            "moe_branch_norms normalises routed and shared experts separately, and needs "
            "moe_shared_expert_intermediate_size",
            works=[f"--moe-shared-expert-intermediate-size {model.ffn_size}", off],
        )
    if not model.norms_before:
        mistakes.add(
            "moe_branch_norms normalises what experts read, and norm_placement after has no norms "
            "before attention and MLP",
            works=["--norm-placement both", off],
        )
    has = {
        "parallel_residual": "--no-parallel-residual",
        "moe_shared_expert_gate": "--no-moe-shared-expert-gate",
        "moe_latent_size": "--moe-latent-size none",
        "moe_apply_probs_on_input": "--no-moe-apply-probs-on-input",
        "hybrid_override_pattern": "--hybrid-override-pattern none",
    }
    for name, without in has.items():
        if getattr(model, name):
            mistakes.add(f"moe_branch_norms and {name} cannot be combined", works=[without, off])
