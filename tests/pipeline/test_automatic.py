"""Qi et al., Zero Bubble Pipeline Parallelism (2023): bubble rates, 1 - work / span."""

import pytest

from fivefold.pipeline.costs.costs import Costs, Footprint
from fivefold.pipeline.ir import Program
from fivefold.pipeline.schedules.automatic import TASTES, AutomaticZeroBubble
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.simulate import peak_in_flight, simulate
from fivefold.pipeline.validate import validate
from tests.verify.cases import chosen

# Ranks, microbatches, milliseconds of F, B, W and of a hop, rates of 1F1B, ZB-H1, ZB-H2, ZB-1p
# and ZB-2p. The last two are the heuristic under the memory of P and of 2P microbatches, of which
# B frees half.
TABLE = """
 8  24 18.522 18.086  9.337 .601 .2431 .1585 .1083 .1585 .0433
 8  32 18.513 18.086  9.331 .626 .1985 .1242 .0837 .1242 .0039
 8  64 18.546 18.097  9.321 .762 .1240 .0674 .0444 .0674 .0026
 8  24 29.718 29.444 19.927 .527 .2347 .1323 .0698 .1323 .0029
 8  32 29.802 29.428 19.530 .577 .1898 .1045 .0559 .1045 .0022
 8  64 29.935 29.621 19.388 .535 .1091 .0554 .0294 .0554 .0010
16  48 11.347 11.248  8.132 .377 .2552 .1397 .0672 .1397 .0066
16  64 11.307 11.254  8.101 .379 .2082 .1088 .0516 .1088 .0054
16 128 11.325 11.308  8.109 .378 .1251 .0576 .0266 .0576 .0028
32  96 10.419 10.207  7.715 .408 .2646 .1421 .0641 .1421 .0038
"""
ROWS = [tuple(map(float, row.split())) for row in TABLE.strip().split("\n")]
HALF_BY_B = Footprint(freed_by_b=0.5)


@pytest.mark.parametrize("row", ROWS)
def test_published_rates_of_fixed_schedules(row):
    ranks, total, costs = int(row[0]), int(row[1]), Costs.uniform(int(row[0]), *row[2:6])
    for name, rate in zip(("1f1b", "zb_h1", "zb_h2"), row[6:9], strict=True):
        result = simulate(build_program(name, range(ranks), total), costs)
        assert round(result.span_bubble, 4) == rate


@pytest.mark.slow
@pytest.mark.parametrize("row", chosen(ROWS, ROWS[0], ROWS[3]))
def test_published_rates_of_automatic_schedules(row):
    ranks, total, costs = int(row[0]), int(row[1]), Costs.uniform(int(row[0]), *row[2:6])
    for cap, rate in ((ranks, row[9]), (2 * ranks, row[10])):
        rates = []
        for taste in TASTES:
            run = AutomaticZeroBubble(costs, total, cap, HALF_BY_B, taste)
            orders = tuple(tuple(order) for order in run.orders)
            program = Program(tuple(range(ranks)), total, orders)
            result = simulate(program, costs)
            assert result.makespan == pytest.approx(run.makespan)
            assert max(peak_in_flight(program, HALF_BY_B)) <= cap
            rates.append(result.span_bubble)
        assert round(min(rates), 4) == rate
        validate(program)


def test_no_bubble_in_the_span_is_not_none_in_a_step_that_is_flushed():
    """P = 8, M = 24 of the table: 0.29 % of the span, 10.03 % of the makespan."""
    ranks, total, *costs = ROWS[3][:6]
    costs = Costs.uniform(int(ranks), *costs)
    results = []
    for taste in TASTES:
        run = AutomaticZeroBubble(costs, int(total), 2 * ranks, HALF_BY_B, taste)
        orders = tuple(tuple(order) for order in run.orders)
        results.append(simulate(Program(tuple(range(8)), 24, orders), costs))
    best = min(results, key=lambda result: result.span)
    assert round(best.span_bubble, 4) == 0.0029
    assert round(best.bubble, 4) == 0.1003


def test_without_room_the_heuristic_gives_up():
    costs = Costs.uniform(4)
    runs = [AutomaticZeroBubble(costs, 8, 0.5, Footprint(), taste) for taste in TASTES]
    assert all(run.makespan == float("inf") for run in runs)
