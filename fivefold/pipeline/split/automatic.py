"""`pipeline_model_parallel_layout = "auto"`: balances the stages of a configuration."""

from functools import lru_cache

from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.config.settings import flag_of
from fivefold.errors import ConfigError, Mistake
from fivefold.pipeline.costs.parts import modelled_parts
from fivefold.pipeline.ir import loop_placement, v_placement
from fivefold.pipeline.rules import resolved_schedule
from fivefold.pipeline.split.balance import balance, schedule_clock
from fivefold.pipeline.split.layout import NOT_AUTO, asks, exclusive, without
from fivefold.pipeline.split.stages import Split


def automatic_split(
    config: Config, parallel: ParallelConfig, num_virtual: int, *, in_a_v: bool
) -> Split:
    """Split the model by modelled times, then refine by the schedule's simulated step time.

    Args:
        config: model and batch settings.
        parallel: parallel section with every degree filled in.
        num_virtual: stages per rank.
        in_a_v: place the stages in a V instead of a loop.

    Raises:
        ConfigError: another setting also decides the stages.
    """
    others = [flag_of(name) for name in NOT_AUTO if asks(getattr(parallel, name))]
    if others:
        what = exclusive(["--pipeline-model-parallel-layout auto", *others])
        why = "auto decides how many layers each stage has"
        works = ("--pipeline-model-parallel-layout none", without(others))
        raise ConfigError(Mistake(what, (why,), works))
    ranks, training = parallel.pipeline_model_parallel_size, config.training
    placement = (v_placement if in_a_v else loop_placement)(ranks, ranks * num_virtual)
    dp = parallel.data_parallel_size
    microbatches = max(1, training.global_batch_size // (training.micro_batch_size * dp))
    schedule = resolved_schedule(parallel, num_virtual)
    return _balanced(config.model, training.seq_length, schedule, tuple(placement), microbatches)


@lru_cache(maxsize=8)  # layouts that differ in memory settings alone have the same stages
def _balanced(
    model: ModelConfig, seq_length: int, schedule: str, placement: tuple[int, ...], count: int
) -> Split:
    parts = modelled_parts(model, seq_length)
    return balance(parts, placement, clock=schedule_clock(schedule, placement, count)).split
