"""Computes the makespan of a pipeline program for many sets of costs at once.

A search needs some thousand makespans. Only programs of few microbatches are built and walked,
since after the warm-up every further round of microbatches adds the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from fivefold.layout import Layout
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.ir import Program
from fivefold.pipeline.order import Order
from fivefold.pipeline.rules import SYNTHESISED
from fivefold.pipeline.schedules.limits import Place
from fivefold.pipeline.schedules.registry import known_of
from fivefold.predict.data_parallel.per_step import StepTransfers
from fivefold.predict.program.least import rank_bounds
from fivefold.predict.program.walk import LeveledProgram, Values


@lru_cache(maxsize=256)
def leveled_program(order: Order, *, pairs: bool, eager: bool) -> LeveledProgram:
    """The levels of a program; `Order.executed` describes `pairs` and `eager`."""
    return LeveledProgram.of(order.executed(pairs=pairs, eager=eager))


@dataclass(frozen=True)
class Clock:
    """Times the program of a layout by extrapolation from a few rounds of microbatches.

    Attributes:
        schedule: schedule of the program.
        group: microbatches in a group; None if the settings do not give it.
        microbatches: microbatches of the program.
        tables: shorter programs with their weights: the weighted sum of their makespans is the
            makespan of the program.
    """

    schedule: str
    group: int | None
    microbatches: int
    tables: tuple[tuple[LeveledProgram, float], ...]

    @classmethod
    def of(cls, layout: Layout, *, eager: bool) -> "Clock":
        """The clock of a layout.

        A round is the number of microbatches after which a schedule repeats itself: a group if the
        schedule has groups, two if the pipeline holds two copies of the model, else one. A
        synthesised schedule does not repeat itself, so all of it is walked.

        Args:
            layout: the layout.
            eager: whether a dX is sent before its dW is computed.
        """
        parallel, placement = layout.config.parallel, layout.split.placement
        total = layout.num_microbatches

        def table_of(microbatches: int) -> LeveledProgram:
            return leveled_program(
                layout.order(microbatches), pairs=layout.overlaps_pairs, eager=eager
            )

        if layout.schedule == SYNTHESISED:
            return cls(layout.schedule, None, total, ((table_of(total), 1.0),))
        group = parallel.microbatch_group_size_per_virtual_pipeline_stage
        ranks = layout.split.num_ranks
        in_groups = layout.known.groups or (len(placement) > ranks and placement[ranks] == 0)
        a_round = (group or ranks) if in_groups else layout.num_copies
        # If the halves of a pair run in turn, their waits for each other accumulate only late.
        in_turn = layout.runs_pairs and not layout.overlaps_pairs
        rounds = 2 if in_groups else -(-(2 * ranks + 2) * (4 if in_turn else 1) // a_round)
        if layout.config.memory.recompute_in_flight_limit is not None:
            # The microbatches that are recomputed recur with a period that differs between ranks,
            # so the whole repeats only late: over this many it is the same within 1 %.
            warm_up = a_round * rounds
            a_round *= -(-4 * ranks // a_round)
            rounds = -(-warm_up // a_round)
        short = total % a_round + a_round * rounds
        if total <= short + a_round:
            return cls(layout.schedule, group, total, ((table_of(total), 1.0),))
        more = (total - short) / a_round
        tables = (table_of(short), 1 - more), (table_of(short + a_round), more)
        return cls(layout.schedule, group, total, tables)

    def walk(
        self, costs: Sequence[Costs], sent: Sequence[tuple[int, StepTransfers]]
    ) -> tuple[list[float], list[float]]:
        """Seconds of the program for each set of costs, and by how much communication once a step
        lengthens it.

        A long program is lengthened by as much as the longest program that is walked.

        Args:
            costs: the sets.
            sent: numbers of sets, and what is sent once a step with them.
        """
        *shorter, (longest, share) = self.tables
        count, program = len(costs), longest.program
        ready, gathers = np.zeros((2, program.num_stages, count + len(sent)))
        for column, (_, each) in enumerate(sent, count):
            ready[:, column], gathers[:, column] = each.ready, each.gathers
        walked = longest.walk([*costs, *(costs[of] for of, _ in sent)], ready, gathers)
        seconds = share * walked.makespans[:count]
        found = seconds + sum(part * each.makespans(costs) for each, part in shorter)
        if shorter and program.num_copies == 1:
            found = np.maximum(found, self._least(program, costs))
        longer = []
        for column, (of, each) in enumerate(sent, count):
            starts, ends = walked.starts[:, column].tolist(), walked.ends[:, column].tolist()
            ended = max(float(walked.makespans[column]), each.arrived(starts, ends))
            longer.append(ended - float(walked.makespans[of]))
        return found.tolist(), longer

    def _least(self, program: Program, costs: Sequence[Costs]) -> Values:
        """[N] the largest lower bound of any rank of a program of one copy of the model, in
        seconds: a limit may show only after many microbatches."""
        placement, stages = np.array(program.placement), np.arange(program.num_stages)
        crossed = np.array([0, *np.cumsum(placement[1:] != placement[:-1])])
        held = placement == np.arange(program.num_ranks)[:, None]
        starts, virtual = held.argmax(axis=1)[:, None], len(placement) // len(held)
        numbers = {
            "held": held,
            "before": stages < starts,
            "own": stages == starts,
            "first": stages == 0,
            "ahead": held.cumsum(axis=1),
        }
        phases = [np.array([getattr(each, name) for each in costs]).T for name in "fbw"]
        owned = [program.stages_of(rank) for rank in range(len(held))]
        hidden = np.array([[_most_hidden(each, own) for each in costs] for own in owned])
        places = [Place(len(held), virtual, rank) for rank in range(len(held))]
        limits, known = known_of(self.schedule).limits, self.group is None or virtual == 1
        bounds = rank_bounds(
            lambda part, phase: numbers[part] @ phases[phase],
            self.microbatches * hidden,
            np.array([each.hop for each in costs]),
            program.num_slices,
            total=self.microbatches,
            deferred=np.array([[limits.deferred(place)] for place in places]),
            hops=crossed[starts],
            crossings=held @ (crossed[-1] - crossed)[:, None],
            chunks=self.microbatches * virtual,
            most=np.array([[limits.in_flight(place) if known else inf] for place in places]),
        )
        return np.max(bounds, axis=(0, 1))

    def hidden(self, costs: Costs) -> float:
        """Seconds that pairing saves compared with running the halves in turn, over all ranks."""
        return sum(share * table.hidden(costs) for table, share in self.tables)

    def repeated(self, costs: Costs) -> float:
        """Seconds, over all ranks, of whole-stage forwards that are repeated."""
        return sum(share * table.repeated(costs) for table, share in self.tables)


def _most_hidden(costs: Costs, own: Sequence[int]) -> float:
    """Most seconds that pairs can hide for a microbatch in these stages: each forward may have the
    partner that hides most."""
    if costs.fb is None:
        return 0.0
    backwards = [(stage, costs.b[stage] + costs.w[stage]) for stage in own]
    return sum(costs.f[s] - min(costs.fb[s][o] - alone for o, alone in backwards) for s in own)
