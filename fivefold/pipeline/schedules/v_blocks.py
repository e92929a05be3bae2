"""V-Half and V-Min: schedules of repeated building blocks (Qi et al., Controllable Memory, 2024).

Each rank holds two stages, in a V. Every microbatch has the same shape in time, six slots after the
previous one; the length of the shape on each rank decides how much is held. The regular pattern is
then tightened: at both ends actions move to earlier free slots, as long as no rank holds more than
the pattern does, and W fills the free slots.
"""

from bisect import insort
from collections.abc import Callable
from itertools import accumulate

from fivefold.pipeline.costs.costs import Costs, Footprint
from fivefold.pipeline.ir import stages_on
from fivefold.pipeline.list_scheduler import ListScheduler, Problem, SchedulingPolicy
from fivefold.pipeline.schedules.fixed import Orders, Task

_PERIOD = 6
_F0, _F1, _B1, _B0, _W = range(5)
Block = Callable[[int, int], tuple[int, int, int, int]]


def v_half(task: Task) -> Orders:
    """About half the memory of 1F1B: (P+2)//2 microbatches. Any M."""
    return _tightened(task, _half_block)


def v_min(task: Task) -> Orders:
    """About a third of the memory of 1F1B: (P+4)//3 microbatches. Any M."""
    return _tightened(task, _min_block)


def _half_block(ranks: int, rank: int) -> tuple[int, int, int, int]:
    """Slots of F0, F1, B1, B0 of microbatch 0."""
    shift = 0 if ranks % 2 else 3
    return (
        2 * rank,
        3 * ranks - rank - 2,
        3 * ranks + shift + 2 * rank - 1,
        6 * ranks + shift - rank - 2,
    )


def _min_block(ranks: int, rank: int) -> tuple[int, int, int, int]:
    shift = 0 if ranks % 3 else 2
    return (rank, 2 * ranks - rank - 1, 2 * ranks + shift + rank, 4 * ranks + shift - rank - 1)


def _tightened(task: Task, block: Block) -> Orders:
    ranks = task.num_ranks
    pattern = _Pattern([block(ranks, rank) for rank in range(ranks)], task.num_microbatches)
    pattern.tighten()
    orders = []
    for rank, slots in enumerate(pattern.slots):
        here, there = stages_on(task.placement, rank)
        acts = ((0, here), (0, there), (1, there), (1, here))
        timed = [(slot, act) for row, act in zip(slots, acts, strict=False) for slot in row]
        orders.append([act for _, act in sorted(timed)])
    stages = len(task.placement)
    problem = Problem(
        task.placement,
        task.num_microbatches,
        Costs.uniform(stages),
        pattern.peak,
        Footprint((1.0,) * stages),
    )
    in_gaps = SchedulingPolicy((), (), (), patience=(1.0,) * ranks)
    program = ListScheduler(problem, in_gaps, orders).program()
    return [list(acts) for acts in program.ranks]


class _Pattern:
    """Time slots of every action on every rank.

    Attributes:
        slots: for each rank and type (F0, F1, B1, B0, W), the slot of each action; W's are in the
            order of the B's.
        peak: maximum number of activations that a rank holds.
    """

    def __init__(self, blocks: list[tuple[int, int, int, int]], total: int) -> None:
        self._total = total
        self.slots = [
            [[slot + _PERIOD * mb for mb in range(total)] for slot in block] for block in blocks
        ]
        length = max(row[-1] for slots in self.slots for row in slots) + 2 * total + 2
        self._busy = [[False] * length for _ in blocks]
        self._held = []
        self._backward = [sorted(slots[_B1] + slots[_B0]) for slots in self.slots]
        for slots, busy, backward in zip(self.slots, self._busy, self._backward, strict=True):
            change = [0] * length
            for kind, row in enumerate(slots):
                for slot in row:
                    busy[slot] = True
                    change[slot] = int(kind in (_F0, _F1))
            slots.append(_fill(busy, backward))
            for slot in slots[_W]:
                change[slot] = -1
            self._held.append(list(accumulate(change)))
        self.peak = max(max(held) for held in self._held)

    def tighten(self) -> None:
        """Tighten both ends: before the first B0 on rank 0, and after its last F0."""
        first, last = self.slots[0][_B0][0], self.slots[0][_F0][-1]
        acts = sorted(
            (slot, rank, kind, index)
            for rank, slots in enumerate(self.slots)
            for kind, row in enumerate(slots)
            for index, slot in enumerate(row)
            if (slot, rank) < (first, 0) or (slot, rank) > (last, 0)
        )
        for slot, rank, kind, index in acts:
            self._move(rank, kind, index, slot)

    def _move(self, rank: int, kind: int, index: int, slot: int) -> None:
        """Move an action to the earliest free slot that keeps its dependencies and the peak."""
        busy, held = self._busy[rank], self._held[rank]
        earliest = self._after(rank, kind, index) + 1
        if kind in (_F0, _F1):  # holds from the new slot on
            start = slot
            while start > earliest and held[start - 1] < self.peak:
                start -= 1
            earliest = start
        target = next((s for s in range(earliest, slot) if not busy[s]), slot)
        if target == slot:
            return
        busy[slot], busy[target] = False, True
        self.slots[rank][kind][index] = target
        if kind in (_B1, _B0):
            self._backward[rank].remove(slot)
            insort(self._backward[rank], target)
        else:
            change = -1 if kind == _W else 1
            held[target:slot] = [chunks + change for chunks in held[target:slot]]

    def _after(self, rank: int, kind: int, index: int) -> int:
        """The last slot of an action's dependencies; -1 if there are none."""
        if kind == _W:
            before = [self._backward[rank][index]]
        else:
            neighbour = rank - 1 if kind in (_F0, _B1) else rank + 1
            before = [-1]
            if neighbour in range(len(self.slots)):
                before.append(self.slots[neighbour][kind][index])
            if kind != _F0:
                before.append(self.slots[rank][kind - 1][index])
        if index:
            before.append(self.slots[rank][kind][index - 1])
        return max(before)


def _fill(busy: list[bool], backward: list[int]) -> list[int]:
    """Put a W in the next free slot after each B."""
    weights: list[int] = []
    slot = 0
    for after in backward:
        slot = max(slot, after) + 1
        while busy[slot]:
            slot += 1
        busy[slot] = True
        weights.append(slot)
    return weights
