"""The best layout that another trainer can run."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fivefold.layout import Layout
from fivefold.search.memory_choices import RECOMPUTE
from fivefold.search.search import SearchResult, search
from fivefold.tell.describe import recompute_words
from fivefold.tell.explain import slower
from fivefold.tell.export import deepspeed, megatron_pipeline, torchtitan
from fivefold.tell.export.megatron_memory import one_number
from fivefold.units import human_seconds, several

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
    """The result of a search among what a trainer can run, and notes for people.

    Its pipelines are concerned, and for Megatron-LM the layers that are recomputed. It is the given
    result if the trainer runs the best layout as it is, or if the user gave what it lacks. What the
    trainer then runs instead, its export says.

    Args:
        result: result of a search that found a layout.
        target: key of `fivefold.tell.export.targets.TARGETS`.
    """
    if target not in PIPELINES:
        return result, ()
    trainer, schedules, its_pipeline = PIPELINES[target]
    given, planned = result.request.given, result.best.layout
    only: dict[str, frozenset[Any]] = {}
    lacks = []
    if "pipeline_schedule" not in given and its_pipeline(planned) is not planned:
        only["pipeline_schedule"] = frozenset(schedules)
        lacks.append(f"run {_pipeline(planned)}")
    by_stage = target == "megatron" and not given & set(RECOMPUTE)
    if by_stage and not one_number(planned.config.memory):
        lacks.append(recompute_words(planned.config.memory))
    if not lacks:
        return result, ()
    if by_stage:
        most = planned.config.model.num_layers
        only["recompute_num_layers"] = frozenset((n,) for n in range(1, most + 1))
    lacking = f"{trainer} cannot {' and '.join(lacks)}"
    again = search(result.request.among(only))
    free = "pipeline_schedule" not in only
    found = tuple(
        c
        for c in again.found
        if (free or its_pipeline(c.layout) is c.layout)
        and (not by_stage or one_number(c.layout.config.memory))
    )
    if not found:
        return result, (f"{lacking}, and no layout that it can run was found",)
    best = found[0]
    recomputed = recompute_words(best.layout.config.memory)
    note = (
        f"{lacking}: planned again, with {_pipeline(best.layout)}, {recomputed}; a step takes "
        f"{human_seconds(best.seconds)}, {slower(result.best.predicted, best.predicted)}"
    )
    return replace(again, found=found), (note,)


def _pipeline(layout: Layout) -> str:
    stages = several(layout.split.num_virtual, "stage")
    return f"{layout.schedule} with pp {layout.grid.pp}, {stages} a rank"
