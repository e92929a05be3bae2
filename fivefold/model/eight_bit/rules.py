"""Rules of 8-bit settings for training, alone and in combination; torch-free."""

from dataclasses import dataclass
from math import log2, prod

from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.sharding import SHARDING
from fivefold.config.training import TrainingConfig
from fivefold.description.shape import stage_weights, whole_model
from fivefold.description.weights import Weight
from fivefold.errors import Mistakes
from fivefold.mesh.grid import Grid

E4M3_LARGEST, E4M3_LEAST = 448.0, 2.0**-9
"""Largest and least positive number of e4m3 (Micikevicius et al. 2022)."""
E4M3_ALONE = {"blockwise": 128, "mxfp8": 32}
"""Recipes with blocks short enough for e4m3 gradients; elements of a block."""
SQUARE = ("delayed", "tensorwise", "blockwise")
"""Recipes whose blocks of a weight have as many rows as columns: one copy serves both products."""
ADA, BLACKWELL = (8, 9), (10, 0)
"""Compute capabilities of the first GPUs with 8-bit floats, and of those with kernels for mxfp8."""


@dataclass(frozen=True)
class ScaledLayer:
    """A linear layer whose operands have delayed scales, on a rank.

    Attributes:
        name: name in the whole model.
        stage: index in the program of the stage that holds it.
        written: whether a checkpoint stores its scales; False for a second copy.
        experts: experts of the whole layer; None: it is no grouped one.
        first, held: this rank's experts; 0 and 1 of other layers.
    """

    name: str
    stage: int
    written: bool
    experts: int | None
    first: int
    held: int


OPERANDS = 3
"""Operands of a linear layer, each with a history of its own where scales are delayed."""
SCALES = "fp8."
"""Prefixes of the names of delayed scales and of their histories in a checkpoint."""

_WIDE = frozenset({"lm_head", "router", "shared_expert_gate"})
"""Linear layers that keep the compute dtype, as in Megatron-LM."""


def eight_bit_linears(model: ModelConfig) -> dict[str, int | None]:
    """The linear layers that --fp8-format has multiply in 8 bits, each with the number of its
    experts; None: it is no grouped one."""
    weights = stage_weights(model, whole_model(model))
    return {
        name.removesuffix(".weight"): weight.shape[0] if weight.of_experts else None
        for name, weight in weights.items()
        if in_eight_bits(name, weight)
    }


def delayed_linears(config: Config) -> dict[str, int | None]:
    """The linear layers whose operands have delayed scales: none, or all 8-bit ones."""
    return eight_bit_linears(config.model) if config.training.delays_scales else {}


def num_delayed_scales(config: Config) -> int:
    """Operands of the whole model with a delayed scale."""
    return OPERANDS * sum(experts or 1 for experts in delayed_linears(config).values())


def delayed_bytes(training: TrainingConfig) -> int:
    """Bytes that a delayed scale takes: history, scale, largest element, limit, and place."""
    return 4 * (training.fp8_amax_history_len + 3) + 8


def in_eight_bits(name: str, weight: Weight) -> bool:
    """Whether a weight is multiplied in 8 bits with --fp8-format."""
    return weight.multiplies and not weight.wide and name.split(".")[-2] not in _WIDE


def weight_bytes(recipe: str) -> float:
    """Bytes of an element in 8 bits, with its share of the scale where blocks are short."""
    return 1 + 1 / E4M3_ALONE[recipe] if recipe == "mxfp8" else 1.0


def keeps_weights(config: Config, passes: int) -> bool:
    """Whether 8-bit weights are kept for all `passes` forwards and backwards of a step.

    Not where they are gathered anew for each, or come in 8 bits; compiled layers keep nothing.
    """
    training = config.training
    return (
        training.fp8_format is not None
        and passes > 1
        and not training.disable_parameter_transpose_cache
        and not (training.fp8_param_gather or training.compile)
        and not config.parallel.sharding.splits_parameters
    )


