from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.draw.chart import Chart
from fivefold.pipeline.draw.text import draw, picture
from fivefold.pipeline.holding import with_recompute
from fivefold.pipeline.ir import loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.simulate import simulate


def test_one_f_one_b():
    assert draw(build_program("1f1b", range(2), 2)).splitlines() == [
        "rank 0 F0-F1-......B0----...B1----",
        "rank 1 ...F0-B0----F1-B1----",
        "makespan 9, span 9, bubble 33.3%, in flight 2 1",
    ]


def test_chunks_and_halves_are_told_apart():
    picture = draw(eager_dx(build_program("gpipe", loop_placement(2, 4), 1))).splitlines()
    assert picture[0] == "rank 0 F0a-....F0b-........B0b-W0b-B0a-----"
    assert picture[1] == "rank 1 ....F0a-....F0b-B0b-W0b-B0a-W0a-"


def test_an_act_shorter_than_its_name_keeps_its_length():
    program = build_program("1f1b", range(2), 2)
    simulation = simulate(program, Costs((1, 0.3), (1, 1), (1, 1)))
    _, *rows = picture(Chart("", program, simulation), 100, colours=False)
    assert rows[0].startswith("rank 0 F0-F1-")
    assert rows[1].startswith("rank 1 ...FB0")


def test_slices_are_named():
    rows = draw(build_program("sliced_1f1b", range(2), 2, num_slices=2)).splitlines()
    assert rows[0].startswith("rank 0 F0.0-F0.1-F1.0-")
    assert rows[1].startswith("rank 1 .....F0.0-F0.1-B0.1------F1.0-B0.0------")


def test_pairs_are_named_and_widen_nothing_else():
    rows = draw(build_program("dualpipe_v", v_placement(2, 4), 4)).splitlines()
    assert rows[0].startswith("rank 0 F0a-F1a-F2a-F0b-B0b-W0b-F1b-F3a&B1b-----")


def test_both_copies_of_the_model_are_shown():
    rows = draw(build_program("dualpipe", range(2), 4)).splitlines()
    assert rows[0].startswith("rank 0 F0a-F2b-F1a-B2b-----F3b&B0a-----")
    assert rows[1].startswith("rank 1 F2b-F0a-F3b-B0a-----F1a&B2b-----")


def test_recomputation_is_shown():
    rows = draw(with_recompute(build_program("gpipe", range(2), 2), 1)).splitlines()
    assert rows[:2] == ["rank 0 F0-F1-.........B0----R1-B1----", "rank 1 ...F0-F1-B0----R1-B1----"]
