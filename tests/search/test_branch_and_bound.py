"""Bounds that rise as programs are timed, and what schedules are known to keep."""

from functools import cache

import numpy as np
import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.ir import Kind, loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.order import Order
from fivefold.pipeline.schedules.limits import Place
from fivefold.pipeline.schedules.registry import SCHEDULES, Shape, build_program
from fivefold.pipeline.simulate import simulate
from fivefold.predict.cluster import preset
from fivefold.predict.memory.liveness import HeldMicrobatches, _moments
from fivefold.predict.program.makespan import leveled_program
from fivefold.predict.step import predict
from fivefold.search.bound_tables import Ranks
from fivefold.search.branch_and_bound import Ledger, OpenCandidates, layout_of
from fivefold.search.candidate import evaluate
from fivefold.search.memory_bound import memory_bound
from fivefold.search.memory_choices import further_choices
from fivefold.search.partitions import TRIED
from fivefold.search.request import Request
from fivefold.search.search import legal_space
from fivefold.search.space import Space
from fivefold.search.time_bound import quick_time_bound, time_bound
from tests.verify.cases import chosen

CLUSTER = preset("H100", 32)
BY_SHAPE = {shape: [name for name in TRIED if SCHEDULES[name].shape is shape] for shape in Shape}
FORMS = [
    *((name, ranks, 1) for name in BY_SHAPE[Shape.LINE] for ranks in (2, 3, 8)),
    *(
        (name, ranks, virtual)
        for name in BY_SHAPE[Shape.LOOP]
        for ranks in (2, 4)
        for virtual in (1, 2, 3)
    ),
    *((name, ranks, 2) for name in BY_SHAPE[Shape.V] for ranks in (2, 3, 4, 7, 8)),
]


def placement(schedule: str, ranks: int, virtual: int) -> tuple[int, ...]:
    place = v_placement if SCHEDULES[schedule].shape is Shape.V else loop_placement
    return place(ranks, ranks * virtual)


@cache
def swept(schedule: str, ranks: int, virtual: int) -> tuple[HeldMicrobatches, ...]:
    order = Order(schedule, placement(schedule, ranks, virtual), 4 * ranks)
    return _moments(order, pairs=False, eager=True)


@pytest.mark.parametrize(("schedule", "ranks", "virtual"), FORMS)
def test_what_a_schedule_keeps(schedule: str, ranks: int, virtual: int) -> None:
    for rank, found in enumerate(swept(schedule, ranks, virtual)):
        limits, place = SCHEDULES[schedule].limits, Place(ranks, virtual, rank)
        most = limits.in_flight(place)
        assert found.kept.sum(axis=1).max() <= most
        if schedule != "v_min":
            assert found.kept.sum(axis=1).max() == most
        kept = limits.kept_at_once(place)
        assert kept is None or (found.kept >= kept).all(axis=1).any()
        end = limits.drained(place)
        if end is not None:
            assert ((found.kept >= end[0]) & (found.waiting >= end[1])).all(axis=1).any()


@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize(("schedule", "virtual"), [("combined_1f1b", 3), ("dualpipe_v", 2)])
def test_forwards_that_are_in_no_pair(schedule: str, virtual: int, ranks: int) -> None:
    program = build_program(schedule, placement(schedule, ranks, virtual), 4 * ranks)
    for rank, acts in enumerate(program.ranks):
        alone = sum(act.kind is Kind.F for act in acts)
        least = SCHEDULES[schedule].limits.alone(Place(ranks, virtual, rank))
        assert alone - 1 <= least <= alone


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "interleaved_zb", "combined_1f1b"])
def test_what_a_schedule_defers(schedule: str) -> None:
    virtual = 2 if SCHEDULES[schedule].groups else 1
    for rank, found in enumerate(swept(schedule, 4, virtual)):
        # The last dX, of stage `rank`, is gone when nothing is kept any more.
        last = int(np.flatnonzero(found.kept.sum(axis=1) > 0)[-1])
        most = SCHEDULES[schedule].limits.deferred(Place(4, virtual, rank))
        assert found.waiting[last].sum() + 1 <= most


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v", "dualpipe_v"])
def test_many_costs_are_walked_as_each_alone(schedule: str) -> None:
    where = placement(schedule, 4, 2)
    rng = np.random.default_rng(0)
    costs = []
    for _ in range(5):
        f, b, w = (tuple((1 + rng.random(8)).tolist()) for _ in range(3))
        costs.append(Costs(f, b, w, float(rng.random())))
    program = eager_dx(build_program(schedule, where, 16))
    table = leveled_program(Order(schedule, where, 16), pairs=True, eager=True)
    alone = [simulate(program, each).makespan for each in costs]
    assert table.makespans(costs).tolist() == pytest.approx(alone)