def num_scales(shape: tuple[int, ...], recipe: str) -> int:
    """Scales of a weight of this shape, [F, H] or [E, F, H], as a rank multiplies it."""
    *experts, rows, columns = shape
    each = E4M3_ALONE[recipe] if recipe == "blockwise" else max(rows, columns, 1)
    return prod(experts) * -(-rows // each) * -(-columns // each)


def check_eight_bit(config: Config, mistakes: Mistakes) -> None:
    """Report 8-bit settings that the trainer lacks, or that would have no effect."""
    training, parallel, memory = config.training, config.parallel, config.memory
    if training.fp8_format is None:
        return
    recipe = training.fp8_recipe
    if training.precision == "fp16":
        mistakes.add(
            "fp8_format multiplies on top of bf16: kernels that scale rows give no fp16",
            works=["--bf16", "--fp8-format none"],
        )
    if recipe == "delayed":
        _check_delayed(training, mistakes)
    if recipe in E4M3_ALONE and training.fp8_format == "hybrid":
        mistakes.add(
            f"no kernel multiplies e5m2 gradients (fp8_format hybrid) with a scale for each "
            f"{E4M3_ALONE[recipe]} elements, which are narrow enough a range for e4m3",
            works=["--fp8-format e4m3", "--fp8-recipe tensorwise"],
        )
    if training.fp4_format is not None:
        mistakes.add(
            f"linear layers cannot multiply both 8 bits (fp8_format {training.fp8_format}) and 4 "
            f"(fp4_format {training.fp4_format})",
            works=["--fp4-format none", "--fp8-format none"],
        )
    if training.fp8_param_gather and recipe not in SQUARE:
        mistakes.add(
            f"fp8_param_gather: one copy of a weight would have to serve two products, and with "
            f"fp8_recipe {recipe} the output scales its rows, dX its columns",
            works=[*(f"--fp8-recipe {name}" for name in SQUARE), "--no-fp8-param-gather"],
        )
    if parallel.tp_comm_overlap and recipe == "tensorwise":
        mistakes.add(
            "tp_comm_overlap multiplies parts of the tokens while others travel, and with "
            "fp8_recipe tensorwise all tokens are scaled at once, not each by itself",
            works=[
                "--no-tp-comm-overlap",
                *(f"--fp8-recipe {name}" for name in ("rowwise", "delayed")),
                "--fp8-format none",
            ],
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


def _check_delayed(training: TrainingConfig, mistakes: Mistakes) -> None:
    """Report settings that leave no number for an operand, or that keep no history."""
    most = int(log2(E4M3_LARGEST / E4M3_LEAST))
    if not 0 <= training.fp8_margin <= most:
        mistakes.add(
            f"fp8_margin {training.fp8_margin}: the largest element becomes {E4M3_LARGEST:g} / 2 ^ "
            "margin, which fits with 0 and is above the least number of e4m3, 2 ^ -9, up to "
            f"{most}",
            works=["--fp8-margin 0", f"--fp8-margin {most}"],
        )
    if training.compile:
        mistakes.add(
            "fp8_recipe delayed writes down the largest element of each operand as it is "
            "multiplied, which compiled layers (compile) do not do",
            works=["--no-compile", "--fp8-recipe tensorwise"],
        )


def check_gathered(config: Config, mistakes: Mistakes) -> None:
    """Report settings with which 8-bit weights cannot be gathered, in any layout."""
    training, parallel, off = config.training, config.parallel, "--no-fp8-param-gather"
    if not training.fp8_param_gather:
        return
    if parallel.zero_quantized_weights:
        mistakes.add(
            "fp8_param_gather and zero_quantized_weights both say how weights are gathered",
            works=["--no-zero-quantized-weights", off],
        )
    if parallel.overlap_param_gather_with_optimizer_step:
        mistakes.add(
            "fp8_param_gather compares the largest elements of all weights when they are updated, "
            "and overlap_param_gather_with_optimizer_step gathers the first ones before",
            works=["--no-overlap-param-gather-with-optimizer-step", off],
        )
    if config.memory.param_cpu_offload:
        mistakes.add(
            "fp8_param_gather compares the largest elements of all weights before a step, which "
            "param_cpu_offload brings to the device layer by layer, for their gathers only",
            works=["--no-param-cpu-offload", off],
        )
    if config.memory.tiled_mlp_num_shards > 1:
        mistakes.add(
            "fp8_param_gather: tiles of an MLP (tiled_mlp_num_shards) use parts of one weight's "
            "gradient, which autograd would round to the 8 bits of the weight",
            works=["--tiled-mlp-num-shards 1", off],
        )
    if training.compile:
        mistakes.add(
            "fp8_param_gather: compiled layers (compile) take no weight with scales beside it",
            works=["--no-compile", off],
        )


def gathers_as_multiplied(grid: Grid, model: ModelConfig) -> bool:
    """Whether a rank multiplies with all rows of a weight that it holds, since they share
    scales."""
    whole = (own.num_kv_heads % grid.tp == 0 for own in model.attentions)
    return model.multi_latent_attention or all(whole)


def check_gathered_by(grid: Grid, config: Config, mistakes: Mistakes) -> None:
    """Report a layout in which no weights would be gathered in 8 bits, or not as they are
    multiplied."""
    if not config.training.fp8_param_gather:
        return
    heads, off = config.model.num_kv_heads, "--no-fp8-param-gather"
    if not config.parallel.sharding.splits_optimizer:
        fitting = (name for name, sharding in SHARDING.items() if sharding.splits_optimizer)
        mistakes.add(
            f"fp8_param_gather has no effect on {config.parallel.data_parallel_sharding_strategy}, "
            "which gathers nothing",
            works=[*(f"--data-parallel-sharding-strategy {name}" for name in fitting), off],
        )
    elif grid.dp_shard * grid.cp == 1:
        mistakes.add(
            "fp8_param_gather has no effect: the sharding group, dp_shard x cp, is a single rank",
            works=[off],
        )
    if not gathers_as_multiplied(grid, config.model):
        mistakes.add(
            f"fp8_param_gather: of {heads} key/value heads, which tp {grid.tp} does not divide, "
            "each rank holds all and scales those that it multiplies with",
            works=[off],
        )


def check_kernels(config: Config, capability: tuple[int, int] | None) -> None:
    """Refuse to start ranks on GPUs without a kernel for `mxfp8`.

    Args:
        config: the configuration.
        capability: compute capability of the GPUs; None: ranks compute on CPUs.

    Raises:
        ConfigError: the GPUs are older than Blackwell.
    """
    training, mistakes = config.training, Mistakes()
    if training.fp8_format is None or training.fp8_recipe != "mxfp8":
        return
    if capability is not None and capability < BLACKWELL:
        instead = "blockwise" if capability == (9, 0) else "tensorwise"
        mistakes.add(
            "fp8_recipe mxfp8: GPUs multiply with scales of 32 elements from sm 10.0 (Blackwell), "
            f"and these are sm {'.'.join(map(str, capability))}",
            works=[f"--fp8-recipe {instead}", "--fp8-format none"],
        )
    mistakes.raise_if_any()
