"""The pipeline that Megatron-LM runs for a layout: its flags, and what differs."""

from collections.abc import Iterator

from fivefold.layout import Layout
from fivefold.pipeline.schedules.registry import Shape
from fivefold.pipeline.split.layout import CUTTING
from fivefold.pipeline.split.stages import layout_string
from fivefold.tell.export.settings import Settings, flag, flags
from fivefold.tell.export.stand_in import changes, one_stage_a_rank, run_by

ITS_SCHEDULES = ("1f1b", "interleaved_1f1b", "combined_1f1b")


def its_pipeline(layout: Layout) -> Layout:
    """The layout that Megatron-LM runs: 1F1B, interleaved if stages are placed in a loop."""
    if layout.split.num_virtual == 1 and layout.schedule in ITS_SCHEDULES:
        return layout
    if layout.split.num_virtual > 1 and not _why_not_interleaved(layout):
        return layout if layout.schedule in ITS_SCHEDULES else run_by("interleaved_1f1b", layout)
    return one_stage_a_rank(layout)


def _why_not_interleaved(layout: Layout) -> str | None:
    """Why Megatron-LM cannot run several stages per rank in this layout; None if it can."""
    pp, split, microbatches = layout.grid.pp, layout.split, layout.num_microbatches
    group = layout.config.parallel.microbatch_group_size_per_virtual_pipeline_stage or pp
    if pp == 1:
        return "on one pipeline rank Megatron-LM has one stage"
    if not Shape.LOOP.fits(split.placement):
        return "Megatron-LM lays stages in a loop, not in a V"
    if not pp <= group <= microbatches or 0 < microbatches % group < pp:
        return (
            f"Megatron-LM interleaves groups of {pp} microbatches and more, and {microbatches} are "
            f"not made of groups of {group}"
        )
    if any(stage.mtp for stage in split.stages[:-pp]):
        return "Megatron-LM wants prediction layers in the last stage of a rank"
    return None


def pipeline_flags(said: Settings, layout: Layout, runs: Layout) -> Iterator[str]:
    """Flags for the split of `runs`: the user's own if they produce it, else a layout string."""
    yield from flags(said, "pipeline_model_parallel_size")
    by_flags = {name: said[name] for name in CUTTING}
    given = by_flags.pop("pipeline_model_parallel_layout") is not None
    if layout.grid.pp == 1:
        return
    if runs.split != layout.split:
        given = len({len(stage.layers) for stage in runs.split.stages}) > 1
        by_flags = {}
    elif 0 in (
        by_flags[name]
        for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    ):
        given = True  # an end without a layer has no flag there
    if given:
        yield from flag("pipeline-model-parallel-layout", layout_string(runs.split.stages))
    else:
        yield from flags(said, *by_flags)
    if runs.split.num_virtual > 1:
        yield from flags(said, "microbatch_group_size_per_virtual_pipeline_stage")


def lost_in_the_pipeline(said: Settings, layout: Layout, runs: Layout) -> Iterator[str]:
    """Sentences about a replaced schedule and its effect, and about settings that are lost."""
    said.mention("pipeline_schedule")
    if runs is layout:
        return
    reasons = []
    if layout.schedule not in ITS_SCHEDULES:
        reasons.append(f"Megatron-LM has no {layout.schedule} schedule (pipeline_schedule)")
    if layout.split.num_virtual > 1 and (why := _why_not_interleaved(layout)):
        reasons.append(why)
    name = "interleaved 1F1B" if runs.split.num_virtual > 1 else "1F1B, one stage a rank"
    yield f"{'; '.join(reasons)}: it runs {name}; {changes(layout, runs)}"


def why_not_hidden(layout: Layout, runs: Layout) -> str | None:
    """Why Megatron-LM cannot hide experts' messages in this layout; None if it can."""
    parallel = layout.config.parallel
    if layout.grid.pp > 1 and runs.split.num_virtual == 1:
        return "in a pipeline it needs several stages a rank"
    if layout.grid.ep == 1 or parallel.moe_token_dispatcher_type == "allgather":
        return "it needs expert parallelism, by alltoall or flex"
    if layout.config.memory.recompute_granularity == "full":
        return "it does not go with full recomputation"
    if not layout.config.training.in_16_bits:
        return "it needs bf16 or fp16"
    mtp = layout.config.model.mtp_num_layers
    if mtp > 1 or (mtp and layout.grid.pp == 1):
        return "it takes one prediction layer, in a pipeline"
    return None
