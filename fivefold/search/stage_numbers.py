"""Numbers of recomputed layers for each stage of a layout, with which its ranks fit.

With 1F1B the first stages hold more microbatches than the last ones, and need more recomputation.
What a pipeline rank holds follows from the numbers of its own stages, so that each rank's numbers
are found without those of the others, and only the smallest of them are worth a prediction of time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

from fivefold.counts.state import stages_held
from fivefold.layout import Layout
from fivefold.predict.cluster import Cluster
from fivefold.predict.memory import MemoryPrediction, peak_memory

MOST = 256
"""Numbers for the stages of a rank that are all tried; of more, only some are."""
COMBINATIONS = 64
"""Combinations of ranks' numbers that are all timed."""
Numbers = tuple[int, ...]


@dataclass
class RankGroup:
    """Stages of which the same ranks hold some, and the numbers of layers found for them.

    Attributes:
        stages: indices of the stages.
        ranks: pipeline ranks that hold them.
        found: smallest numbers, one for each stage, with which these ranks fit.
        least: the lowest peak of these ranks in bytes, and its numbers.
    """

    stages: Numbers
    ranks: Numbers
    found: list[Numbers]
    least: tuple[float, Numbers]

    def tried(self, numbers: Numbers, memory: MemoryPrediction) -> None:
        """Take note of what the ranks hold with these numbers, smaller ones having come before."""
        ranks = [memory.ranks[rank] for rank in self.ranks]
        self.least = min(self.least, (max(rank.peak for rank in ranks), numbers))
        smaller = (all(map(int.__le__, each, numbers)) for each in self.found)
        if replace(memory, ranks=tuple(ranks)).fits and not any(smaller):
            self.found.append(numbers)


def try_numbers(
    layout: Layout, cluster: Cluster, timed: Callable[[Numbers], float]
) -> tuple[float, Numbers]:
    """Time the smallest numbers of layers with which all ranks fit; the lowest peak, in bytes.

    Of many combinations of different ranks' numbers, only those are timed that change one rank's at
    a time.

    Args:
        layout: a layout with `recompute_method` block, and any numbers.
        cluster: the hardware.
        timed: seconds of a step with these numbers: one for each stage, or one for all.

    Returns:
        The lowest peak that was found, of the fullest rank, and its numbers.
    """
    groups = _tried(layout, cluster)

    def seconds(numbers: Sequence[Numbers]) -> float:
        return timed(_joined(groups, numbers))

    if prod(len(group.found) for group in groups) <= COMBINATIONS:
        for numbers in product(*(group.found for group in groups)):
            seconds(numbers)
    else:
        best = [min(group.found, key=sum) for group in groups]
        for place, group in enumerate(groups):
            tries = [[*best[:place], own, *best[place + 1 :]] for own in group.found]
            best = min(tries, key=seconds)
    least = _joined(groups, [group.least[1] for group in groups])
    return max(group.least[0] for group in groups), least


def _tried(layout: Layout, cluster: Cluster) -> list[RankGroup]:
    """The groups of ranks, with the numbers of layers with which each fits."""
    groups = _groups(layout)
    tries = [list(_tries(layout, group.stages)) for group in groups]
    for turn in range(max(map(len, tries))):
        now = [each[min(turn, len(each) - 1)] for each in tries]
        config = layout.config.with_values(recompute_num_layers=_joined(groups, now))
        memory = peak_memory(replace(layout, config=config), cluster)
        for group, numbers, each in zip(groups, now, tries, strict=True):
            if turn < len(each):
                group.tried(numbers, memory)
    return groups


def _joined(groups: Sequence[RankGroup], numbers: Sequence[Numbers]) -> Numbers:
    """The numbers of all stages in order, from those of groups; one, if they are the same."""
    found = {
        stage: number
        for group, own in zip(groups, numbers, strict=True)
        for stage, number in zip(group.stages, own, strict=True)
    }
    every = tuple(found[stage] for stage in sorted(found))
    return every[:1] if len({*every}) == 1 and every[0] else every


def _groups(layout: Layout) -> list[RankGroup]:
    """All stages, those together of which some rank holds two and more."""
    groups: list[tuple[set[int], set[int]]] = []
    for rank in range(layout.grid.pp):
        stages, ranks = {*stages_held(layout, rank)}, {rank}
        for known in [group for group in groups if group[0] & stages]:
            groups.remove(known)
            stages, ranks = stages | known[0], ranks | known[1]
        groups.append((stages, ranks))
    return [RankGroup(tuple(sorted(s)), tuple(sorted(r)), [], (inf, ())) for s, r in groups]


def _tries(layout: Layout, stages: Numbers) -> Iterator[Numbers]:
    """Numbers for these stages, smaller ones before larger ones."""
    each = [layout.split.stages[stage] for stage in stages]
    most = [len(stage.layers) or int(stage.mtp > 0) for stage in each]
    first = 1 if len(layout.split.stages) == 1 else 0  # no layer of all is no recomputation
    if prod(size + 1 for size in most) <= MOST:
        sizes = product(*(range(first, size + 1) for size in most))
        yield from sorted(sizes, key=lambda numbers: (sum(numbers), numbers))
        return
    for total in range(first, sum(most) + 1):
        yield from dict.fromkeys(_divided(total, most))


def _divided(total: int, most: Sequence[int]) -> Iterator[Numbers]:
    """So many layers of stages: the first stages' before others', the last ones', and evenly."""
    yield _filled(total, most)
    yield _filled(total, most[::-1])[::-1]
    even = [total * size // sum(most) for size in most]
    rest = _filled(total - sum(even), [size - own for size, own in zip(most, even, strict=True)])
    yield tuple(map(int.__add__, even, rest))


def _filled(total: int, most: Sequence[int]) -> Numbers:
    numbers = []
    for size in most:
        numbers.append(min(size, total))
        total -= numbers[-1]
    return tuple(numbers)