@cache
def question(model: str) -> Request:
    config = Config(PRESETS[model]).with_values(global_batch_size=64, seq_length=4096)
    return Request(config, frozenset(), CLUSTER)


@cache
def sampled(model: str) -> Space:
    space = legal_space(question(model))
    stages = np.array([len(partition.split.stages) for partition in space.partitions])[
        space.columns["partition"]
    ]
    short = np.flatnonzero(stages * space.columns["microbatches"] <= 400)
    return space.take(np.random.default_rng(1).choice(short, 40))


MODELS = ["llama3-8b", "mixtral-8x7b", "deepseek-v2-lite"]


@pytest.mark.slow
@pytest.mark.parametrize("model", chosen(MODELS, "llama3-8b"))
def test_a_quick_bound_is_below_a_close_one(model: str) -> None:
    space = legal_space(question(model))
    ranks = Ranks.of(space.config.model, space.partitions)
    quick = quick_time_bound(space, ranks, CLUSTER)
    close = time_bound(space, ranks, CLUSTER).seconds
    assert np.isfinite(close).all() and np.isfinite(memory_bound(space, ranks)).all()
    assert (quick <= close * 1.01).all()  # REACH leaves far more room
    assert (quick <= close * (1 + 1e-9)).mean() > 0.999
    assert quick.min() > close.min() / 3


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_bounds_rise_and_stay_bounds(model: str) -> None:
    space = sampled(model)
    ranks = Ranks.of(space.config.model, space.partitions)
    bounds = time_bound(space, ranks, CLUSTER)
    candidates = OpenCandidates(question(model), space, bounds, Ledger(1e9))
    before = candidates.lower.copy()
    for row in range(len(space)):
        candidates.time([row])
    assert (candidates.lower >= before).all() and (candidates.lower > before).any()
    for row in range(len(space)):
        step = predict(layout_of(candidates.space, row), CLUSTER).step_time
        assert candidates.lower[row] <= step * (1 + 1e-9)
        if space.columns["strategy"][row] <= 1:
            assert candidates.lower[row] >= 0.9 * step


@pytest.mark.slow
@pytest.mark.parametrize("model", chosen(MODELS, "llama3-8b", "deepseek-v2-lite"))
def test_further_techniques_are_legal_and_bounded(model: str) -> None:
    space = sampled(model).with_memory(further_choices(question(model).config, frozenset()))
    few = space.take(np.arange(0, len(space), 7))
    ranks = Ranks.of(few.config.model, few.partitions)
    times = time_bound(few, ranks, CLUSTER).seconds
    sizes = memory_bound(few, ranks)
    for row in range(len(few)):
        layout = check(few.config_of(row), 32, planned=True)
        found = evaluate(question(model), layout, always=True)
        assert times[row] <= found.seconds * (1 + 1e-9)
        assert sizes[row] <= found.memory.max_allocated * (1 + 1e-9)


def test_where_one_does_not_fit_none_does_that_shards_less() -> None:
    space = legal_space(question("llama3-8b"))
    c = space.columns
    few = (c["mbs"] <= 2) & (c["pp"] == 1) & (c["tp"] == 1) & (c["cp"] == 1)
    space = space.take(np.flatnonzero(few))
    ranks = Ranks.of(space.config.model, space.partitions)
    bounds = time_bound(space, ranks, CLUSTER)
    candidates = OpenCandidates(question("llama3-8b"), space, bounds, Ledger(1e9))
    closed = 0
    for row in reversed(range(len(space))):  # those that shard more first
        open_before = np.isfinite(candidates.lower)
        if not open_before[row] or candidates.look(row).prediction is not None:
            continue
        for other in np.flatnonzero(open_before & ~np.isfinite(candidates.lower)).tolist():
            closed += other != row
            layout = candidates.request.checked(space.config_of(other))
            found = evaluate(candidates.request, layout)
            assert not found.memory.fits
    assert closed
