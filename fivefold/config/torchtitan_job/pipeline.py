"""The pipeline of a job of torchtitan, in settings: its schedule, and the stages of its model."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from fivefold.config.torchtitan_job.job import TitanJob
from fivefold.config.translation import Named
from fivefold.errors import shown


class TorchSchedule(NamedTuple):
    """A schedule of torch.

    Attributes:
        name: what it is here.
        stages: stages of a rank by default.
        in_a_v: whether these lie in a V rather than in a loop.
    """

    name: str
    stages: int
    in_a_v: bool = False


SCHEDULES: Mapping[str, TorchSchedule] = MappingProxyType(
    {
        "GPipe": TorchSchedule("gpipe", 1),
        "1F1B": TorchSchedule("1f1b", 1),
        "LoopedBFS": TorchSchedule("looped_bfs", 2),
        "Interleaved1F1B": TorchSchedule("interleaved_1f1b", 2),
        "InterleavedZeroBubble": TorchSchedule("interleaved_zb", 2),
        "ZBVZeroBubble": TorchSchedule("zb_v", 2, True),
        "DualPipeV": TorchSchedule("dualpipe_v", 2, True),
    }
)
"""Schedules of torch by name."""
_P = "parallelism.pipeline_parallel_"
_STAGES = "parallelism.module_fqns_per_model_part"
_HEAD, _EMBEDDING = ("output", "lm_head"), "tok_embeddings"


def of_pipeline(job: TitanJob, pp: int, layers: int | None, lost: list[str]) -> Named:
    """The schedule, and where the model is cut.

    Args:
        pp: pipeline-parallel ranks, more than one.
        layers: layers of the model; None: they are not known here.
    """
    by_name = {name.lower(): name for name in SCHEDULES}
    said = job.word(f"{_P}schedule")
    if job.word(f"{_P}schedule_csv"):
        lost.append(
            f"{job.said(f'{_P}schedule_csv')}: its order of actions is not read; fivefold schedule "
            "finds orders of its own"
        )
        said = said if said in by_name else "interleaved1f1b"
    if said not in by_name:
        job.mistakes.add(f"{_P}schedule cannot be {shown(said)}", works=SCHEDULES)
        return
    schedule, each, _ = SCHEDULES[by_name[said]]
    yield "pipeline_schedule", schedule
    if layers is None:
        yield "num_virtual_stages_per_pipeline_rank", each if each > 1 else None
        lost.append("how its layers are cut into stages: Fivefold cuts them evenly")
        return
    counts = _counts(job, pp, layers, each)
    if counts is None:
        return
    if len(counts) % pp or (each == 1) != (len(counts) == pp):
        job.mistakes.add(
            f"{len(counts)} stages on {pp} pipeline ranks: {by_name[said]} wants "
            f"{'one' if each == 1 else 'two or more'} on each"
        )
        return
    yield "pipeline_model_parallel_layout", "|".join(counts)


def _counts(job: TitanJob, pp: int, layers: int, each: int) -> list[str] | None:
    """Each stage as a text of the layout's language; None: what it says is none."""
    first = job.number(f"{_P}first_stage_less_layers", 1)
    last = job.number(f"{_P}last_stage_less_layers", 1)
    a_stage = job.count(f"{_P}layers_per_stage") if job.get(f"{_P}layers_per_stage") else None
    if (stages := job.get(_STAGES)) is not None:
        return _of_modules(job, stages, layers)
    if points := job.words(f"{_P}split_points"):
        return _of_points(job, points, layers)
    weights = layers + first + last
    many = -(-weights // a_stage) if a_stage else pp * each
    share, more = divmod(weights, many)
    if share == 0 or max(first, last) > share:
        job.mistakes.add(
            f"{layers} layers cannot be cut into {many} stages: (layers {layers} + embedding "
            f"{first} + head {last}) / {many} = {weights / many:.3g} for each"
        )
        return None
    sizes = [share + (stage < more) for stage in range(many)]
    sizes[0] -= first
    sizes[-1] -= last
    ends = {0: "E", many - 1: "L"}
    return [
        ("E" if stage == 0 else "") + _layers(size) + ("L" if ends.get(stage) == "L" else "")
        for stage, size in enumerate(sizes)
    ]


def _layers(count: int) -> str:
    return f"t*{count}" if count > 2 else "t" * count


def _of_modules(job: TitanJob, stages: object, layers: int) -> list[str] | None:
    """Stages whose modules are named."""
    if not isinstance(stages, list) or not all(isinstance(stage, list) for stage in stages):
        job.mistakes.add(f"{_STAGES} cannot be {shown(stages)}: it is a list for each stage")
        return None
    named = [[str(name) for name in stage] for stage in stages]
    order = [name for stage in named for name in stage]
    whole = [_EMBEDDING, *(f"layers.{n}" for n in range(layers)), "norm"]
    if [name for name in order if name not in _HEAD] != whole or order[-1] not in _HEAD:
        job.mistakes.add(
            f"{_STAGES} is not the embedding, {layers} layers, norm and output in turn"
        )
        return None
    return [
        "E" * (_EMBEDDING in stage)
        + _layers(sum(name.startswith("layers.") for name in stage))
        + "L" * any(name in _HEAD for name in stage)
        for stage in named
    ]


def _of_points(job: TitanJob, points: Sequence[str], layers: int) -> list[str] | None:
    """Stages that begin with these layers, as jobs of 0.1 say it."""
    found = [re.fullmatch(r"layers\.(\d+)", point) for point in points]
    starts = [0, *(int(match[1]) for match in found if match), layers]
    if not all(found) or starts != sorted(set(starts)):
        job.mistakes.add(f"{_P}split_points cannot be {shown(points)}: layers.N in turn")
        return None
    sizes = [end - start for start, end in pairwise(starts)]
    texts = [_layers(size) for size in sizes]
    return [f"E{texts[0]}", *texts[1:-1], f"{texts[-1]}L"] if len(texts) > 1 else None
