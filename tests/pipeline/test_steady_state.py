import pytest

from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.ir import loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.steady_state import steady_state

UNEVEN = [1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 1.0, 0.7]


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("hop", [0.0, 0.3])
@pytest.mark.parametrize(
    ("name", "placement", "microbatches"),
    [
        ("1f1b", loop_placement(4, 4), 1),
        ("eager_1f1b", loop_placement(4, 4), 1),
        ("zb_h1", loop_placement(4, 4), 1),
        ("zb_h2", loop_placement(4, 4), 1),
        ("interleaved_1f1b", loop_placement(4, 8), 4),
        ("interleaved_zb", loop_placement(4, 8), 4),
        ("zb_v", v_placement(4, 8), 1),
        ("v_min", v_placement(4, 8), 1),
        ("dualpipe_v", v_placement(4, 8), 1),
    ],
)
def test_the_period_is_what_more_microbatches_cost(name, placement, microbatches, hop, eager):
    costs = Costs(*[tuple(UNEVEN[: len(placement)])] * 3, hop)

    def build(total):
        program = build_program(name, placement, total)
        return eager_dx(program) if eager else program

    state = steady_state(build(48), costs)
    assert state.microbatches == microbatches
    longer, shorter = (simulate(build(total), costs).makespan for total in (240, 120))
    assert state.per_microbatch * 120 == pytest.approx(longer - shorter)


def test_hops_that_plain_1f1b_exposes():
    """About 2(P-1) hops per P microbatches; a longer warm-up hides them."""
    costs = Costs.uniform(8, 1, 1, 1, 0.2)
    plain = steady_state(build_program("1f1b", range(8), 32), costs)
    eager = steady_state(build_program("eager_1f1b", range(8), 32), costs)
    assert plain.per_microbatch == pytest.approx(3 + 2 * 7 * 0.2 / 8)
    assert eager.per_microbatch == pytest.approx(3)


def test_what_never_repeats_has_no_steady_state():
    costs = Costs.uniform(4)
    assert steady_state(build_program("gpipe", range(4), 12), costs) is None
    assert steady_state(build_program("1f1b", range(4), 2), costs) is None
