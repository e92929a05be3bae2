"""Fixed schedules: the order in which each rank processes its microbatches.

A generator takes a `Task` and returns the compute actions of every rank. It raises ConfigError if
the schedule does not support the task.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fivefold.errors import ConfigError, Mistake
from fivefold.pipeline.ir import Act, Kind, pair, stages_on

Orders = list[list[Act]]


@dataclass(frozen=True)
class Task:
    """What a schedule must arrange.

    Attributes:
        placement: stage -> rank; for a schedule with two copies of the model, of both copies.
        num_microbatches: microbatches per step.
        group_size: consecutive microbatches that run through one stage before the rank's next one.
        num_slices: sequence slices per microbatch.
        forward_only: whether the caller keeps only the forward actions.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    group_size: int
    num_slices: int
    forward_only: bool

    @property
    def num_ranks(self) -> int:
        """Pipeline-parallel size."""
        return max(self.placement) + 1

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The stages on a rank, in model order."""
        return stages_on(self.placement, rank)

    @cached_property
    def table(self) -> tuple[tuple[int, int], ...]:
        """(index of the rank's stage, microbatch) of each forward, depth-first in groups.

        Backwards take the stages in reverse order.
        """
        return tuple(
            (chunk, mb)
            for start in range(0, self.num_microbatches, self.group_size)
            for chunk in range(len(self.placement) // self.num_ranks)
            for mb in range(start, min(start + self.group_size, self.num_microbatches))
        )


def gpipe(task: Task) -> Orders:
    """All forwards, then all backwards (Huang et al., 2019). Any placement.

    With several stages per rank this is the looped, breadth-first pipeline (Lamy-Poirier, 2022).
    Bubble (P-1)(F+B+W)/V; holds every microbatch.
    """
    microbatches = range(task.num_microbatches)
    return [
        [Act(Kind.F, stage, mb) for stage in task.chunks(rank) for mb in microbatches]
        + [Act(Kind.BW, stage, mb) for stage in reversed(task.chunks(rank)) for mb in microbatches]
        for rank in range(task.num_ranks)
    ]


def one_f_one_b(task: Task) -> Orders:
    """Warm-up, then one forward, one backward in turn (PipeDream-Flush; Narayanan et al., 2021).

    Bubble (P-1)(F+B+W); rank r holds min(P-r, M) microbatches. Any M.
    """
    return [
        _alternate(*_pieces(task, rank), warm_up=task.num_ranks - 1 - rank)
        for rank in range(task.num_ranks)
    ]


def eager_one_f_one_b(task: Task) -> Orders:
    """1F1B with twice the warm-up, which hides message latency (Zhuang et al., 2022).

    Plain 1F1B exposes about 2(P-1) message latencies per P microbatches, this one only those of the
    fill; rank r holds min(2(P-r)-1, M) microbatches.
    """
    return [
        _alternate(*_pieces(task, rank), warm_up=2 * (task.num_ranks - 1 - rank))
        for rank in range(task.num_ranks)
    ]


def sliced_1f1b(task: Task) -> Orders:
    """1F1B over K slices of each sequence (Seq1F1B; Sun et al., 2024).

    A causal slice needs the keys of the slices before it, and its backward the gradients of the
    slices after it, so backwards run from the last slice to the first. The fill shrinks to about
    1/K; rank r holds P-r-1+K slices.
    """
    return [
        _alternate(*_pieces(task, rank), warm_up=task.num_ranks - rank - 2 + task.num_slices)
        for rank in range(task.num_ranks)
    ]


def interleaved_1f1b(task: Task) -> Orders:
    """1F1B with several stages per rank, depth-first in groups (Narayanan et al., 2021).

    Bubble (P-1)(F+B+W)/V; rank 0 holds 2(P-1) + (V-1)G + 1 stages. P <= G <= M.
    """
    check_groups(task)
    return [
        _alternate(*interleaved(task, rank, Kind.BW), warm_up=_warm_up(task, rank))
        for rank in range(task.num_ranks)
    ]


def combined_1f1b(task: Task) -> Orders:
    """Interleaved 1F1B whose steady state runs overlapped pairs of a forward and a backward (FB).

    The two overlap each other's expert communication. One more forward in the warm-up makes them
    independent (as in Megatron-LM's combined 1F1B).
    """
    check_groups(task)
    return [
        _alternate(*interleaved(task, rank, Kind.BW), warm_up=_warm_up(task, rank) + 1, paired=True)
        for rank in range(task.num_ranks)
    ]


def only_microbatches(acts: Iterable[Act], total: int) -> list[Act]:
    """Remove the actions of microbatches from `total` on.

    The rest of a deadlock-free program is deadlock-free, so a schedule made for many microbatches
    can run a step with few.
    """
    kept = []
    for act in acts:
        kids = tuple(kid for kid in act.elementary if kid.mb < total)
        if kids == act.elementary:
            kept.append(act)
        else:
            kept += kids
    return kept


def _warm_up(task: Task, rank: int) -> int:
    chunks = len(task.chunks(rank))
    return 2 * (task.num_ranks - 1 - rank) + (chunks - 1) * task.group_size


def _pieces(task: Task, rank: int) -> tuple[list[Act], list[Act]]:
    """Forwards and backwards of a rank's one stage, with slices in causal order."""
    mbs, slices = range(task.num_microbatches), range(task.num_slices)
    return (
        [Act(Kind.F, rank, mb, piece) for mb in mbs for piece in slices],
        [Act(Kind.BW, rank, mb, piece) for mb in mbs for piece in reversed(slices)],
    )


def interleaved(task: Task, rank: int, backward: Kind) -> tuple[list[Act], list[Act]]:
    """Forwards and backwards of a rank's stages, depth-first in groups."""
    chunks = task.chunks(rank)
    return (
        [Act(Kind.F, chunks[chunk], mb) for chunk, mb in task.table],
        [Act(backward, chunks[-1 - chunk], mb) for chunk, mb in task.table],
    )


def _alternate(
    forwards: list[Act], backwards: list[Act], warm_up: int, *, paired: bool = False
) -> list[Act]:
    """`warm_up` forwards, then alternating (or paired) forwards and backwards, then the rest."""
    head = min(warm_up, len(forwards))
    steady: list[Act] = []
    for forward, backward in zip(forwards[head:], backwards, strict=False):
        steady += [pair(forward, backward)] if paired else [forward, backward]
    return [*forwards[:head], *steady, *backwards[len(forwards) - head :]]


def check_groups(task: Task) -> None:
    """Check that P <= G <= M, and that an incomplete last group still has at least P microbatches.

    Forwards alone can be grouped arbitrarily.

    Raises:
        ConfigError: with the nearest group sizes and numbers of microbatches.
    """
    ranks, total, group = task.num_ranks, task.num_microbatches, task.group_size
    if task.forward_only or groups_fit(ranks, total, group):
        return
    near = max(total, group)
    totals = sorted(range(max(ranks, near - ranks), near + 2 * ranks), key=lambda m: abs(m - total))
    groups = sorted(range(ranks, total + 1), key=lambda g: abs(g - group))
    works = [
        *nearest_choices(
            "number of microbatches", (m for m in totals if groups_fit(ranks, m, group))
        ),
        *nearest_choices(
            "--microbatch-group-size-per-virtual-pipeline-stage",
            (g for g in groups if groups_fit(ranks, total, g)),
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


def groups_fit(ranks: int, total: int, group: int) -> bool:
    """Whether `total` microbatches can be interleaved over the ranks in groups of `group`."""
    return ranks <= group <= total and (total % group == 0 or total % group >= ranks)


def nearest_choices(name: str, nearest_first: Iterable[int]) -> list[str]:
    """The first three choices as 'name 4', in ascending order."""
    nearest = [choice for choice, _ in zip(nearest_first, range(3), strict=False)]
    return [f"{name} {choice}" for choice in sorted(nearest)]
