"""`pipeline_model_parallel_layout = "auto"`: balances the stages of a configuration."""

from functools import lru_cache

from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.config.settings import flag_of
from fivefold.errors import ConfigError, Mistake
from fivefold.pipeline.balance import balance, schedule_clock
from fivefold.pipeline.ir import loop_placement, v_placement
from fivefold.pipeline.parts import modelled_parts
from fivefold.pipeline.rules import resolved_schedule
from fivefold.pipeline.stages import Split

_OTHER_WAYS = (
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


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
    others = [name for name in _OTHER_WAYS if getattr(parallel, name)]
    if others:
        flags = list(map(flag_of, others))
        offs = [
            f"--no-{flag[2:]}" if getattr(parallel, name) is True else f"{flag} none"
            for name, flag in zip(others, flags, strict=True)
        ]
        raise ConfigError(
            Mistake(
                f"--pipeline-model-parallel-layout auto and {' and '.join(flags)} exclude each "
                "other",
                ("auto decides how many layers each stage has",),
                ("--pipeline-model-parallel-layout none", " ".join(offs)),
            )
        )
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
