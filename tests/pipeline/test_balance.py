import contextlib
from dataclasses import replace
from itertools import combinations_with_replacement
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.presets import PRESETS
from fivefold.description.shape import count_parameters, forward_flops
from fivefold.errors import ConfigError
from fivefold.pipeline.costs.parts import (
    PARAMETER_BYTES,
    ModelPart,
    Parts,
    modelled_parts,
    read_costs,
    stated_parts,
)
from fivefold.pipeline.draw.study import Study
from fivefold.pipeline.ir import loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.split.balance import balance, even_stages, schedule_clock, step_clock, weigh
from fivefold.pipeline.split.cuts import MemoryLimit
from fivefold.pipeline.split.layout import SplitSettings
from fivefold.pipeline.split.stages import Split, layout_string

DEEPSEEK = stated_parts(
    ["dense"] * 3 + ["moe"] * 58, 1, read_costs("dense=0.55,moe=1,mtp=1.8,head=0.7,embedding=0")
)
TIME = st.floats(0.0, 2.0).map(lambda time: round(time, 2))


def parts_of(embedding, layers, prediction, head):
    def part(time):
        return ModelPart(time, 0.0, 0.0, held=1.0)

    return Parts(
        part(embedding), tuple(map(part, layers)), tuple(map(part, prediction)), part(head)
    )


def every_cut(parts, placement, room=None):
    """The smallest largest load by trying all; infinite where nothing fits."""
    best = inf
    for cuts in combinations_with_replacement(range(len(parts.items) + 1), len(placement) - 1):
        stages = parts.stages(cuts)
        needs = [0.0] * (max(placement) + 1)
        for stage, rank in enumerate(placement):
            each = parts.of(stages[stage])
            needs[rank] += each.state + (room.in_flight[stage] * each.held if room else 0.0)
        if room is None or max(needs) <= room.limit:
            best = min(best, max(weigh(parts, Split(stages, placement)).loads))
    return best


@settings(max_examples=30)
@given(
    TIME,
    st.lists(TIME, min_size=1, max_size=7),
    st.lists(TIME, max_size=2),
    TIME,
    st.integers(1, 4),
    st.integers(2, 9),
)
def test_one_stage_a_rank_is_optimal(embedding, layers, prediction, head, ranks, limit):
    parts, placement = parts_of(embedding, layers, prediction, head), loop_placement(ranks, ranks)
    found = balance(parts, placement)
    assert max(found.loads) == pytest.approx(every_cut(parts, placement), abs=1e-6)
    room = MemoryLimit(limit, tuple(float(ranks - stage) for stage in range(ranks)))
    best = every_cut(parts, placement, room)
    if best == inf:
        with pytest.raises(ConfigError, match="no cut of the model fits"):
            balance(parts, placement, room)


@pytest.mark.parametrize("seed", [77, 79, 135, 153])
def test_the_memory_that_a_refusal_names_is_enough(seed):
    """Also where single moves from an even cut do not lead to a cut that fits."""
    random = Random(seed)

    def part():
        times = (random.random() for _ in range(3))
        state = random.random() * 2**30 * random.choice((1, 10))
        return ModelPart(*times, state, random.random() * 2**30 * random.choice((0, 1)))

    layers = [part() for _ in range(random.randint(8, 14))]
    parts = Parts(part(), tuple(layers), (part(),), part())
    ranks, virtual = random.randint(2, 5), random.randint(2, 3)
    placement = loop_placement(ranks, ranks * virtual)
    room = MemoryLimit(0.0, tuple(float(random.randint(1, 6)) for _ in placement))
    for limit in (2.0**20, 2.0**33, 2.0**34):
        with contextlib.suppress(ConfigError):
            balance(parts, placement, replace(room, limit=limit))
            continue
        with pytest.raises(ConfigError, match="no cut of the model fits") as error:
            balance(parts, placement, replace(room, limit=limit))
        flag, value = error.value.mistakes[0].works[0].split()
        assert flag == "--memory-gib" and float(value) * 2**30 > limit
        balance(parts, placement, replace(room, limit=float(value) * 2**30))


@settings(max_examples=30)
@given(TIME, st.lists(TIME, min_size=1, max_size=8), TIME, st.integers(1, 5))
def test_even_stages_are_most_alike(embedding, layers, head, stages):
    """Of all cuts with the lightest heaviest stage, none has a smaller sum of squares."""
    parts = parts_of(embedding, layers, (), head)

    def judged(cut):
        times = [parts.of(stage).time for stage in cut]
        return max(times), sum(time * time for time in times)

    every = [
        judged(parts.stages(cuts))
        for cuts in combinations_with_replacement(range(len(layers) + 1), stages - 1)
    ]
    most, squares = judged(even_stages(parts, stages))
    lightest = min(heaviest for heaviest, _ in every)
    assert most == pytest.approx(lightest, abs=1e-6)
    best = min(square for heaviest, square in every if heaviest <= lightest + 1e-9)
    assert squares <= best + 1e-6


def test_of_equal_cuts_early_stages_hold_less():
    parts = parts_of(0, (1,) * 10, (), 0)
    assert [len(stage.layers) for stage in even_stages(parts, 4)] == [2, 2, 3, 3]


@settings(max_examples=25)
@given(
    TIME,
    st.lists(TIME.map(lambda time: time + 0.1), min_size=3, max_size=7),
    TIME,
    st.sampled_from([loop_placement, v_placement]),
)
def test_two_stages_a_rank_are_optimal_in_a_small_model(embedding, layers, head, place):
    parts, placement = parts_of(embedding, layers, (1.1,), head), place(2, 4)
    best = every_cut(parts, placement)
    assert max(balance(parts, placement).loads) == pytest.approx(best, abs=1e-6)


