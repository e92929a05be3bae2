"""Counts the microbatches that a rank holds during each pipeline action, independent of sizes.

The same program serves thousands of layouts, and in steady state it repeats itself. So it is
analysed once for all of them, at a length at which it reaches the steady state.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.layout import Layout
from fivefold.pipeline.ir import COMPUTE, Act, Kind, Piece, Program
from fivefold.pipeline.order import Order

WARM_UP, FIRST_BACKWARD, STEADY = "end of the warm-up", "first backward", "steady state"
_PHASES = (WARM_UP, FIRST_BACKWARD, STEADY)


class RunningAct(NamedTuple):
    """A running action, for any microbatch.

    Attributes:
        kind: kind of action.
        stage: index of the stage.
        light: whether it is a forward that keeps only its input.
        first: whether no earlier action computes weight gradients of the stage; of a B, whether it
            is the stage's first.
        last: whether no later one does.
    """

    kind: Kind
    stage: int
    light: bool
    first: bool
    last: bool


Acts = tuple[RunningAct, ...]
"""The running action, or the two that overlap."""

Kids = tuple[Act, ...]
"""A compute action, or the two that overlap, as a program has them."""


@dataclass(frozen=True)
class HeldMicrobatches:
    """The microbatches that a rank with S stages holds during each of its N actions, in order.

    Attributes:
        running: the distinct kinds of running actions.
        which: [N] index into `running`.
        backwards: [N] number of backwards so far, this action included, counted up to 2.
        kept: [N, S] microbatches between their forward, or R, and the end of their B.
        inputs: [N, S] microbatches between a forward that keeps only its input, and their R.
        waiting: [N, S] microbatches between their B and the end of their W.
        with_dx: [N, S] 1 from the end of a B to that of the next W, and in every W, in which it is
            2 if several Bs came before it; else 0.
        only_forwards: [N, S] 1 until the end of the stage's first B or BW, else 0.
        unmade: [N, S] 1 until the end of the stage's first BW or W, from which on it has weight
            gradients, else 0.
    """

    running: tuple[Acts, ...]
    which: NDArray[np.intp]
    backwards: NDArray[np.intp]
    kept: NDArray[np.float64]
    inputs: NDArray[np.float64]
    waiting: NDArray[np.float64]
    with_dx: NDArray[np.float64]
    only_forwards: NDArray[np.float64]
    unmade: NDArray[np.float64]

    def phases(self) -> Iterator[tuple[str, NDArray[np.intp]]]:
        """The phases of the step that occur, each with the indices of its actions."""
        for number, name in enumerate(_PHASES):
            found = np.flatnonzero(self.backwards == number)
            if len(found):
                yield name, found

    def phase(self, moment: int) -> str:
        """The phase of the step to which an action belongs."""
        return _PHASES[int(self.backwards[moment])]


def moments(
    layout: Layout, *, splits_backward: bool, num_microbatches: int | None = None
) -> tuple[HeldMicrobatches, ...]:
    """The microbatches that each pipeline rank holds during its actions.

    Args:
        layout: layout whose program is analysed.
        splits_backward: whether dX is sent before dW is computed.
        num_microbatches: microbatches of the program; None: as many as reach the steady state.

    Raises:
        ConfigError: the schedule cannot take that many microbatches.
    """
    order = layout.order(num_microbatches or layout.enough_microbatches)
    return _moments(order, pairs=layout.overlaps_pairs, eager=splits_backward)


@lru_cache(maxsize=256)
def _moments(order: Order, *, pairs: bool, eager: bool) -> tuple[HeldMicrobatches, ...]:
    program = order.executed(pairs=pairs, eager=eager)
    return tuple(_swept(program, rank) for rank in range(program.num_ranks))


def _swept(program: Program, rank: int) -> HeldMicrobatches:
    """The microbatches held during each compute action of a rank."""
    acts = [act.elementary for act in program.ranks[rank] if act.kind in COMPUTE]
    stages = program.stages_of(rank)
    again = {kid.piece for kids in acts for kid in kids if kid.kind is Kind.R}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    first_back: dict[int, int] = {}
    backwards, count = [], 0
    for number, kids in enumerate(acts):
        for kid in kids:
            if kid.kind in (Kind.W, Kind.BW):
                first.setdefault(kid.stage, number)
                last[kid.stage] = number
            if kid.kind in (Kind.B, Kind.BW):
                first_back.setdefault(kid.stage, number)
                count += 1
        backwards.append(min(count, 2))
    running: dict[Acts, int] = {}
    which = []
    for number, kids in enumerate(acts):
        doing = tuple(
            RunningAct(
                kid.kind,
                kid.stage,
                kid.kind is Kind.F and kid.piece in again,
                number <= (first_back if kid.kind is Kind.B else first).get(kid.stage, number),
                last.get(kid.stage) == number,
            )
            for kid in kids
        )
        which.append(running.setdefault(doing, len(running)))
    come, left = _changes(program, acts, stages, again)
    come[:, 1:] += left[:, :-1]
    kept, inputs, waiting = np.cumsum(come, axis=1)
    index = np.array(which, np.intp), np.array(backwards, np.intp)
    numbers, most = np.arange(len(acts))[:, None], len(acts)
    only_forwards, unmade = (
        (numbers <= [of.get(stage, most) for stage in stages]).astype(np.float64)
        for of in (first_back, first)
    )
    with_dx = _with_dx(acts, stages)
    return HeldMicrobatches(
        tuple(running), *index, kept, inputs, waiting, with_dx, only_forwards, unmade
    )


def _with_dx(acts: Sequence[Kids], stages: Sequence[int]) -> NDArray[np.float64]:
    """As `HeldMicrobatches` has it."""
    result = np.zeros((len(acts), len(stages)))
    place = {stage: at for at, stage in enumerate(stages)}
    backs = [0] * len(stages)  # since the stage's last W
    for number, kids in enumerate(acts):
        for kid in kids:
            if kid.kind is Kind.B:
                at = place[kid.stage]
                if not backs[at]:
                    result[number + 1 :, at] = 1
                backs[at] += 1
            elif kid.kind is Kind.W:
                at = place[kid.stage]
                result[number, at], backs[at] = 1 + (backs[at] > 1), 0
                result[number + 1 :, at] = 0
    return result


def _changes(
    program: Program, acts: Sequence[Kids], stages: Sequence[int], again: Container[Piece]
) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]:
    """[3, N, S] microbatches that are kept, kept by their inputs, or wait for their dW from an
    action on; and the change of these after it."""
    place = {stage: at for at, stage in enumerate(stages)}
    splits = {kid.piece for kids in acts for kid in kids if kid.kind is Kind.W}
    size = len(acts) * len(place)
    # Cells (kept, inputs or waiting; action; stage) in which a slice is added before the action,
    # is added after it, is removed after it, and in which a part of its dW is removed.
    before: list[int] = []
    after: list[int] = []
    gone: list[int] = []
    parts: list[int] = []
    for number, kids in enumerate(acts):
        for kid in kids:
            cell = number * len(place) + place[kid.stage]
            if kid.kind is Kind.F:
                before.append(size + cell if kid.piece in again else cell)
            elif kid.kind is Kind.W:
                parts.append(2 * size + cell)
            elif kid.kind is Kind.R:
                before.append(cell)
                gone.append(size + cell)
            else:
                gone.append(cell)
                if kid.piece in splits:
                    after.append(2 * size + cell)
    share = 1 / program.num_slices
    come, later, left, done = (
        share * np.bincount(np.array(cells, np.intp), minlength=3 * size).reshape(3, len(acts), -1)
        for cells in (before, after, gone, parts)
    )
    return come, later - left - done / program.num_weight_parts
