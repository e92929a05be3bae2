"""Validation of router and dispatcher settings for training; torch-free."""

from fivefold.config.config import Config
from fivefold.config.settings import flag_of
from fivefold.errors import Mistakes
from fivefold.expert.deepep_rules import check_deepep_settings


def check_routers(config: Config, mistakes: Mistakes) -> None:
    """Report router settings that cannot be trained, or whose training would have no effect."""
    model, experts, parallel = config.model, config.experts, config.parallel
    check_deepep_settings(config, mistakes)
    if model.num_experts is None:
        return
    trained = model.lora_rank is None  # routers have no adapters
    if model.moe_router_topk == 1 and model.weighs_chosen and trained:
        mistakes.add(
            "the softmax over the only chosen expert of a token is always 1, so the router learns "
            "nothing from the loss",
            works=["--moe-router-pre-softmax", "--moe-router-topk 2"],
        )
    kinds = experts.moe_router_load_balancing_type
    whole = {
        "moe_router_load_balancing_type": kinds != ("none",),
        "moe_z_loss_coeff": bool(experts.moe_z_loss_coeff),
        "moe_expert_capacity_factor": experts.moe_expert_capacity_factor is not None,
        "moe_expert_rank_capacity_factor": experts.moe_expert_rank_capacity_factor is not None,
    }
    slices = parallel.num_sequence_slices
    for name in [name for name, used in whole.items() if used and slices > 1]:
        mistakes.add(
            f"{name} needs whole microbatches, and num_sequence_slices {slices} cuts them",
            works=["--num-sequence-slices 1", f"{flag_of(name)} none"],
        )
    if "global_aux_loss" in kinds and parallel.pipeline_schedule == "dualpipe":
        mistakes.add(
            "global_aux_loss counts the microbatches that all ranks have run so far, and the two "
            "copies of the model in dualpipe run different ones",
            works=["--moe-router-load-balancing-type aux_loss", "--pipeline-schedule dualpipe_v"],
        )
    if parallel.moe_shared_expert_overlap:
        _check_shared(config, mistakes)
    if experts.moe_pad_expert_input_to_capacity and parallel.moe_token_dispatcher_type == "flex":
        mistakes.add(
            "moe_pad_expert_input_to_capacity pads the rows of each expert, but flex sends one row "
            "for each rank",
            works=["--moe-token-dispatcher-type alltoall", "--no-moe-pad-expert-input-to-capacity"],
        )
    limits_ranks = experts.moe_expert_rank_capacity_factor is not None
    if limits_ranks and parallel.moe_token_dispatcher_type == "allgather":
        mistakes.add(
            "allgather sends every token to every rank, and moe_expert_rank_capacity_factor limits "
            "what a rank gets",
            works=[
                "--moe-token-dispatcher-type alltoall",
                "--moe-expert-rank-capacity-factor none",
            ],
        )


def _check_shared(config: Config, mistakes: Mistakes) -> None:
    off = "--no-moe-shared-expert-overlap"
    parallel, memory = config.parallel, config.memory
    if not config.model.shared_ffn_size:
        mistakes.add("moe_shared_expert_overlap needs shared experts", works=[off])
    if config.model.moe_latent_size is not None:
        mistakes.add(
            "moe_shared_expert_overlap ends shared experts before results are projected out of "
            "latents (moe_latent_size), which Megatron-LM refuses, too",
            works=[off, "--moe-latent-size none"],
        )
    if parallel.expert_model_parallel_size == 1:
        mistakes.add(
            "moe_shared_expert_overlap hides messages between expert-parallel ranks, and ep is 1",
            works=["--expert-model-parallel-size 2", off],
        )
    if parallel.moe_token_dispatcher_type == "allgather":
        mistakes.add(
            "moe_shared_expert_overlap hides all-to-alls, and moe_token_dispatcher_type is "
            "allgather",
            works=["--moe-token-dispatcher-type alltoall", off],
        )
    if parallel.overlap_moe_expert_parallel_comm:
        mistakes.add(
            "moe_shared_expert_overlap and overlap_moe_expert_parallel_comm hide the same messages",
            works=[off, "--no-overlap-moe-expert-parallel-comm"],
        )
    if "shared_experts" in memory.recomputed_modules:
        mistakes.add(
            "moe_shared_expert_overlap runs shared experts in two halves, but recompute_modules "
            "shared_experts recomputes them as one",
            works=[off, "--recompute-modules core_attn moe_act"],
        )
