"""Which 8-bit settings can be trained with, alone and in combination; torch-free."""

from fivefold.config.config import Config
from fivefold.errors import Mistakes

TRAINED = ("tensorwise", "rowwise", "blockwise")
"""Recipes that the trainer has."""
_NEEDS = {
    "delayed": "scales by the largest elements of earlier steps: a history that every layout would "
    "have to save, to share and to repeat when it recomputes. The recipes of this version scale a "
    "tensor by its own largest elements",
    "mxfp8": "needs kernels of Blackwell that read scales of 32 elements in an order of their own, "
    "which this version does not write",
}


def check_eight_bit(config: Config, mistakes: Mistakes) -> None:
    """Report 8-bit settings that the trainer does not have, or that would not do what they say."""
    training, parallel, memory = config.training, config.parallel, config.memory
    if training.fp8_format is None:
        return
    recipe = training.fp8_recipe
    if recipe not in TRAINED:
        mistakes.add(
            f"fp8_recipe = {recipe} {_NEEDS[recipe]}",
            works=[f"--fp8-recipe {name}" for name in TRAINED],
        )
    if recipe == "blockwise" and training.fp8_format == "hybrid":
        mistakes.add(
            "no kernel multiplies e5m2 gradients (fp8_format hybrid) with a scale for each 128 "
            "elements, which are narrow enough a range for e4m3",
            works=["--fp8-format e4m3", "--fp8-recipe tensorwise"],
        )
    if training.fp4_format is not None:
        mistakes.add(
            f"linear layers cannot multiply both 8 bits (fp8_format {training.fp8_format}) and 4 "
            f"(fp4_format {training.fp4_format})",
            works=["--fp4-format none", "--fp8-format none"],
        )
    if parallel.tp_comm_overlap:
        mistakes.add(
            "tp_comm_overlap multiplies parts of the tokens while others travel, and with "
            f"fp8_recipe {recipe} all tokens are scaled at once",
            works=["--no-tp-comm-overlap", "--fp8-format none"],
        )
    gathers = parallel.context_parallel_size > 1 and "all_gather" in parallel.cp_comm_type
    if config.model.multi_latent_attention and gathers:
        mistakes.add(
            "cp_comm_type all_gather projects keys and values from gathered latents piece by piece "
            "within attention, where products have the compute dtype, not 8 bits",
            works=["--cp-comm-type p2p", "--fp8-format none"],
        )
    if memory.fine_grained_activation_offloading:
        narrow = {"dispatched_input", "pre_mlp_layernorm_output"}.intersection(
            memory.offload_tensors
        )
        for name in sorted(narrow):
            mistakes.add(
                f"offload_tensors {name} would move what no 8-bit linear layer keeps: they keep an "
                "8-bit copy of it",
                works=["--offload-modules core_attn", "--fp8-format none"],
            )
