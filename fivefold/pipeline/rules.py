"""Validation of pipeline settings beyond what the schedule itself requires."""

import re
from collections.abc import Sequence

from fivefold.config.config import Config
from fivefold.config.divisors import divisors, nearest
from fivefold.config.memory import MemoryConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.config.settings import flag_of
from fivefold.errors import Mistakes
from fivefold.pipeline.schedules.registry import SCHEDULES
from fivefold.pipeline.split.stages import Split

AUTO = "auto"
"""Setting that derives the schedule, or the stages, from other settings."""
SYNTHESISED = "synthesised"
"""Name of the searched schedule, which `schedules.registry` does not list."""


def resolved_schedule(parallel: ParallelConfig, num_virtual: int) -> str:
    """The schedule in effect, given the number of stages per rank."""
    if parallel.pipeline_schedule != AUTO:
        return parallel.pipeline_schedule
    if parallel.overlap_moe_expert_parallel_comm:
        return "combined_1f1b"
    return "interleaved_1f1b" if num_virtual > 1 else "1f1b"


_CHOICES = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("microbatches", r"number of microbatches (\d+)"),
        ("groups", r"(\d+) microbatches in groups of \d+"),
        ("ranks", r"--pipeline-model-parallel-size (\d+)"),
        ("slices", r"(\d+) slices?"),
        ("cap", r"a cap of at least (\S+)"),
        ("shape", r"a layout with the prefix (\w+):"),
        ("schedule", rf"({'|'.join(SCHEDULES)})"),
    )
)


def read_choice(choice: str) -> tuple[str, str]:
    """Parse a suggestion from a schedule's error into (kind, value).

    Kinds are microbatches, groups (a number of microbatches that is also the group size), ranks,
    slices, cap, shape, schedule, and other.
    """
    for kind, pattern in _CHOICES:
        if match := pattern.fullmatch(choice):
            return kind, match[1]
    return "other", choice


def check_groups_used(parallel: ParallelConfig, num_virtual: int, mistakes: Mistakes) -> None:
    """Report a microbatch group size without an interleaved schedule, which alone uses it.

    Args:
        parallel: requested parallel section.
        num_virtual: stages per rank.
        mistakes: receives every mistake.
    """
    name = "microbatch_group_size_per_virtual_pipeline_stage"
    size, schedule = getattr(parallel, name), resolved_schedule(parallel, num_virtual)
    grouping = [other for other, known in SCHEDULES.items() if known.groups]
    if size is None or (num_virtual > 1 and schedule in grouping):
        return
    stages = "one stage" if num_virtual == 1 else f"{num_virtual} stages"
    mistakes.add(
        f"{name} = {size} has no effect on {stages} a rank in the order of {schedule}",
        works=[
            *(f"--pipeline-schedule {other}" for other in grouping if num_virtual > 1),
            *(["--num-virtual-stages-per-pipeline-rank 2"] if num_virtual == 1 else []),
            f"{flag_of(name)} none",
        ],
    )


