"""The schedule that a trainer runs in place of one that it lacks, and the effect of this."""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from fivefold.config.memory import MemoryConfig
from fivefold.layout import Layout
from fivefold.pipeline.costs.costs import Costs, Footprint
from fivefold.pipeline.ir import loop_placement, stages_on
from fivefold.pipeline.schedules.registry import with_copies
from fivefold.pipeline.simulate import peak_in_flight, simulate
from fivefold.pipeline.split.stages import Split, StageSpec

_MOST_ACTS = 1 << 12  # most actions to simulate; further microbatches add the same to both


def one_stage_a_rank(layout: Layout, schedule: str = "1f1b") -> Layout:
    """`layout` with one stage per rank, run by 1F1B or GPipe; consecutive stages are merged."""
    split, ranks = layout.split, layout.split.num_ranks
    size = split.num_virtual
    stages = [_merged(split.stages[start * size : (start + 1) * size]) for start in range(ranks)]
    merged = Split(tuple(stages), loop_placement(ranks, ranks))
    found, memory = run_by(schedule, layout), layout.config.memory
    if size > 1 and memory.recomputes_first_layers:
        config = found.config.with_values(recompute_num_layers=_numbers_of_merged(memory, size))
        found = replace(found, config=config)
    return replace(found, split=merged)


def changes(layout: Layout, other: Layout) -> str:
    """A sentence about the effect of another schedule on step time and activations held."""
    time, held = _figures(layout)
    other_time, other_held = _figures(other)
    ratio = other_time / time
    longer = f"takes {ratio:.3g} times as long" if abs(ratio - 1) > 0.005 else "takes as long"
    fuller = f"{other_held:.3g}", f"{held:.3g}"
    return (
        f"by the model's arithmetic a step {longer}, and the fullest rank holds activations of "
        f"{fuller[0]} microbatches, {'as before' if len(set(fuller)) == 1 else f'not {fuller[1]}'}"
    )


def run_by(schedule: str, layout: Layout) -> Layout:
    """`layout` with another schedule."""
    config = layout.config.with_values(
        pipeline_schedule=schedule,
        pipeline_in_flight_limit=None,
        num_sequence_slices=1,
    )
    return replace(layout, config=config, schedule=schedule)


def _merged(stages: Sequence[StageSpec]) -> StageSpec:
    return StageSpec(
        stages[0].embedding,
        tuple(layer for stage in stages for layer in stage.layers),
        stages[-1].head,
        sum(stage.mtp for stage in stages),
    )


def _numbers_of_merged(memory: MemoryConfig, size: int) -> tuple[int, ...]:
    """Recomputed layers of stages that were merged from `size` stages each."""
    numbers = memory.recompute_num_layers
    if len(numbers) == 1:
        return (size * numbers[0],)
    return tuple(sum(numbers[at : at + size]) for at in range(0, len(numbers), size))


def _figures(layout: Layout) -> tuple[float, float]:
    """The step time in units of a mean rank's forward, and the most microbatches held by a rank."""
    copies, parallel = layout.num_copies, layout.config.parallel
    ranks, whole = layout.split.num_ranks, layout.num_microbatches
    acts = len(layout.split.stages) * copies * parallel.num_sequence_slices
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage or 1
    period = lcm(2 * ranks, group)
    excess = max(0, whole - max(_MOST_ACTS // acts, 4 * period))
    microbatches = whole - excess // period * period
    problem = layout.scheduling_problem(microbatches)
    costs, placement = problem.costs, with_copies(layout.split.placement, copies)
    every = Costs(costs.f * copies, costs.b * copies, costs.w * copies, costs.hop)
    loads = [
        sum(every.f[s] + every.b[s] + every.w[s] for s in stages_on(placement, rank)) / copies
        for rank in range(ranks)
    ]
    program = layout.order(microbatches).program()
    makespan = simulate(program, every).makespan + (whole - microbatches) * max(loads)
    held = Footprint((problem.footprint.activations or ()) * copies)
    return makespan, max(peak_in_flight(program, held))
