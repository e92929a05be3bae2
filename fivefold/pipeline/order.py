"""Which compute acts the ranks of a pipeline run, and in which order: what it follows from."""

from dataclasses import dataclass

from fivefold.pipeline.holding import with_recompute
from fivefold.pipeline.ir import Program
from fivefold.pipeline.list_scheduler import Problem
from fivefold.pipeline.lowering import executed
from fivefold.pipeline.modelled import searched_program
from fivefold.pipeline.schedules.registry import build_program


@dataclass(frozen=True)
class Order:
    """All that the acts of a program follow from, to be looked up by.

    Attributes:
        schedule: a key of `SCHEDULES`, unless it is searched for.
        placement: stage -> rank.
        num_microbatches: microbatches of a step.
        group_size: as `build_program` has it.
        num_slices: slices of each sequence.
        problem: what the schedule is searched for; None: it is not.
        recompute_limit: microbatches whose activations a rank holds at most; None: all in flight.
    """

    schedule: str
    placement: tuple[int, ...]
    num_microbatches: int
    group_size: int | None = None
    num_slices: int = 1
    problem: Problem | None = None
    recompute_limit: int | None = None

    def program(self, *, forward_only: bool = False) -> Program:
        """As its schedule makes it: no messages yet, both halves of a backward in one.

        Args:
            forward_only: of an evaluation.

        Raises:
            ConfigError: the schedule cannot take so many microbatches.
        """
        if self.problem is not None and not forward_only:
            return searched_program(self.problem)
        return build_program(
            # Forwards alone have nothing to be searched for.
            self.schedule if self.problem is None else "gpipe",
            self.placement,
            self.num_microbatches,
            group_size=self.group_size,
            num_slices=self.num_slices,
            forward_only=forward_only,
        )

    def executed(self, *, pairs: bool, eager: bool, forward_only: bool = False) -> Program:
        """As its ranks run it.

        Args:
            pairs: whether the halves of a pair run beside each other, or else in turn.
            eager: whether a dX that is not in a pair leaves before its dW is computed.
            forward_only: of an evaluation.

        Raises:
            ConfigError: the schedule cannot take so many microbatches.
        """
        program = executed(self.program(forward_only=forward_only), pairs=pairs, eager=eager)
        limit = self.recompute_limit
        return program if limit is None else with_recompute(program, limit)
