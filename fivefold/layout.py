"""What a checked configuration means: its grid, its stages and the program of its pipeline."""

from dataclasses import dataclass

from fivefold.config.config import Config
from fivefold.mesh.grid import Grid
from fivefold.pipeline.ir import Kind, Program, stages_on
from fivefold.pipeline.list_scheduler import Problem
from fivefold.pipeline.lowering import lower
from fivefold.pipeline.modelled import modelled_problem
from fivefold.pipeline.order import Order
from fivefold.pipeline.rules import SYNTHESISED
from fivefold.pipeline.schedules.registry import Schedule, known_of, with_copies
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.stages import Split, StageSpec


@dataclass(frozen=True)
class Layout:
    """What a checked configuration means on so many ranks.

    Attributes:
        config: configuration with every inferred degree filled in.
        grid: the ranks.
        split: the stages.
        schedule: name of the pipeline program.
        num_microbatches: per optimizer step and pipeline.
    """

    config: Config
    grid: Grid
    split: Split
    schedule: str
    num_microbatches: int

    @property
    def known(self) -> Schedule:
        """What is known of its schedule."""
        return known_of(self.schedule)

    @property
    def num_copies(self) -> int:
        """Copies of the model in the pipeline: 2 for schedules that enter it from both ends."""
        return self.known.num_copies

    def stages_of(self, pp_rank: int) -> dict[int, StageSpec]:
        """A rank's stages by their index in the program, those of a second copy last."""
        stages = self.split.stages
        placement = with_copies(self.split.placement, self.num_copies)
        return {s: stages[s % len(stages)] for s in stages_on(placement, pp_rank)}

    def states_into(self, stage: int) -> int:
        """Hidden states of a token that enter a stage of the program in training."""
        return self.split.states_into(stage % len(self.split.stages))

    @property
    def defers_weights(self) -> bool:
        """Whether some dX is computed, and may leave, before its dW."""
        alone = self.order().program().ranks[0] if self.grid.pp == 1 else ()
        return self.grid.pp > 1 or any(act.kind is Kind.B for act in alone)

    @property
    def runs_pairs(self) -> bool:
        """Whether the schedule pairs forwards with backwards."""
        return self.known.pairs

    @property
    def overlaps_pairs(self) -> bool:
        """Whether the halves of a pair run beside each other: experts' messages hide there."""
        return self.config.parallel.overlap_moe_expert_parallel_comm

    def program(
        self, num_microbatches: int | None = None, *, forward_only: bool = False
    ) -> Program:
        """The lowered program of a training step, or of an evaluation.

        Raises:
            ConfigError: the schedule cannot take that many microbatches.
        """
        # The executor runs the halves of a pair in turn: the second's messages may come later.
        program = self.order(num_microbatches).executed(
            pairs=False, eager=self.defers_weights, forward_only=forward_only
        )
        gathered = self.config.parallel.pipeline_max_unsharded_stages
        return with_sharding_actions(
            lower(program), unshard=gathered is not None, max_unsharded=gathered
        )

    def order(self, num_microbatches: int | None = None) -> Order:
        """What the program of so many microbatches follows from.

        Raises:
            ConfigError: not even one microbatch fits under the limit of a synthesised schedule.
        """
        parallel = self.config.parallel
        searched = self.schedule == SYNTHESISED
        return Order(
            self.schedule,
            self.split.placement,
            num_microbatches or self.num_microbatches,
            parallel.microbatch_group_size_per_virtual_pipeline_stage,
            parallel.num_sequence_slices,
            self.scheduling_problem(num_microbatches) if searched else None,
        )

    def scheduling_problem(self, num_microbatches: int | None = None) -> Problem:
        """What a synthesised schedule is searched for.

        Raises:
            ConfigError: not even one microbatch fits under the limit.
        """
        return modelled_problem(
            self.config.model,
            self.config.training.seq_length,
            self.split.stages,
            self.split.placement,
            num_microbatches or self.num_microbatches,
            self.config.parallel.pipeline_in_flight_limit,
        )