def check_schedule(config: Config, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Check settings that only some schedules support: slices, pairs, in-flight limits, ZeRO-3.

    Args:
        config: requested configuration.
        parallel: its parallel section with every inferred degree filled in.
        mistakes: receives every mistake.
    """
    slices = parallel.num_sequence_slices
    length, tp = config.training.seq_length, parallel.tensor_model_parallel_size
    check_order(parallel, mistakes)
    if length % slices:
        mistakes.add(
            f"seq_length {length} cannot be cut into {slices} equal slices",
            f"{length} / {slices} = {length / slices:.4g}",
            works=[f"--num-sequence-slices {n}" for n in nearest(slices, divisors(length))],
        )
    tokens = config.training.micro_batch_size * (length // slices)
    if slices > 1 and parallel.sequence_parallel and tokens % tp:
        mistakes.add(
            f"sequence_parallel cannot split a slice's tokens over tp {tp}",
            f"micro_batch_size x seq_length / slices = {tokens}, and {tokens} % {tp} = "
            f"{tokens % tp}",
        )
    if slices > 1 and parallel.context_parallel_size > 1:
        mistakes.add(
            "num_sequence_slices and context_parallel_size both cut every sequence",
            works=["--num-sequence-slices 1", "--context-parallel-size 1"],
        )
    for name, value in (
        ("multi_latent_attention", config.model.multi_latent_attention),
        ("layers that keep a state", config.model.has_linear_layers),
        ("mtp_num_layers", config.model.mtp_num_layers > 0),
        ("recompute_granularity full", config.memory.recompute_granularity == "full"),
    ):
        if slices > 1 and value:
            mistakes.add(
                f"num_sequence_slices does not go with {name}: slices share keys and values only, "
                "which must outlive the forward of their layer",
                works=["--num-sequence-slices 1"],
            )
    gathered = parallel.pipeline_max_unsharded_stages
    if gathered is not None and not parallel.sharding.splits_parameters:
        mistakes.add(
            f"pipeline_max_unsharded_stages has no effect on "
            f"{parallel.data_parallel_sharding_strategy}: parameters stay gathered",
            works=["--data-parallel-sharding-strategy optim_grads_params"],
        )


def check_order(parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Check settings that the requested schedule ignores or requires.

    Args:
        parallel: requested parallel section.
        mistakes: receives every mistake.
    """
    schedule = parallel.pipeline_schedule
    if parallel.num_sequence_slices == 1 and schedule == "sliced_1f1b":
        mistakes.add(
            "sliced_1f1b cuts sequences, and num_sequence_slices is 1",
            works=["--num-sequence-slices 2", "--pipeline-schedule 1f1b"],
        )
    if parallel.num_sequence_slices > 1 and schedule == SYNTHESISED:
        mistakes.add(
            f"the {SYNTHESISED} schedule orders whole microbatches, and num_sequence_slices is "
            f"{parallel.num_sequence_slices}",
            works=["--pipeline-schedule sliced_1f1b", "--num-sequence-slices 1"],
        )
    paired = [name for name, known in SCHEDULES.items() if known.pairs]
    if parallel.overlap_moe_expert_parallel_comm and schedule not in (AUTO, *paired):
        mistakes.add(
            "overlap_moe_expert_parallel_comm hides messages in pairs of a forward and a backward, "
            f"and the {schedule} schedule runs none",
            works=[f"--pipeline-schedule {name}" for name in (AUTO, *paired)],
        )
    limit = parallel.pipeline_in_flight_limit
    if limit is not None and schedule != SYNTHESISED:
        mistakes.add(
            f"pipeline_in_flight_limit has no effect on the {schedule} schedule",
            works=[f"--pipeline-schedule {SYNTHESISED}"],
        )


def check_recomputed_layers(memory: MemoryConfig, split: Split, mistakes: Mistakes) -> None:
    """Report numbers of recomputed layers that are not one for each stage of the split."""
    numbers, stages = memory.recompute_num_layers, split.stages
    if not memory.recomputes_first_layers or len(numbers) < 2:
        return
    shown, off = " ".join(map(str, numbers)), f"--recompute-num-layers {max(numbers)}"
    have = [len(stage.layers) or int(stage.mtp > 0) for stage in stages]
    if len(numbers) != len(stages):
        fitted = (*numbers[: len(stages)], *numbers[-1:] * (len(stages) - len(numbers)))
        works = [min(pair) for pair in zip(fitted, have, strict=True)]
        each = f" ({split.num_virtual} on each of {split.num_ranks} ranks)"
        mistakes.add(
            f"recompute_num_layers {shown} are {len(numbers)} numbers, and the model has "
            f"{len(stages)} stages{each * (split.num_virtual > 1)}",
            works=[_numbers(works), off] if any(works) else [off],
        )
        return
    for stage, (number, most) in enumerate(zip(numbers, have, strict=True)):
        if number > most:
            works = [min(pair) for pair in zip(numbers, have, strict=True)]
            mistakes.add(
                f"recompute_num_layers {shown}: stage {stage} has {most} layers, not {number}",
                works=[_numbers(works)] if any(works) else [off],
            )
            return


def _numbers(numbers: Sequence[int]) -> str:
    return f"--recompute-num-layers {' '.join(map(str, numbers))}"
