"""Fixed schedules: the order in which each rank works through its microbatches.

A generator takes a `Task` and returns the compute acts of every rank. It raises ConfigError where
the task lies outside what the schedule can do.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fivefold.errors import ConfigError, Mistake
from fivefold.pipeline.ir import Act, Kind, loop_placement, stages_on

Orders = list[list[Act]]


@dataclass(frozen=True)
class Task:
    """What a schedule has to arrange.

    Attributes:
        placement: stage -> rank.
        num_microbatches: of one step.
        group_size: consecutive microbatches that run through one chunk before the next chunk.
        forward_only: the caller keeps only the forward acts.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    group_size: int
    forward_only: bool = False

    @property
    def num_ranks(self) -> int:
        """The pipeline-parallel size."""
        return max(self.placement) + 1

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The stages on a rank, in model order."""
        return stages_on(self.placement, rank)


def gpipe(task: Task) -> Orders:
    """All forwards, then all backwards (Huang et al., 2019); with chunks, breadth-first.

    Bubble (P-1)(F+B+W)/V; holds every microbatch. Any placement.
    """
    microbatches = range(task.num_microbatches)
    return [
        [Act(Kind.F, stage, mb) for stage in task.chunks(rank) for mb in microbatches]
        + [Act(Kind.BW, stage, mb) for stage in reversed(task.chunks(rank)) for mb in microbatches]
        for rank in range(task.num_ranks)
    ]


def one_f_one_b(task: Task) -> Orders:
    """Warm up, then one forward, one backward (PipeDream-Flush; Narayanan et al., 2021).

    Bubble (P-1)(F+B+W); rank r holds min(P-r, M) microbatches. One stage a rank; any M.
    """
    num_ranks = task.num_ranks
    if task.placement != loop_placement(num_ranks, num_ranks):
        raise ConfigError(
            Mistake(
                f"the 1f1b schedule runs one stage a rank, here are {len(task.placement)} stages "
                f"on {num_ranks} ranks",
                works=("interleaved_1f1b", "gpipe"),
            )
        )
    return [
        _warm_up_then_alternate(
            [Act(Kind.F, rank, mb) for mb in range(task.num_microbatches)],
            [Act(Kind.BW, rank, mb) for mb in range(task.num_microbatches)],
            warm_up=num_ranks - 1 - rank,
        )
        for rank in range(num_ranks)
    ]


def interleaved_1f1b(task: Task) -> Orders:
    """1F1B over several chunks a rank, depth-first in groups (Narayanan et al., 2021).

    Bubble (P-1)(F+B+W)/V; rank 0 holds 2(P-1) + (V-1)G + 1 chunks. Loop placement only.
    """
    num_ranks, num_stages = task.num_ranks, len(task.placement)
    if task.placement != loop_placement(num_ranks, num_stages):
        raise ConfigError(
            Mistake(
                "the interleaved_1f1b schedule needs stage i on rank i % "
                f"{num_ranks}, here the stages lie on ranks {_listed(task.placement)}",
                works=("a layout with the prefix loop:", "gpipe"),
            )
        )
    if not task.forward_only:
        _check_groups(task)
    table = [
        (chunk, mb)
        for start in range(0, task.num_microbatches, task.group_size)
        for chunk in range(num_stages // num_ranks)
        for mb in range(start, min(start + task.group_size, task.num_microbatches))
    ]
    orders = []
    for rank in range(num_ranks):
        chunks = task.chunks(rank)
        orders.append(
            _warm_up_then_alternate(
                [Act(Kind.F, chunks[chunk], mb) for chunk, mb in table],
                [Act(Kind.BW, chunks[-1 - chunk], mb) for chunk, mb in table],
                warm_up=2 * (num_ranks - 1 - rank) + (len(chunks) - 1) * task.group_size,
            )
        )
    return orders


def _warm_up_then_alternate(forwards: list[Act], backwards: list[Act], warm_up: int) -> list[Act]:
    """`warm_up` forwards, then pairs of a forward and a backward, then the other backwards."""
    head = min(warm_up, len(forwards))
    pairs = zip(forwards[head:], backwards, strict=False)
    return [
        *forwards[:head],
        *(act for pair in pairs for act in pair),
        *backwards[len(forwards) - head :],
    ]


def _check_groups(task: Task) -> None:
    """P <= G <= M, and a last group that is not full is still at least P long."""
    ranks, total, group = task.num_ranks, task.num_microbatches, task.group_size

    def fits(total: int, group: int) -> bool:
        return ranks <= group <= total and (total % group == 0 or total % group >= ranks)

    if fits(total, group):
        return
    totals = sorted(range(ranks, total + 3 * max(ranks, group)), key=lambda m: abs(m - total))
    groups = sorted(range(ranks, total + 1), key=lambda g: abs(g - group))
    works = [
        *_choices("number of microbatches", (m for m in totals if fits(m, group))),
        *_choices(
            "--microbatch-group-size-per-virtual-pipeline-stage",
            (g for g in groups if fits(total, g)),
        ),
    ]
    raise ConfigError(
        Mistake(
            f"{total} microbatches cannot be interleaved over {ranks} ranks in groups of {group}",
            (
                f"group size: {ranks} (ranks) <= {group} <= {total} (microbatches) must hold",
                f"last group: {total} % {group} = {total % group} must be 0 or at least {ranks}",
            ),
            tuple(works) or (f"{ranks} microbatches in groups of {ranks}",),
        )
    )


def _choices(name: str, nearest_first: Iterable[int]) -> list[str]:
    nearest = [choice for choice, _ in zip(nearest_first, range(3), strict=False)]
    return [f"{name} {choice}" for choice in sorted(nearest)]


def _listed(placement: tuple[int, ...]) -> str:
    return " ".join(str(rank) for rank in placement)
