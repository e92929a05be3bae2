"""Chooses the number of recomputed layers of each stage of a layout, so that all its ranks fit.

With 1F1B the first stages hold more microbatches than the last ones, and need more recomputation.
What a pipeline rank holds follows from the numbers of its own stages, so that each rank's numbers
are found without those of the others, and only the smallest of them are worth a prediction of time.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from math import inf, prod
from typing import NamedTuple

from fivefold.counts.state import stages_held
from fivefold.layout import Layout
from fivefold.predict.cluster import Cluster
from fivefold.predict.memory.peak import MemoryPrediction, StageCache, peak_memory

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Effort:
    """Limits on the numbers that are tried.

    Attributes:
        most: numbers for the stages of a rank that are all tried; of more, only some are.
        combinations: combinations of ranks' numbers that are all timed.
        to_the_end: whether to go on, where there are more than `most` numbers, with numbers of more
            layers than the first ones with which a rank fits.
    """

    most: int = 256
    combinations: int = 64
    to_the_end: bool = True


THOROUGH = Effort()
QUICK = Effort(most=32, combinations=8, to_the_end=False)
"""What a search can afford for one of many layouts."""


@dataclass
class RankGroup:
    """Stages that share ranks, and the numbers of layers found for them.

    Attributes:
        stages: indices of the stages.
        ranks: pipeline ranks that hold them.
        tries: numbers to try, smaller ones before larger ones.
        every: whether these are all that there are.
        found: smallest numbers, one for each stage, with which these ranks fit.
        least: the lowest peak of these ranks in bytes, and its numbers.
    """

    stages: Numbers
    ranks: Numbers
    tries: list[Numbers] = field(default_factory=list)
    every: bool = True
    found: list[Numbers] = field(default_factory=list)
    least: tuple[float, Numbers] = (inf, ())

    def tried(self, numbers: Numbers, memory: MemoryPrediction) -> None:
        """Record the memory of the ranks with these numbers; call for smaller numbers first."""
        ranks = [memory.ranks[rank] for rank in self.ranks]
        self.least = min(self.least, (max(rank.peak for rank in ranks), numbers))
        smaller = (all(map(int.__le__, each, numbers)) for each in self.found)
        if replace(memory, ranks=tuple(ranks)).fits and not any(smaller):
            self.found.append(numbers)

    def at(self, turn: int) -> Numbers:
        """The numbers of this turn; the last ones if there are no more."""
        return self.tries[min(turn, len(self.tries) - 1)]

    def is_done(self, turn: int, effort: Effort) -> bool:
        """Whether there is nothing left to try in this turn."""
        if turn >= len(self.tries):
            return True
        further = self.every or effort.to_the_end or not self.found
        return not further and sum(self.tries[turn]) > sum(self.found[0])


class TriedNumbers(NamedTuple):
    """The result of trying numbers of layers.

    Attributes:
        peak: the lowest peak that was found, of the fullest rank, in bytes.
        numbers: its numbers.
        looks: predictions of memory.
    """

    peak: float
    numbers: Numbers
    looks: int


def try_numbers(
    layout: Layout,
    cluster: Cluster,
    timed: Callable[[Numbers], float],
    effort: Effort = THOROUGH,
) -> TriedNumbers:
    """Time the smallest numbers of layers with which all ranks fit.

    Of many combinations of different ranks' numbers, only those are timed that change one rank's at
    a time.

    Args:
        layout: a layout with `recompute_method` block, and any numbers.
        cluster: the hardware.
        timed: seconds of a step with these numbers: one for each stage, or one for all.
        effort: how many numbers to try.
    """
    groups, looks = _tried(layout, cluster, effort)

    def seconds(numbers: Sequence[Numbers]) -> float:
        return timed(_joined(groups, numbers))

    if prod(len(group.found) for group in groups) <= effort.combinations:
        for numbers in product(*(group.found for group in groups)):
            seconds(numbers)
    else:
        best = [min(group.found, key=sum) for group in groups]
        for place, group in enumerate(groups):
            tries = [[*best[:place], own, *best[place + 1 :]] for own in group.found]
            best = min(tries, key=seconds)
    least = _joined(groups, [group.least[1] for group in groups])
    return TriedNumbers(max(group.least[0] for group in groups), least, looks)


def try_one_number(layout: Layout, cluster: Cluster) -> int | None:
    """The smallest number of layers of every stage with which a layout fits; None: none does.

    Args:
        layout: a layout with `recompute_method` block, and any number.
        cluster: the hardware.
    """
    most = max(len(stage.layers) for stage in layout.split.stages)

    def fits(number: int) -> bool:
        config = layout.config.with_values(recompute_num_layers=(number,))
        return peak_memory(replace(layout, config=config), cluster).fits

    if not fits(most):
        return None
    return bisect_left(range(1, most), True, key=fits) + 1


def _tried(layout: Layout, cluster: Cluster, effort: Effort) -> tuple[list[RankGroup], int]:
    """The groups of ranks with the numbers that fit each, and how many predictions were made."""
    groups, turn, known = _groups(layout), 0, StageCache()
    for group in groups:
        group.tries, group.every = _tries(layout, group.stages, effort.most)
    while not all(group.is_done(turn, effort) for group in groups):
        now = [group.at(turn) for group in groups]
        config = layout.config.with_values(recompute_num_layers=_joined(groups, now))
        memory = peak_memory(replace(layout, config=config), cluster, known=known)
        for group, numbers in zip(groups, now, strict=True):
            if not group.is_done(turn, effort):
                group.tried(numbers, memory)
        turn += 1
    return groups, turn


def _joined(groups: Sequence[RankGroup], numbers: Sequence[Numbers]) -> Numbers:
    """The numbers of all stages in order, joined from the groups; a single number if all are
    equal."""
    found = {
        stage: number
        for group, own in zip(groups, numbers, strict=True)
        for stage, number in zip(group.stages, own, strict=True)
    }
    every = tuple(found[stage] for stage in sorted(found))
    return every[:1] if len({*every}) == 1 and every[0] else every


def _groups(layout: Layout) -> list[RankGroup]:
    """All stages in groups; stages that share a rank are in one group."""
    groups: list[tuple[set[int], set[int]]] = []
    for rank in range(layout.grid.pp):
        stages, ranks = {*stages_held(layout, rank)}, {rank}
        for known in [group for group in groups if group[0] & stages]:
            groups.remove(known)
            stages, ranks = stages | known[0], ranks | known[1]
        groups.append((stages, ranks))
    return [RankGroup(tuple(sorted(s)), tuple(sorted(r))) for s, r in groups]


def _tries(layout: Layout, stages: Numbers, most: int) -> tuple[list[Numbers], bool]:
    """Numbers to try for these stages, smaller ones first; and whether these are all possible
    numbers."""
    each = [layout.split.stages[stage] for stage in stages]
    sizes = [len(stage.layers) or int(stage.mtp > 0) for stage in each]
    first = 1 if len(layout.split.stages) == 1 else 0  # 0 of all layers is no recomputation
    if prod(size + 1 for size in sizes) <= most:
        every = product(*(range(first, size + 1) for size in sizes))
        return sorted(every, key=lambda numbers: (sum(numbers), numbers)), True
    totals = range(first, sum(sizes) + 1)
    return list(chain.from_iterable(dict.fromkeys(_divided(n, sizes)) for n in totals)), False


def _divided(total: int, most: Sequence[int]) -> Iterator[Numbers]:
    """Distributions of this many layers over stages: to the first stages, to the last ones, and
    evenly."""
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
