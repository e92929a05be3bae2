"""Schedules by name."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from fivefold.errors import ConfigError, Mistake, Mistakes, did_you_mean
from fivefold.pipeline.ir import Act, Kind, Program
from fivefold.pipeline.schedules.fixed import Task, gpipe, interleaved_1f1b, one_f_one_b

SCHEDULES: Mapping[str, Callable[[Task], list[list[Act]]]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved_1f1b": interleaved_1f1b}
)


def build_program(
    name: str,
    placement: Sequence[int],
    num_microbatches: int,
    *,
    group_size: int | None = None,
    forward_only: bool = False,
) -> Program:
    """The compute-only program of a schedule.

    Args:
        name: a key of `SCHEDULES`.
        placement: stage -> rank; every rank from 0 to the highest holds a stage.
        num_microbatches: of one step.
        group_size: consecutive microbatches a chunk runs before the next chunk does
            (interleaved_1f1b only); the number of ranks when None.
        forward_only: the evaluation program: the schedule's forwards in the same order.

    Raises:
        ConfigError: an unknown name, or a task outside what the schedule can do.
    """
    if name not in SCHEDULES:
        raise ConfigError(
            Mistake(
                f"unknown pipeline schedule {name!r}{did_you_mean(name, SCHEDULES)}",
                works=tuple(SCHEDULES),
            )
        )
    mistakes = Mistakes()
    if num_microbatches < 1:
        mistakes.add(f"a step needs at least 1 microbatch, not {num_microbatches}")
    if set(placement) != set(range(max(placement, default=0) + 1)):
        mistakes.add(f"every rank needs a stage, but the stages lie on ranks {list(placement)}")
    if group_size is not None and group_size < 1:
        mistakes.add(f"a group needs at least 1 microbatch, not {group_size}")
    mistakes.raise_if_any()
    num_ranks = max(placement) + 1
    task = Task(tuple(placement), num_microbatches, group_size or num_ranks, forward_only)
    orders = SCHEDULES[name](task)
    if forward_only:
        orders = [[act for act in order if act.kind is Kind.F] for order in orders]
    return Program(
        task.placement,
        num_microbatches,
        tuple(tuple(order) for order in orders),
        forward_only=forward_only,
    )