@pytest.mark.slow
@settings(max_examples=20)
@given(
    TIME,
    st.lists(TIME.map(lambda time: time + 0.1), min_size=16, max_size=18),
    TIME,
    st.sampled_from([loop_placement, v_placement]),
)
def test_two_stages_a_rank_are_nearly_optimal(embedding, layers, head, place):
    """Of models with more cuts than are tried, the search is a heuristic: this is its measure."""
    parts, placement = parts_of(embedding, layers, (1.1,), head), place(2, 4)
    best = every_cut(parts, placement)
    assert best - 1e-9 <= max(balance(parts, placement).loads) <= 1.1 * best


def test_room_is_kept_to_where_it_decides():
    """Early stages hold more microbatches, so they get fewer layers than their time allows."""
    parts, placement = parts_of(0, (1,) * 12, (), 0), loop_placement(3, 3)
    room = MemoryLimit(12.5, (4.0, 2.0, 1.0))  # embedding, layers and head hold 1 each
    assert [len(s.layers) for s in balance(parts, placement).split.stages] == [4, 4, 4]
    found = balance(parts, placement, room)
    assert [len(s.layers) for s in found.split.stages] == [2, 5, 5]
    assert max(found.loads) == every_cut(parts, placement, room)


@pytest.mark.parametrize(
    ("layout", "unevenness"), [("Et*3|(tt|)*29,m|L", 1.02977), ("Et|(tt|)*30mL", 1.15849)]
)
def test_published_layouts_of_deepseek_v3(layout, unevenness):
    split = SplitSettings(61, 16, layout=layout, mtp_num_layers=1).split()
    assert weigh(DEEPSEEK, split).unevenness == pytest.approx(unevenness, abs=1e-5)


def test_the_published_layout_is_found():
    """PP16 VPP2: as even as the better one published, and as fast in the simulator."""
    placement = loop_placement(16, 32)
    clock = schedule_clock("interleaved_1f1b", placement, 32)
    found = balance(DEEPSEEK, placement, clock=clock)
    assert found.unevenness <= 1.02977
    published = SplitSettings(61, 16, layout="Et*3|(tt|)*29,m|L", mtp_num_layers=1).split()
    stages = [[DEEPSEEK.of(s) for s in split.stages] for split in (found.split, published)]
    assert clock(stages[0]) <= clock(stages[1]) * (1 + 1e-9)
    assert found.split.stages[-2].mtp == 1 and not found.split.stages[-2].layers  # m stands alone


@pytest.mark.parametrize(("name", "pp", "virtual"), [("llama3-405b", 16, 1), ("deepseek-v3", 8, 4)])
def test_modelled_layouts_can_be_written_down(name, pp, virtual):
    model = PRESETS[name]
    parts, placement = modelled_parts(model, 4096), loop_placement(pp, pp * virtual)
    found = balance(parts, placement)
    layers = model.num_layers
    again = SplitSettings(
        layers, pp, layout=layout_string(found.split.stages), mtp_num_layers=model.mtp_num_layers
    ).split()
    assert again == found.split
    assert [layer for stage in again.stages for layer in stage.layers] == list(range(layers))


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3"])
def test_modelled_pieces_add_up_to_the_model(name):
    model = PRESETS[name]
    parts = modelled_parts(model, 4096)
    whole = parts.of(
        SplitSettings(model.num_layers, 1, mtp_num_layers=model.mtp_num_layers).split().stages[0]
    )
    flops = forward_flops(model, 4096)
    assert whole.f == flops.total
    assert whole.time == 3 * flops.total
    # Prediction on a stage of its own holds the embedding once more.
    more = model.padded_vocab_size * model.hidden_size * bool(model.mtp_num_layers)
    assert whole.state == PARAMETER_BYTES * (count_parameters(model).total + more)


def test_a_clock_tells_the_time_of_the_simulator():
    placement = loop_placement(2, 4)
    program = build_program("interleaved_1f1b", placement, 4)
    stages = [ModelPart(1, 2, 3), ModelPart(2, 1, 1), ModelPart(1, 1, 1), ModelPart(3, 1, 1)]
    study = Study(2, 4, hop=0.25, placement=placement, stages=tuple(stages))
    expected = simulate(eager_dx(program), study.costs(placement)).makespan
    assert step_clock(program, 0.25)(stages) == pytest.approx(expected)
    assert schedule_clock("interleaved_1f1b", placement, 4, 0.25)(stages) == expected
    assert schedule_clock("1f1b", placement, 4) is None
    assert schedule_clock("auto", placement, 4) is None


def test_boundaries_move_against_the_clock():
    """A clock that dislikes the second stage makes it empty, whatever the loads."""
    parts = parts_of(0, (1,) * 8, (), 0)
    found = balance(parts, (0, 1), clock=lambda stages: 1 + stages[1].time)
    assert [len(stage.layers) for stage in found.split.stages] == [8, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dens=1", "did you mean 'dense'?"),
        ("dense", "'dense' states no cost"),
        ("dense=x", "'dense=x' states no cost"),
        ("head=-1", "'head=-1' states no cost"),
        ("", "unknown kind ''"),
    ],
)
def test_stated_costs_are_read(text, message):
    with pytest.raises(ConfigError) as caught:
        read_costs(text)
    assert message in str(caught.value)
    assert read_costs("dense=0.55, mtp=1.8") == {"dense": 0.55, "mtp": 1.8}
