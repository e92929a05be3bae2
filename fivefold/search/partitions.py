"""Enumerates partitions: ways to cut a model into pipeline stages, with schedules that run them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.rules.dependence import leaves_idle
from fivefold.errors import ConfigError, Mistakes
from fivefold.pipeline.costs.modelled import modelled_problem
from fivefold.pipeline.costs.parts import joined, modelled_parts
from fivefold.pipeline.ir import Kind
from fivefold.pipeline.order import Order
from fivefold.pipeline.rules import (
    AUTO,
    SYNTHESISED,
    check_order,
    check_recomputed_layers,
)
from fivefold.pipeline.schedules.limits import Place
from fivefold.pipeline.schedules.registry import SCHEDULES, Schedule, Shape, known_of
from fivefold.pipeline.split.balance import even_stages
from fivefold.pipeline.split.layout import CUTTING, NOT_AUTO, SplitSettings, asks
from fivefold.pipeline.split.stages import Split, layout_string
from fivefold.search.columns import Columns, where

PP = "pipeline_model_parallel_size"
MAX_VIRTUAL = 16  # most stages per rank to try; beyond, messages cost more than the bubble saves
TRIED = (
    *("1f1b", "zb_h1", "zb_h2"),
    *("interleaved_1f1b", "interleaved_zb", "combined_1f1b"),
    *("zb_v", "v_half", "v_min", "dualpipe_v"),
)
"""Schedules to try unless one is given. The others are worse than one of these, or need features
that few trainers have."""


ALL_SCHEDULES = (*SCHEDULES, SYNTHESISED)


@dataclass(frozen=True)
class Partition:
    """A cut of the model into pipeline stages, with the schedule that runs them.

    Attributes:
        pp: number of pipeline ranks.
        schedule: name of the schedule, a key of `SCHEDULES`, or `SYNTHESISED`.
        split: the stages and their ranks.
        settings: settings that produce this partition, by field name.
    """

    pp: int
    schedule: str
    split: Split = field(compare=False)
    settings: Mapping[str, Any] = field(compare=False)

    @property
    def known(self) -> Schedule:
        """The properties of the schedule."""
        return known_of(self.schedule)

    def place(self, rank: int) -> Place:
        """The position of one of its ranks, in the form that the limits of a schedule take."""
        return Place(self.pp, self.split.num_virtual, rank)


def enumerate_partitions(
    config: Config,
    given: frozenset[str],
    sizes: Sequence[int],
    among: Collection[str],
) -> list[Partition]:
    """Every partition of the model for pipelines of these sizes.

    Args:
        config: the model, and the settings that were given.
        given: names of the settings that must stay as they are.
        sizes: pipeline-parallel sizes.
        among: the schedules to choose from.
    """
    return [
        partition
        for pp in sizes
        for partition in _partitions_on(config, given, pp)
        if partition.schedule in among and _has_numbers(config, partition.split)
    ]


def _has_numbers(config: Config, split: Split) -> bool:
    """Whether the given numbers of recomputed layers match the number of stages."""
    mistakes = Mistakes()
    check_recomputed_layers(config.memory, split, mistakes)
    return not mistakes.found


def _partitions_on(config: Config, given: frozenset[str], pp: int) -> Iterator[Partition]:
    seen, names = set(), _schedules(config, given, pp)
    for settings, split, in_a_v in _cuts(config, given, pp):
        for schedule in names:
            key = (split, schedule)
            if key in seen or in_a_v not in (None, _turns(schedule)):
                continue
            if _fits(schedule, config, split, alone=len(names) == 1):
                seen.add(key)
                plain = pp == 1 and schedule == "1f1b"
                chosen = {} if plain else {"pipeline_schedule": schedule}
                partition = Partition(pp, schedule, split, MappingProxyType({**settings, **chosen}))
                if pp > 1 or not leaves_idle(config, PP, **{PP: pp}, **partition.settings):
                    yield partition


def _schedules(config: Config, given: frozenset[str], pp: int) -> list[str]:
    """The schedules to try; every given setting has an effect in each of them."""
    asked, slices = config.parallel.pipeline_schedule, config.parallel.num_sequence_slices
    if "pipeline_schedule" in given and asked != AUTO:
        names: tuple[str, ...] = (asked,)
    elif config.parallel.pipeline_in_flight_limit is not None:  # of schedules that are searched for
        names = (SYNTHESISED,)
    elif slices > 1:
        names = tuple(name for name, schedule in SCHEDULES.items() if schedule.slices)
    elif pp == 1:
        names = ("1f1b", "combined_1f1b")
    else:
        names = TRIED
    may_pair = config.model.num_experts is not None
    if "overlap_moe_expert_parallel_comm" in given:
        may_pair = config.parallel.overlap_moe_expert_parallel_comm
    if len(names) > 1 and not may_pair:
        names = tuple(name for name in names if name != "combined_1f1b")
    return [name for name in names if _goes_with_all_else(name, config)]


def _fits(name: str, config: Config, split: Split, *, alone: bool) -> bool:
    """Whether a schedule can run these stages.

    Unless it is the only one, an interleaved schedule must also have several stages per rank.
    """
    slices = config.parallel.num_sequence_slices
    if name == SYNTHESISED:
        return slices == 1 and _searchable(config, split)
    schedule = SCHEDULES[name]
    if schedule.groups and not alone and split.num_virtual == 1 < split.num_ranks:
        return False
    return schedule.shape.fits(split.placement) and (slices == 1 or schedule.slices)


def _goes_with_all_else(schedule: str, config: Config) -> bool:
    """Whether every given setting has an effect with this schedule."""
    mistakes = Mistakes()
    check_order(config.with_values(pipeline_schedule=schedule).parallel, mistakes)
    return not mistakes.found


def _searchable(config: Config, split: Split) -> bool:
    """Whether one microbatch fits under the in-flight limit of a synthesised schedule."""
    length, limit = config.training.seq_length, config.parallel.pipeline_in_flight_limit
    try:
        modelled_problem(config.model, length, split.stages, split.placement, 1, limit)
    except ConfigError:
        return False
    return True


_Cut = tuple[dict[str, Any], Split, bool | None]
"""Settings, the stages that they produce, and for which schedules: True for V schedules only, False
for all others, None for any."""


def _turns(schedule: str) -> bool:
    """Whether a schedule places stages in a V by default (down the ranks and back up)."""
    return known_of(schedule).shape is Shape.V


def _cuts(config: Config, given: frozenset[str], pp: int) -> Iterator[_Cut]:
    parallel, model = config.parallel, config.model
    asked = {name: getattr(parallel, name) for name in CUTTING}
    if asked["pipeline_model_parallel_layout"] == AUTO:
        yield from _automatic_cuts(config, asked, pp)
        return
    if any(asks(asked[name]) for name in given & set(CUTTING)) or (
        pp == 1 and _turns(parallel.pipeline_schedule)
    ):
        yield from _if_legal(model, pp, asked, in_a_v=False)
        yield from _if_legal(model, pp, asked, in_a_v=True)
        return
    if pp == 1:
        yield from _if_legal(model, 1, {})
        return
    for virtual in _virtual_sizes(model.num_layers, pp):
        for settings, split, in_a_v in _cuts_of(config, pp, virtual):
            if not given & set(settings):  # given settings must stay as they are
                yield settings, split, in_a_v


def _cuts_of(config: Config, pp: int, virtual: int) -> Iterator[_Cut]:
    """Cuts into equal numbers of layers, with and without counting both ends, and into equal
    times."""
    stages = {"num_virtual_stages_per_pipeline_rank": virtual} if virtual > 1 else {}
    ends = {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }
    yield from _if_legal(config.model, pp, stages)
    yield from _if_legal(config.model, pp, {**stages, **ends})
    yield from _balanced_cuts(config, pp, virtual)


def _balanced_cuts(config: Config, pp: int, virtual: int) -> Iterator[_Cut]:
    """Cuts into stages of nearly equal times: in a loop, and with two per rank also in a V."""
    balanced = balanced_layout(config, pp * virtual)
    for prefix in ("", "v:")[: 2 if virtual == 2 else 1]:
        settings = {"pipeline_model_parallel_layout": prefix + balanced}
        yield from _if_legal(config.model, pp, settings)


def _automatic_cuts(config: Config, asked: Mapping[str, Any], pp: int) -> Iterator[_Cut]:
    """The cuts for the layout "auto": balanced stages as an explicit layout string."""
    virtual = asked["num_virtual_stages_per_pipeline_rank"]
    if any(asks(asked[name]) for name in NOT_AUTO):
        return
    sizes = _virtual_sizes(config.model.num_layers, pp) if pp > 1 else [1, 2]
    for each in [virtual] if virtual else sizes:
        for settings, split, in_a_v in _balanced_cuts(config, pp, each):
            yield settings | {"num_virtual_stages_per_pipeline_rank": None}, split, in_a_v


def _virtual_sizes(layers: int, pp: int) -> list[int]:
    whole = [v for v in range(1, MAX_VIRTUAL + 1) if pp * v <= layers + 2]
    handy = {1, 2, 3, 4, 6, 8}
    even = {v for v in whole if layers % (pp * v) == 0 or (layers + 2) % (pp * v) == 0}
    return [v for v in whole if v in handy | even]


def _if_legal(
    model: ModelConfig, pp: int, settings: dict[str, Any], *, in_a_v: bool | None = None
) -> Iterator[_Cut]:
    """The cut with these settings; nothing if the layers cannot be divided like that."""
    chosen = {name: value for name, value in settings.items() if asks(value)}
    arguments = {CUTTING[name]: value for name, value in chosen.items()}
    if in_a_v and not {"virtual", "layers_per_virtual_stage", "layout"} & set(arguments):
        arguments["virtual"] = 2
    try:
        split = SplitSettings(
            model.num_layers,
            pp,
            mtp_num_layers=model.mtp_num_layers,
            in_a_v=bool(in_a_v),
            **arguments,
        ).split()
    except ConfigError:
        return
    yield chosen, split, in_a_v


def balanced_layout(config: Config, stages: int) -> str:
    """The layout string of consecutive stages with the most equal FLOPs.

    Multi-token prediction layers and the head share the last stage.
    """
    return _balanced(config.model, config.training.seq_length, stages)


@lru_cache(maxsize=256)
def _balanced(model: ModelConfig, length: int, stages: int) -> str:
    parts = modelled_parts(model, length)
    end = joined((*parts.prediction, parts.head))
    *before, last = even_stages(replace(parts, prediction=(), head=end), stages)
    return layout_string([*before, replace(last, mtp=model.mtp_num_layers)])


def runnable(columns: Columns, config: Config, found: Sequence[Partition]) -> Columns:
    """The rows whose schedule accepts their number of microbatches."""
    partition, microbatches = columns["partition"], columns["microbatches"]
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    if not len(partition):
        return columns
    takes = np.zeros((len(found), int(microbatches.max()) + 1), bool)
    batch, sizes = config.training.global_batch_size, config.training.batch_sizes.sizes()
    for number in set(microbatches.tolist()):
        smaller = {size * number // batch for size in sizes}
        takes[:, number] = [all(w.known.takes(w.pp, n, group) for n in smaller) for w in found]
    return where(columns, takes[partition, microbatches])


def recomputing(columns: Columns, config: Config, found: Sequence[Partition]) -> Columns:
    """The rows with more microbatches in flight than the given recomputation limit allows."""
    limit = config.memory.recompute_in_flight_limit
    if limit is None:
        return columns
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    slices = config.parallel.num_sequence_slices
    known: dict[Order, bool] = {}

    def exceeds(partition: Partition, count: int) -> bool:
        if partition.schedule == SYNTHESISED:
            return True  # it has a limit of its own; `check` has the last word
        count = partition.known.enough(partition.pp, count, group)
        order = Order(
            partition.schedule, partition.split.placement, count, group, slices, None, limit
        )
        if order not in known:
            program = order.executed(pairs=False, eager=True)
            known[order] = any(act.kind is Kind.R for acts in program.ranks for act in acts)
        return known[order]

    pairs = list(zip(columns["partition"].tolist(), columns["microbatches"].tolist(), strict=True))
    holds = {
        (partition, count): exceeds(found[partition], count) for partition, count in set(pairs)
    }
    return where(columns, np.array([holds[pair] for pair in pairs], bool))
