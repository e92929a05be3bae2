"""The best layout whose pipeline another trainer can run."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from fivefold.layout import Layout
from fivefold.search.search import SearchResult, search
from fivefold.tell.explain import slower
from fivefold.tell.export import deepspeed, megatron_pipeline, torchtitan
from fivefold.units import human_seconds

_Pipelines = tuple[str, tuple[str, ...], Callable[[Layout], Layout]]
PIPELINES: Mapping[str, _Pipelines] = MappingProxyType(
    {
        "megatron": (
            "Megatron-LM",
            megatron_pipeline.ITS_SCHEDULES,
            megatron_pipeline.its_pipeline,
        ),
        "torchtitan": ("torchtitan", torchtitan.ITS_SCHEDULES, torchtitan.its_pipeline),
        "deepspeed": ("DeepSpeed", deepspeed.ITS_SCHEDULES, deepspeed.its_pipeline),
    }
)
"""Of each trainer: its name, the schedules that it has, and the pipeline it runs for a layout."""


def within(result: SearchResult, target: str) -> tuple[SearchResult, tuple[str, ...]]:
    """The result of a search among what a trainer's pipelines can run, and notes for people.

    It is the given result if the trainer runs the best layout as it is, or if the user gave the
    schedule. What the trainer then runs instead, its export says.

    Args:
        result: result of a search that found a layout.
        target: key of `fivefold.tell.export.targets.TARGETS`.
    """
    if target not in PIPELINES or "pipeline_schedule" in result.request.given:
        return result, ()
    trainer, schedules, its_pipeline = PIPELINES[target]
    if its_pipeline(result.best.layout) is result.best.layout:
        return result, ()
    lacking = f"{trainer} cannot run {_pipeline(result.best.layout)}"
    allowed = result.request.among({"pipeline_schedule": frozenset(schedules)})
    again = search(allowed)
    found = tuple(c for c in again.found if its_pipeline(c.layout) is c.layout)
    if not found:
        return result, (f"{lacking}, and no layout that it can run was found",)
    best = found[0]
    old, new = result.best.prediction, best.prediction
    assert old is not None
    assert new is not None
    note = (
        f"{lacking}: planned again, with {_pipeline(best.layout)}; a step takes "
        f"{human_seconds(new.step_time)}, {slower(old, new)}"
    )
    return replace(again, found=found), (note,)


def _pipeline(layout: Layout) -> str:
    virtual = layout.split.num_virtual
    stages = "1 stage a rank" if virtual == 1 else f"{virtual} stages a rank"
    return f"{layout.schedule} with pp {layout.grid.pp}, {stages}"
