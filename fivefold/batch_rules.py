"""Checks that the batches of a run are whole microbatches, and that its schedule can run them."""

from itertools import islice

from fivefold.config.batch_sizes import BatchSizes
from fivefold.config.config import Config
from fivefold.config.parallel import ParallelConfig
from fivefold.config.training import TrainingConfig
from fivefold.errors import Mistakes
from fivefold.layout import Layout
from fivefold.units import several

MAX_MICROBATCHES = 1 << 16  # per step; a program lists every one of them


def count_microbatches(config: Config, parallel: ParallelConfig, mistakes: Mistakes) -> int:
    """Microbatches of a step in each pipeline; adds the reasons why batches are not whole
    microbatches."""
    size, each = config.training.global_batch_size, config.training.micro_batch_size
    dp = parallel.data_parallel_size
    unit = each * dp
    if size % unit:
        near = (size // unit, size // unit + 1)
        mistakes.add(
            f"global_batch_size {size} is not a whole number of microbatches per rank",
            f"micro_batch_size {each} x dp {dp} = {unit}, and {size} / {unit} = {size / unit:.4g}",
            works=[f"--global-batch-size {n * unit}" for n in near if n],
        )
    if size // unit > MAX_MICROBATCHES:
        mistakes.add(
            f"{size // unit:,} microbatches a step are more than {MAX_MICROBATCHES:,}",
            f"global_batch_size {size} / (micro_batch_size {each} x dp {dp})",
            works=[f"--global-batch-size {MAX_MICROBATCHES * unit}"],
        )
        return 1
    if ramp := config.training.rampup_batch_size:
        start, increment, samples = ramp
        if start % unit or increment % unit:
            first = -(-start // unit) * unit
            grows = first < size and size % unit == 0
            mistakes.add(
                f"rampup_batch_size begins with {start} and grows by {increment}: both must be "
                "whole numbers of microbatches per rank",
                f"micro_batch_size {each} x dp {dp} = {unit}, and {start} / {unit} = "
                f"{start / unit:.4g}, {increment} / {unit} = {increment / unit:.4g}",
                works=[f"--rampup-batch-size {first} {unit} {samples}"] if grows else [],
            )
    return max(size // unit, 1)


def check_skipped_steps(training: TrainingConfig, mistakes: Mistakes) -> None:
    """Add skipped steps that the run does not have."""
    if not training.iterations_to_skip:
        return
    steps, last = training.num_steps, max(training.iterations_to_skip)
    if last >= steps > 0:
        mistakes.add(
            f"iterations_to_skip {last} is beyond the run, whose steps are 0 to {steps - 1}",
            "steps are numbered from 0",
            works=[f"--iterations-to-skip {steps - 1}", training.lasting(last + 1)],
        )


def check_smaller_batches(layout: Layout, mistakes: Mistakes) -> None:
    """Add what is wrong with the smaller batches at the start of a run."""
    training, parallel = layout.config.training, layout.config.parallel
    if training.num_steps < 1:
        first = training.batch_sizes.at(0)
        mistakes.add(
            f"train_samples {training.train_samples} is less than the first step's {first}",
            works=[f"--train-samples {first}"],
        )
    unit, pp = training.micro_batch_size * layout.grid.dp, layout.grid.pp
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage

    def refused(sizes: BatchSizes) -> int | None:
        """The first batch that the schedule cannot run."""
        return next(
            (n for n in sizes.sizes() if not layout.known.takes(pp, n // unit, group)), None
        )

    size = refused(training.batch_sizes)
    if size is None or size == training.global_batch_size:  # not a mistake of the ramp
        return
    full, whole = training.global_batch_size, unit * (group or pp)
    samples = training.rampup_batch_size[2]
    starts = range(whole, full, whole) if full % whole == 0 else ()
    fits = (n for n in starts if refused(BatchSizes(full, n, whole, samples)) is None)
    offers = [f"{n} {whole} {samples}" for n in islice(fits, 1)]
    mistakes.add(
        f"{layout.schedule} over {pp} ranks cannot run {several(size // unit, 'microbatch')}, "
        f"which is a step of {several(size, 'sequence')} on the way of rampup_batch_size",
        works=[f"--rampup-batch-size {offer}" for offer in (*offers, "none")],
    )
