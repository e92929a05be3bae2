"""The schedule settings that determine which compute actions the pipeline ranks run, in order."""

from dataclasses import dataclass

from fivefold.pipeline.costs.modelled import searched_program
from fivefold.pipeline.holding import with_recompute
from fivefold.pipeline.ir import Program
from fivefold.pipeline.list_scheduler import Problem
from fivefold.pipeline.lowering import executed
from fivefold.pipeline.schedules.registry import build_program


@dataclass(frozen=True)
class Order:
    """The settings that determine a program; hashable, for caching.

    Attributes:
        schedule: a key of `SCHEDULES`, unless the schedule is searched for.
        placement: stage -> rank.
        num_microbatches: microbatches per step.
        group_size: as in `build_program`.
        num_slices: slices of each sequence.
        problem: problem for which the schedule is searched; None: not searched.
        recompute_limit: maximum number of microbatches whose activations a rank keeps; None: all in
            flight.
    """

    schedule: str
    placement: tuple[int, ...]
    num_microbatches: int
    group_size: int | None = None
    num_slices: int = 1
    problem: Problem | None = None
    recompute_limit: int | None = None

    def program(self, *, forward_only: bool = False) -> Program:
        """The program as its schedule makes it: without messages, backwards in one action.

        Args:
            forward_only: make the program of an evaluation.

        Raises:
            ConfigError: the schedule cannot run this number of microbatches.
        """
        if self.problem is not None and not forward_only:
            return searched_program(self.problem)
        return build_program(
            # A program of forwards alone leaves nothing to search.
            self.schedule if self.problem is None else "gpipe",
            self.placement,
            self.num_microbatches,
            group_size=self.group_size,
            num_slices=self.num_slices,
            forward_only=forward_only,
        )

    def executed(self, *, pairs: bool, eager: bool, forward_only: bool = False) -> Program:
        """The program as its ranks run it.

        Args:
            pairs: whether the halves of a pair overlap; otherwise they run in sequence.
            eager: whether a dX outside pairs is sent before its dW is computed.
            forward_only: make the program of an evaluation.

        Raises:
            ConfigError: the schedule cannot run this number of microbatches.
        """
        program = executed(self.program(forward_only=forward_only), pairs=pairs, eager=eager)
        limit = self.recompute_limit
        return program if limit is None else with_recompute(program, limit)
