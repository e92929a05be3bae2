"""Registry of pipeline schedules by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from fivefold.errors import ConfigError, Mistake, Mistakes, did_you_mean
from fivefold.pipeline.ir import Kind, Program, loop_placement, v_placement
from fivefold.pipeline.schedules.dualpipe import dualpipe, dualpipe_v
from fivefold.pipeline.schedules.fixed import (
    Orders,
    Task,
    combined_1f1b,
    eager_one_f_one_b,
    gpipe,
    groups_fit,
    interleaved_1f1b,
    one_f_one_b,
    sliced_1f1b,
)
from fivefold.pipeline.schedules.limits import (
    Limits,
    at_once,
    drained_v,
    in_a_smaller_v,
    in_a_v,
    in_turn,
)
from fivefold.pipeline.schedules.v_blocks import v_half, v_min
from fivefold.pipeline.schedules.zero_bubble import interleaved_zb, zb_h1, zb_h2, zb_v


class Shape(Enum):
    """Required placement of stages on ranks."""

    ANY = "any placement"
    LINE = "runs one stage per rank"
    LOOP = "needs stage i on rank i % {ranks}"
    V = "needs two stages per rank, placed in a V"

    def fits(self, placement: tuple[int, ...]) -> bool:
        """Whether a placement has this shape."""
        ranks, stages = max(placement) + 1, len(placement)
        match self:
            case Shape.LINE:
                return placement == loop_placement(ranks, ranks)
            case Shape.LOOP:
                return placement == loop_placement(ranks, stages)
            case Shape.V:
                return placement == v_placement(ranks, 2 * ranks)
        return True


@dataclass(frozen=True)
class Schedule:
    """Properties of a schedule that are known before it runs.

    Attributes:
        generate: makes the compute actions of every rank; raises ConfigError if the schedule does
            not support the task.
        about: one-line description.
        shape: shape of the placements it supports.
        num_copies: copies of the model that it keeps; the second is placed on the ranks in reverse.
        slices: whether it supports sequence slices.
        pairs: whether it overlaps a forward with a backward.
        groups: whether a rank runs a group of microbatches on one stage before the next stage.
        steady: whether it has a steady state with a constant number of activations.
        fused: whether each dW follows its dX at once.
        fewest: minimum number of microbatches per rank.
        limits: activation memory limits of its ranks.
    """

    generate: Callable[[Task], Orders]
    about: str
    shape: Shape
    num_copies: int = 1
    slices: bool = False
    pairs: bool = False
    groups: bool = False
    steady: bool = True
    fused: bool = False
    fewest: int = 0
    limits: Limits = Limits()

    def takes(self, ranks: int, microbatches: int, group: int | None) -> bool:
        """Whether it can run this many microbatches; `generate` checks the rest.

        Args:
            ranks: pipeline-parallel size.
            microbatches: microbatches per step.
            group: microbatch group size, if the schedule has groups; None: the number of ranks.
        """
        if self.groups:
            return groups_fit(ranks, microbatches, group or ranks)
        whole = microbatches % self.num_copies == ranks % self.num_copies == 0
        return whole and microbatches >= self.fewest * ranks

    def enough(self, ranks: int, microbatches: int, group: int | None) -> int:
        """Number of microbatches after which memory no longer changes.

        That is all of them if there is no steady state, or none is reached.

        Args:
            ranks: pipeline-parallel size.
            microbatches: microbatches per step.
            group: microbatch group size, if the schedule has groups; None: the number of ranks.
        """
        round_of = group or ranks
        if not self.steady or microbatches % round_of:
            return microbatches
        return min(microbatches, 3 * max(ranks, round_of))


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "gpipe": Schedule(
            gpipe,
            "all forwards, then all backwards: holds every microbatch",
            Shape.ANY,
            steady=False,
            fused=True,
            limits=Limits(deferred=at_once),
        ),
        "looped_bfs": Schedule(
            gpipe,
            "gpipe over several stages a rank, breadth first",
            Shape.LOOP,
            steady=False,
            fused=True,
            limits=Limits(deferred=at_once),
        ),
        "1f1b": Schedule(
            one_f_one_b,
            "one forward, one backward: the usual one, any number of microbatches",
            Shape.LINE,
            fused=True,
            limits=Limits(lambda at: at.left, at_once, stages=in_turn),
        ),
        "eager_1f1b": Schedule(
            eager_one_f_one_b,
            "1f1b with twice the warm-up, which hides slow messages",
            Shape.LINE,
            fused=True,
            limits=Limits(deferred=at_once),
        ),
        "sliced_1f1b": Schedule(
            sliced_1f1b,
            "1f1b over slices of each sequence: a shorter fill",
            Shape.LINE,
            slices=True,
        ),
        "interleaved_1f1b": Schedule(
            interleaved_1f1b,
            "1f1b over several stages a rank: a smaller bubble, more memory",
            Shape.LOOP,
            groups=True,
            fused=True,
            limits=Limits(lambda at: 2 * at.left - 1 + at.others, at_once, stages=in_turn),
        ),
        "combined_1f1b": Schedule(
            combined_1f1b,
            "interleaved, a forward and a backward run as one (expert parallelism)",
            Shape.LOOP,
            pairs=True,
            groups=True,
            limits=Limits(
                lambda at: 2 * at.left + at.others,
                at_once,
                alone=lambda at: 2 * at.left - 1 + at.others,
                stages=in_turn,
            ),
        ),
        "zb_h1": Schedule(
            zb_h1,
            "dW fills the bubble, at the memory of 1f1b",
            Shape.LINE,
            limits=Limits(lambda at: at.left, lambda at: at.rank + 1, stages=in_turn),
        ),
        "zb_h2": Schedule(
            zb_h2,
            "no bubble in the span of a rank, at twice the memory",
            Shape.LINE,
            limits=Limits(lambda at: 2 * at.left - 1, lambda at: 2 * at.rank + 1, stages=in_turn),
        ),
        "interleaved_zb": Schedule(
            interleaved_zb,
            "zb_h1 over several stages a rank",
            Shape.LOOP,
            groups=True,
            limits=Limits(lambda at: at.left + at.others, lambda at: at.rank + 1, stages=in_turn),
        ),
        "zb_v": Schedule(
            zb_v,
            "two stages a rank in a V: a smaller bubble at the memory of 1f1b",
            Shape.V,
            limits=Limits(
                lambda at: 2 * at.ranks,
                stages=in_a_v,
                drained=drained_v(lambda rank: [rank + 1, rank]),
            ),
        ),
        "v_half": Schedule(
            v_half,
            "a V at half the memory of 1f1b",
            Shape.V,
            limits=Limits(lambda at: 2 * ((at.ranks + 2) // 2), stages=in_a_smaller_v(spare=0)),
        ),
        "v_min": Schedule(
            v_min,
            "a V at a third of the memory of 1f1b",
            Shape.V,
            limits=Limits(lambda at: 2 * ((at.ranks + 4) // 3), stages=in_a_smaller_v(spare=1)),
        ),
        "dualpipe": Schedule(
            dualpipe,
            "two copies of the model, microbatches from both ends",
            Shape.LINE,
            num_copies=2,
            pairs=True,
            fewest=2,
        ),
        "dualpipe_v": Schedule(
            dualpipe_v,
            "dualpipe's order in a V, with one copy of the model",
            Shape.V,
            pairs=True,
            fewest=2,
            limits=Limits(
                lambda at: 2 * at.ranks + 1,
                alone=lambda at: 3 * at.ranks - 1 - at.rank,
                stages=in_a_v,
                drained=drained_v(lambda rank: [rank // 2 + 1, (rank + 1) // 2]),
            ),
        ),
    }
)

SEARCHED = Schedule(
    gpipe,
    "searched for; forwards only run as in gpipe, since there is nothing to choose",
    Shape.ANY,
    steady=False,
)
"""Properties of the searched schedule, which is not listed."""


def known_of(name: str) -> Schedule:
    """Properties of a schedule, listed or searched for."""
    return SCHEDULES.get(name, SEARCHED)


def build_program(
    name: str,
    placement: Sequence[int],
    num_microbatches: int,
    *,
    group_size: int | None = None,
    num_slices: int = 1,
    forward_only: bool = False,
) -> Program:
    """The compute-only program of a schedule.

    Args:
        name: a key of `SCHEDULES`.
        placement: stage -> rank; every rank from 0 to the highest holds a stage. A schedule with
            two copies of the model adds the second itself.
        num_microbatches: microbatches per step.
        group_size: consecutive microbatches that run through one stage before the rank's next one
            (interleaved schedules only); None: the number of ranks.
        num_slices: causal slices of each sequence (sliced_1f1b only).
        forward_only: make the evaluation program: the schedule's forwards in the same order.

    Raises:
        ConfigError: an unknown name, or a task that the schedule does not support.
    """
    _check_task(name, placement, num_microbatches, group_size, num_slices)
    schedule = SCHEDULES[name]
    copies = with_copies(tuple(placement), schedule.num_copies)
    num_ranks = max(placement) + 1
    task = Task(copies, num_microbatches, group_size or num_ranks, num_slices, forward_only)
    orders = schedule.generate(task)
    if forward_only:
        orders = [
            [kid for act in order for kid in act.elementary if kid.kind is Kind.F]
            for order in orders
        ]
    return Program(
        task.placement,
        num_microbatches,
        tuple(tuple(order) for order in orders),
        forward_only=forward_only,
        num_copies=schedule.num_copies,
    )


def with_copies(placement: tuple[int, ...], num_copies: int) -> tuple[int, ...]:
    """The placement of several copies of a model; the second is on the ranks in reverse."""
    return placement + placement[::-1] * (num_copies - 1)


def _check_task(
    name: str,
    placement: Sequence[int],
    num_microbatches: int,
    group_size: int | None,
    num_slices: int,
) -> None:
    """Report everything that can be checked before a schedule is made."""
    if name not in SCHEDULES:
        raise ConfigError(
            Mistake(
                f"unknown pipeline schedule {name!r}{did_you_mean(name, SCHEDULES)}",
                works=tuple(SCHEDULES),
            )
        )
    schedule = SCHEDULES[name]
    mistakes = Mistakes()
    if num_microbatches < 1:
        mistakes.add(f"a step needs at least 1 microbatch, not {num_microbatches}")
    if set(placement) != set(range(max(placement, default=0) + 1)):
        mistakes.add(f"every rank needs a stage, but the stages lie on ranks {list(placement)}")
    else:
        _check_shape(name, schedule.shape, tuple(placement), mistakes)
    if group_size is not None and group_size < 1:
        mistakes.add(f"a group needs at least 1 microbatch, not {group_size}")
    if num_slices < 1 or (num_slices > 1 and not schedule.slices):
        cutting = [other for other in SCHEDULES if SCHEDULES[other].slices]
        mistakes.add(
            f"{name} cannot cut a sequence into {num_slices} slices",
            works=("1 slice", *(cutting if num_slices > 1 else ())),
        )
    mistakes.raise_if_any()


def _check_shape(name: str, shape: Shape, placement: tuple[int, ...], mistakes: Mistakes) -> None:
    if shape.fits(placement):
        return
    ranks = max(placement) + 1
    if shape is Shape.LOOP:
        here = f"here the stages lie on ranks {' '.join(str(rank) for rank in placement)}"
    else:
        here = f"here are {len(placement)} stages on {ranks} ranks"
        if len(placement) == (ranks if shape is Shape.LINE else 2 * ranks):
            here += f", on {' '.join(str(rank) for rank in placement)}"
    ways = {Shape.LOOP: "a layout with the prefix loop:", Shape.V: "a layout with the prefix v:"}
    mistakes.add(
        f"the {name} schedule {shape.value.format(ranks=ranks)}, {here}",
        works=[
            *(way for fitting, way in ways.items() if fitting is shape),
            *(other for other, schedule in SCHEDULES.items() if schedule.shape.fits(placement)),
        ],
    )
