"""The layout of a checked configuration: its grid, its pipeline stages and its program."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from fivefold.config.config import Config
from fivefold.config.memory import MemoryConfig
from fivefold.mesh.grid import Grid
from fivefold.mesh.nodes import NodeSizes
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.costs.modelled import modelled_problem
from fivefold.pipeline.ir import Kind, Program, stages_on
from fivefold.pipeline.list_scheduler import Problem
from fivefold.pipeline.lowering import lower
from fivefold.pipeline.order import Order
from fivefold.pipeline.rules import SYNTHESISED
from fivefold.pipeline.schedules.registry import Schedule, known_of, with_copies
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.split.stages import Split, StageSpec


@dataclass(frozen=True)
class Layout:
    """A checked configuration on a number of ranks.

    Attributes:
        config: the configuration, with every inferred degree filled in.
        grid: the ranks and their coordinates on the mesh.
        split: the pipeline stages.
        schedule: name of the pipeline schedule.
        num_microbatches: microbatches of an optimizer step in each pipeline.
    """

    config: Config
    grid: Grid
    split: Split
    schedule: str
    num_microbatches: int

    @property
    def known(self) -> Schedule:
        """The properties of the schedule."""
        return known_of(self.schedule)

    @property
    def num_copies(self) -> int:
        """Copies of the model in the pipeline: 2 for schedules that enter it from both ends."""
        return self.known.num_copies

    def stages_of(self, pp_rank: int) -> dict[int, StageSpec]:
        """The stages of a pipeline rank by index in the program, those of a second copy last."""
        stages = self.split.stages
        placement = with_copies(self.split.placement, self.num_copies)
        return {s: stages[s % len(stages)] for s in stages_on(placement, pp_rank)}

    def memory_of(self, stage: int) -> MemoryConfig:
        """The memory settings of a stage of the program."""
        return self.config.memory.of_stage(stage % len(self.split.stages))

    def states_into(self, stage: int) -> int:
        """Number of hidden states per token that enter a stage of the program in training."""
        return self.split.states_into(stage % len(self.split.stages))

    @property
    def node_sizes(self) -> tuple[NodeSizes, NodeSizes]:
        """Sizes of ZeRO++'s node groups: for dense parameters, and for experts."""
        parallel = self.config.parallel
        return NodeSizes.of(parallel), NodeSizes.of_experts(parallel, self.grid)

    @property
    def defers_weights(self) -> bool:
        """Whether some dX is computed before its dW."""
        parallel = self.config.parallel
        early = self.grid.pp > 1 and parallel.pipeline_dx_first
        return parallel.delay_wgrad_compute or early or _defers(self.order())

    @property
    def sends_dx_first(self) -> bool:
        """Whether a dX outside of pairs is sent before its dW, even within one action."""
        return self.config.parallel.pipeline_dx_first and self.defers_weights

    @property
    def fuses_accumulation(self) -> bool:
        """Whether products add weight gradients directly to those of earlier microbatches."""
        training, parallel = self.config.training, self.config.parallel
        keeps = not parallel.sharding.splits_gradients  # which leave with every microbatch
        again = self.num_microbatches * parallel.num_sequence_slices > 1
        return training.gradient_accumulation_fusion and keeps and again

    @property
    def fills_messages(self) -> bool:
        """Whether products write weight gradients directly into the buffers that ranks sum."""
        return self.grid.dp * self.grid.cp > 1 and not self.config.gathers_weights()

    @property
    def owns_linears(self) -> bool:
        """Whether linears are autograd functions of ours: for gradients alone, none that breaks a
        graph of torch.compile, or whose product is recomputed where PyTorch's would save it."""
        compiled, memory = self.config.training.compile, self.config.memory
        keeps = self.fuses_accumulation or self.fills_messages
        keeps = keeps and not compiled and memory.recompute_granularity is None
        return self.grid.tp > 1 or self.defers_weights or keeps

    @property
    def runs_pairs(self) -> bool:
        """Whether the schedule pairs forwards with backwards."""
        return self.known.pairs

    @property
    def overlaps_pairs(self) -> bool:
        """Whether the halves of a pair run at the same time, which hides experts' messages."""
        return self.config.parallel.overlap_moe_expert_parallel_comm

    @property
    def alternates_within_stages(self) -> bool:
        """Whether a forward and a backward of the same stage run in turns."""
        rows = self._computes(self.enough_microbatches).ranks if self.overlaps_pairs else ()
        return any(a.kids and a.kids[0].stage == a.kids[1].stage for row in rows for a in row)

    @property
    def gathers_once(self) -> bool:
        """Whether the program says when to gather, and never gathers a stage twice in a step."""
        says = self.config.parallel.pipeline_max_unsharded_stages is not None
        every = (act for row in self.program().ranks for act in row) if says else ()
        often = Counter(act.stage for act in every if act.kind is Kind.UNSHARD)
        return says and all(count == 1 for count in often.values())

    @property
    def enough_microbatches(self) -> int:
        """Microbatches after which no rank holds anything new."""
        group = self.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        return self.known.enough(self.grid.pp, self.num_microbatches, group)

    def program(
        self,
        num_microbatches: int | None = None,
        *,
        forward_only: bool = False,
        eager: bool | None = None,
        costs: Costs | None = None,
    ) -> Program:
        """The lowered program of a training step, or of an evaluation.

        Every other module asks here for the program that runs: nothing else lowers one.

        Args:
            num_microbatches: microbatches of the program; None: those of the layout.
            forward_only: whether to build the program of an evaluation.
            eager: whether a dX outside of pairs is sent before its dW is computed; None: as it
                runs (`sends_dx_first`).
            costs: times by which messages are ordered; None: one unit for each compute action.

        Raises:
            ConfigError: the schedule cannot take that many microbatches.
        """
        gathered = self.config.parallel.pipeline_max_unsharded_stages
        return _lowered(
            self.order(num_microbatches),
            pairs=self.overlaps_pairs,
            eager=self.sends_dx_first if eager is None else eager,
            forward_only=forward_only,
            costs=costs,
            unshard=gathered is not None or self.alternates_within_stages,
            max_unsharded=gathered,
        )

    def recomputed(self, num_microbatches: int | None = None) -> Counter[int]:
        """Number of microbatches of each stage whose forward is repeated in a step."""
        limited = self.config.memory.recompute_in_flight_limit is not None
        acts = (a for row in self._computes(num_microbatches).ranks for a in row) if limited else ()
        return Counter(act.stage for act in acts if act.kind is Kind.R and act.slice == 0)

    def _computes(self, num_microbatches: int | None) -> Program:
        """The compute actions of a training step, before messages are added."""
        order = self.order(num_microbatches)
        return order.executed(pairs=self.overlaps_pairs, eager=self.sends_dx_first)

    @property
    def hidden_shape(self) -> tuple[int, int]:
        """[T, H] of the message that a stage sends for a microbatch, or for a slice of it."""
        config, parallel = self.config, self.config.parallel
        tokens = config.rank_tokens // parallel.num_sequence_slices // parallel.token_parts
        return tokens, config.model.hidden_size

    def order(self, num_microbatches: int | None = None) -> Order:
        """The schedule and all of its parameters, from which the program can be built.

        Raises:
            ConfigError: not even one microbatch fits under the limit of a synthesised schedule.
        """
        parallel = self.config.parallel
        return Order(
            self.schedule,
            self.split.placement,
            num_microbatches or self.num_microbatches,
            parallel.microbatch_group_size_per_virtual_pipeline_stage,
            parallel.num_sequence_slices,
            self.scheduling_problem(num_microbatches) if self.schedule == SYNTHESISED else None,
            self.config.memory.recompute_in_flight_limit,
        )

    def scheduling_problem(self, num_microbatches: int | None) -> Problem:
        """The stages, costs and limits for which a synthesised schedule is searched.

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


@lru_cache(maxsize=4096)
def _defers(order: Order) -> bool:
    """Whether some dX of a schedule is computed before its dW. Planning asks it of the same few
    schedules thousands of times, and their programs are long."""
    return any(act.kind is Kind.B for row in order.program().ranks for act in row)


@lru_cache(maxsize=2)
def _lowered(
    order: Order,
    *,
    pairs: bool,
    eager: bool,
    forward_only: bool,
    costs: Costs | None,
    unshard: bool,
    max_unsharded: int | None,
) -> Program:
    """The program that ranks run. It is one for all ranks, of which a rehearsal runs many."""
    program = order.executed(pairs=pairs, eager=eager, forward_only=forward_only)
    return with_sharding_actions(
        lower(program, costs), unshard=unshard, max_unsharded=max_unsharded
    )
