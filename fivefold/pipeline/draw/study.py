"""Schedule studies: a hypothetical pipeline (ranks, microbatches, times, memory) to schedule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf

from fivefold.errors import ConfigError, Mistake
from fivefold.pipeline.bounds import lower_bounds, work_bound
from fivefold.pipeline.costs.costs import Costs, Footprint
from fivefold.pipeline.costs.measured import MeasuredAct, measured_program, median_costs
from fivefold.pipeline.costs.parts import ModelPart
from fivefold.pipeline.draw.chart import Chart
from fivefold.pipeline.ir import Program, loop_placement, v_placement
from fivefold.pipeline.list_scheduler import Problem
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.rules import AUTO
from fivefold.pipeline.schedules.registry import SCHEDULES, Shape, build_program
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.synthesise import synthesise
from fivefold.units import human_seconds

_LEAST = 1e-6  # minimum time of a stage, as a share of the mean stage


@dataclass(frozen=True)
class Study:
    """A pipeline to schedule.

    Attributes:
        num_ranks: pipeline-parallel size.
        num_microbatches: microbatches per step.
        times: F, dX and dW times of a rank per microbatch, shared equally by its stages.
        hop: latency from the end of an action to the arrival of its result on the next rank.
        cap: maximum number of microbatches that a rank holds; one of V stages counts 1/V.
        num_chunks: stages per rank; None: what the schedule needs, or two.
        num_slices: slices of each sequence.
        placement: stage -> rank, if a model was split; None: the schedule's placement.
        stages: costs of each stage, if a model was split; None: equal shares of `times`.
    """

    num_ranks: int
    num_microbatches: int
    times: tuple[float, float, float] = (1.0, 1.0, 1.0)
    hop: float = 0.0
    cap: float = inf
    num_chunks: int | None = None
    num_slices: int = 1
    placement: tuple[int, ...] | None = None
    stages: tuple[ModelPart, ...] | None = None

    def placement_for(self, shape: Shape) -> tuple[int, ...]:
        """The placement for a schedule with this shape."""
        if self.placement:
            return self.placement
        ranks, chunks = self.num_ranks, self.num_chunks
        if shape is Shape.V:
            return v_placement(ranks, ranks * (chunks or 2))
        default = 2 if shape is Shape.LOOP else 1
        return loop_placement(ranks, ranks * (chunks or default))

    def costs(self, placement: tuple[int, ...], copies: int = 1) -> Costs:
        """Costs of each stage of a placement, repeated for each copy of the model."""
        share = self.num_ranks / len(placement)
        even = ModelPart(*(time * share for time in self.times))
        stages = (self.stages or (even,) * len(placement)) * copies
        # An empty stage still passes on its input, and scheduling needs positive times.
        least = _LEAST * sum(stage.time for stage in stages) / len(stages)
        return Costs(
            tuple(max(stage.f, least) for stage in stages),
            tuple(max(stage.b, least) for stage in stages),
            tuple(stage.w for stage in stages),
            self.hop,
        )

    def footprint(self, placement: tuple[int, ...], copies: int = 1) -> Footprint:
        """Activation memory of each stage, such that a microbatch takes 1 on an average rank."""
        share = self.num_ranks / len(placement)
        sizes = (share,) * len(placement)
        if self.stages:
            mean = sum(stage.held for stage in self.stages) / self.num_ranks
            sizes = tuple(stage.held / mean for stage in self.stages)
        return Footprint(sizes * copies)


@dataclass(frozen=True)
class StudyResult:
    """A schedule of a study, with its figures.

    Attributes:
        name: name of the schedule.
        chart: its program with simulated or measured times.
        costs: costs of each stage.
        bound: lower bound on the makespan of any program with this placement.
        dx_first: makespan if each dX is sent before dW is computed; the same as the schedule's own
            if its backwards are already split.
    """

    name: str
    chart: Chart
    costs: Costs
    bound: float
    dx_first: float

    @property
    def chunks(self) -> int:
        """Stages per rank, of one copy of the model."""
        program = self.chart.program
        return program.num_stages // program.num_copies // program.num_ranks


def run_schedule(study: Study, name: str, *, dx_first: bool = False) -> StudyResult:
    """Schedule a study.

    Args:
        study: the pipeline to schedule.
        name: a key of `SCHEDULES`, or "auto" for the best schedule that a search finds.
        dx_first: send each dX before dW is computed, if the schedule leaves that open.

    Raises:
        ConfigError: the schedule is infeasible, or holds more than the cap.
    """
    if name == AUTO:
        return _searched(study)
    placement = study.placement_for(SCHEDULES[name].shape if name in SCHEDULES else Shape.ANY)
    program = build_program(name, placement, study.num_microbatches, num_slices=study.num_slices)
    result = timed(study, program, name, dx_first=dx_first)
    most = max(result.chart.peaks)
    if most > study.cap * (1 + 1e-9):
        what = f"{name} holds {most:g} microbatches, the cap is {study.cap:g}"
        cap = f"a cap of at least {ceil(most * 1e3) / 1e3:.12g}"
        raise ConfigError(Mistake(what, works=(cap,)))
    return result


def timed(
    study: Study, program: Program, name: str, *, title: str | None = None, dx_first: bool = False
) -> StudyResult:
    """Simulate a program with the costs of a study."""
    copies = program.num_copies
    placement = program.placement[: program.num_stages // copies]
    costs = study.costs(placement, copies)
    footprint = study.footprint(placement, copies)
    eager = eager_dx(program)
    chosen, simulation = eager, simulate(eager, costs)
    early = simulation.makespan
    if not dx_first and program.ranks != eager.ranks:
        chosen, simulation = program, simulate(program, costs)
    problem = Problem(placement, program.num_microbatches, costs, study.cap, footprint)
    if copies > 1 or program.num_slices > 1:
        bound = work_bound(program, costs)
    else:
        bound = lower_bounds(problem).best
    chart = Chart(title or name, chosen, simulation, footprint)
    return StudyResult(name, chart, costs, bound, early)


def measured_results(acts: Sequence[MeasuredAct], title: str) -> list[StudyResult]:
    """A measured step of a run, and its simulation with the median times.

    Raises:
        ProgramError: the actions are not those of a whole step.
    """
    program, simulation = measured_program(acts)
    costs = median_costs(program, simulation)
    simulated = f"the same simulated with its median times, latency {human_seconds(costs.hop)}"
    shown = (f"{title}, measured", simulation), (simulated, simulate(program, costs))
    bound = work_bound(program, costs)
    share = program.num_copies * program.num_ranks / program.num_stages
    footprint = Footprint((share,) * program.num_stages)
    return [
        StudyResult(name, Chart(name, program, run, footprint, "s"), costs, bound, run.makespan)
        for name, run in shown
    ]


def _searched(study: Study) -> StudyResult:
    """The better of the searched schedules for a V and for a loop, or for a given placement."""
    shapes = [Shape.LOOP] if study.placement else [Shape.V, Shape.LOOP]
    if study.num_chunks and study.num_chunks != 2:
        shapes = [Shape.LOOP]
    if study.num_slices > 1:
        raise ConfigError(
            Mistake(
                f"auto searches schedules of whole sequences, not of {study.num_slices} slices",
                works=("1 slice", "sliced_1f1b"),
            )
        )
    placements = [study.placement_for(shape) for shape in shapes]
    problems = [
        Problem(
            placement,
            study.num_microbatches,
            study.costs(placement),
            study.cap,
            study.footprint(placement),
        )
        for placement in placements
    ]
    found = [synthesise(problem) for problem in problems]
    best = min(found, key=lambda synthesis: synthesis.makespan)
    return timed(study, best.program, AUTO, title=f"{AUTO}: {best.name}")


def compare(study: Study) -> Iterator[tuple[str, StudyResult | ConfigError]]:
    """The result of every schedule on the same study, or the error why it cannot run."""
    for name in (*SCHEDULES, AUTO):
        try:
            yield name, run_schedule(study, name)
        except ConfigError as error:
            yield name, error
