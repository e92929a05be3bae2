"""Megatron-LM's flags for experts, and the settings of experts that it lacks."""

from collections.abc import Iterator

from fivefold.config.model import ModelConfig
from fivefold.layout import Layout
from fivefold.tell.export.megatron_pipeline import why_not_hidden
from fivefold.tell.export.settings import Settings, flag, flags, set_flag


def expert_flags(said: Settings) -> Iterator[str]:
    """Flags of the layers with experts, their routers and their losses."""
    yield from flags(said, "num_experts", "moe_router_topk", "moe_ffn_hidden_size")
    yield from flags(said, "moe_latent_size")
    yield from flags(said, "moe_router_num_groups", "moe_router_group_topk")
    yield from flags(said, "moe_shared_expert_intermediate_size", "moe_layer_freq")
    yield from flags(said, "moe_router_score_function", "moe_router_pre_softmax")
    yield from flags(said, "moe_router_topk_scaling_factor", "moe_shared_expert_gate")
    yield from flags(said, "moe_router_enable_expert_bias", "moe_apply_probs_on_input")
    if said["moe_router_enable_expert_bias"]:
        yield from flags(said, "moe_router_bias_update_rate")
    yield from flags(said, "moe_router_load_balancing_type")
    kinds, factors = said["moe_router_load_balancing_type"], said["moe_aux_loss_coeff"]
    if kinds != ("none",):  # it wants as many coefficients as losses
        yield from set_flag("moe_aux_loss_coeff", factors * (len(kinds) // len(factors)))
    yield from flags(said, "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_router_dtype")
    yield from flags(said, "moe_router_force_load_balancing")
    if said["moe_expert_capacity_factor"] is not None:
        yield from flags(said, "moe_expert_capacity_factor", "moe_token_drop_policy")
        yield from flags(said, "moe_pad_expert_input_to_capacity")
    yield "--moe-grouped-gemm"


def dispatcher_flags(said: Settings, layout: Layout, runs: Layout) -> Iterator[str]:
    """Flags for expert parallelism and token dispatch."""
    yield from flags(said, "expert_model_parallel_size", "expert_tensor_parallel_size")
    yield from flags(said, "moe_token_dispatcher_type")
    hides = said["overlap_moe_expert_parallel_comm"] and not why_not_hidden(layout, runs)
    shared = said["moe_shared_expert_overlap"] and not _why_shared_waits(layout, runs)
    yield from set_flag("moe_shared_expert_overlap", shared)
    yield from set_flag("overlap_moe_expert_parallel_comm", hides)
    yield from set_flag("delay_wgrad_compute", hides and said["delay_wgrad_compute"])
    if layout.config.parallel.moe_token_dispatcher_type == "flex":
        yield from flag("moe-flex-dispatcher-backend", "deepep")
    if said["moe_enable_deepep"]:
        yield from flags(said, "moe_enable_deepep", "moe_deepep_num_sms")


def lost_of_experts(said: Settings, layout: Layout, runs: Layout) -> Iterator[str]:
    """Sentences on settings of experts that Megatron-LM refuses, or implements differently."""
    model, parallel, experts = layout.config.model, layout.config.parallel, layout.config.experts
    if model.add_bias_linear and layout.grid.etp > 1:
        yield "it refuses experts with add_bias_linear where expert_tensor_parallel_size > 1"
    if said["moe_router_group_scores"] is not None:
        yield (
            "it scores a group by its best experts, as many as go to each group on average, not by "
            f"moe_router_group_scores = {model.moe_router_group_scores}"
        )
    softmax = model.moe_router_score_function == "softmax"
    if model.moe_router_enable_expert_bias and softmax:
        yield "it refuses moe_router_enable_expert_bias without sigmoid scores"
    sinkhorn = experts.moe_router_load_balancing_type == ("sinkhorn",)
    if model.moe_router_topk == 1 and softmax and not model.moe_router_pre_softmax and not sinkhorn:
        yield "it refuses moe_router_topk = 1 without moe_router_pre_softmax"
    if sinkhorn:
        yield from _lost_of_sinkhorn(said, model)
    if sinkhorn and experts.moe_expert_capacity_factor is not None:
        yield "it refuses moe_expert_capacity_factor with moe_router_load_balancing_type sinkhorn"
    if parallel.moe_shared_expert_overlap and (why := _why_shared_waits(layout, runs)):
        yield f"moe_shared_expert_overlap was left out: {why}"
    if parallel.overlap_moe_expert_parallel_comm and (why := why_not_hidden(layout, runs)):
        yield f"overlap_moe_expert_parallel_comm was left out: {why}"
    if (factor := said["moe_expert_rank_capacity_factor"]) is not None:
        yield (
            f"moe_expert_rank_capacity_factor = {factor:g} needs a release after 0.16 and its "
            "HybridEP kernels, and there repeats a step without a limit instead of dropping rows"
        )


def _lost_of_sinkhorn(said: Settings, model: ModelConfig) -> Iterator[str]:
    """Settings that Megatron-LM's router ignores with Sinkhorn."""
    ours = said["moe_router_score_function"], said["moe_router_pre_softmax"]
    alone = said["moe_router_topk"] == 1
    if ours != (("sigmoid", False) if alone else ("softmax", True)):
        its = "the sigmoid of the chosen one" if alone else "the softmax over all experts"
        yield (
            f"with sinkhorn it weighs results by {its}, whatever moe_router_score_function and "
            "moe_router_pre_softmax say"
        )
    if (factor := model.moe_router_topk_scaling_factor) is not None:
        yield f"with sinkhorn it leaves moe_router_topk_scaling_factor = {factor:g} out"


def auxiliary(said: Settings, layout: Layout) -> list[str]:
    """The coefficients of the auxiliary losses that the layers have."""
    if not layout.config.model.num_experts:
        return []
    balances = ["moe_aux_loss_coeff"] if layout.config.experts.aux_losses else []
    return [*balances, *(["moe_z_loss_coeff"] if said["moe_z_loss_coeff"] else [])]


def _why_shared_waits(layout: Layout, runs: Layout) -> str | None:
    """Why Megatron-LM cannot compute shared experts during dispatch; None if it can."""
    parallel = layout.config.parallel
    if parallel.moe_token_dispatcher_type != "alltoall":
        return "it needs moe_token_dispatcher_type alltoall"
    if parallel.overlap_moe_expert_parallel_comm and not why_not_hidden(layout, runs):
        return "overlap_moe_expert_parallel_comm hides the same messages"
    return None
