"""`--save-interval auto` saves as often as loses the least time, on every rank alike."""

import pytest

from fivefold.reliability import DEVICE_MTBF, best_interval
from fivefold.train.folder import save_interval
from fivefold.train.folder.save_interval import FIRST, SaveInterval

DEVICES = 1 << 16


def saves(interval: SaveInterval, steps: range, costs: dict[int, float]) -> list[int]:
    """The steps after which a run saves, each with its cost in seconds, by default the first's."""
    found = []
    for step in steps:
        if interval.due(step):
            interval.plan(step)
            interval.held = costs.get(step, next(iter(costs.values())))
            found.append(step)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes as long as 1 ms of steps: only what lies between counts."""
    now = [0.0]

    class Time:
        @staticmethod
        def perf_counter() -> float:
            return now[0]

    due = SaveInterval.due

    def step(self: SaveInterval, number: int) -> bool:
        now[0] += 2.0
        return due(self, number)

    monkeypatch.setattr(save_interval, "time", Time)
    monkeypatch.setattr(SaveInterval, "due", step)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("start", [0, 7])
def test_auto_saves_twice_to_learn_and_then_at_the_best_interval(start: int) -> None:
    interval = SaveInterval(None, start, DEVICES, lambda work: work())
    cost = 0.25
    best = round(best_interval(DEVICE_MTBF / DEVICES, cost) / 2.0)
    assert best > FIRST
    first, second = start + FIRST, start + 2 * FIRST
    expected = [first, second, second + best, second + 2 * best]
    steps = range(start + 1, second + 2 * best + 1)
    assert saves(interval, steps, {first: cost}) == expected


@pytest.mark.usefixtures("clock")
def test_saves_that_cost_more_are_rarer() -> None:
    dear = SaveInterval(None, 0, DEVICES, lambda work: work())
    found = saves(dear, range(1, 500), {5: 0.25, 10: 16.0})
    assert found[3] - found[2] > 4 * (found[2] - found[1])


@pytest.mark.usefixtures("clock")
def test_ranks_take_the_first_ones_choice() -> None:
    other = SaveInterval(None, 0, DEVICES, lambda work: 17)
    assert saves(other, range(1, 50), {5: 99.0}) == [5, 10, 27, 44]


def test_given_steps_stay() -> None:
    assert saves(SaveInterval(3, 4, 1, lambda work: work()), range(5, 11), {6: 9.0}) == [6, 9]
    assert saves(SaveInterval(0, 0, 1, lambda work: work()), range(1, 99), {}) == []
