"""Races between streams: those of programs that were thought out, and of random ones."""

import random
from itertools import product

import pytest

from fivefold.audit.races import HOST, Races, Span

X, Y = Span(0, 64), Span(64, 128)


def _offload(missing: str = "") -> Races:
    """A tensor goes to the host on a side stream, its memory is used again, and it comes back."""
    races = Races()
    races.access("compute", "forward", writes=[X])
    if missing != "before the copy":
        races.wait("side", races.mark("compute"))
    races.access("side", "copy out", reads=[X])
    copied = races.mark("side")
    if missing != "before the memory is used again":
        races.wait("compute", copied)
    races.access("compute", "next layer", reads=[Y], writes=[X])
    return races


def test_a_program_that_waits_has_no_races() -> None:
    assert not _offload().found


@pytest.mark.parametrize("missing", ["before the copy", "before the memory is used again"])
def test_each_missing_wait_is_found_and_named(missing: str) -> None:
    (race,) = _offload(missing).found
    assert "copy out" in str(race)
    assert str(race).startswith("nothing orders: ")


def test_reads_do_not_race_nor_does_other_memory() -> None:
    races = Races()
    races.access("a", "reads", reads=[X])
    races.access("b", "reads", reads=[X], writes=[Y])
    races.access("c", "elsewhere", writes=[Span(128, 256)])
    assert not races.found
    races.access("c", "a byte of it", writes=[Span(127, 128)])
    assert len(races.found) == 1


def test_what_the_host_waited_for_is_before_all_that_it_launches() -> None:
    for waits in (True, False):
        races = Races()
        races.access("a", "writes", writes=[X])
        if waits:
            races.wait(HOST, races.mark("a"))
        races.access("b", "reads", reads=[X])
        assert bool(races.found) != waits


def test_order_is_handed_on() -> None:
    races = Races()
    races.access("a", "writes", writes=[X])
    races.wait("b", races.mark("a"))
    races.wait("c", races.mark("b"))
    races.access("c", "reads", reads=[X])
    assert not races.found


def test_memory_that_is_used_again() -> None:
    for known, safe in ((("side",), True), ((), False), (None, True)):
        races = Races()
        races.access("compute", "first", writes=[X])
        races.wait("side", races.mark("compute"))
        races.access("side", "reads", reads=[X])
        races.free(X, known)
        races.access("compute", "next owner", writes=[X])
        assert bool(races.found) != safe


def _random_program(draw: random.Random) -> tuple[Races, set[tuple[str, str]]]:
    """Races as found, and as follows from which operations can be reached from which."""
    races = Races()
    steps: list[tuple[str, bool, Span]] = []
    before: list[set[int]] = []  # of each operation, those that surely come first
    last: dict[str, set[int]] = {name: set() for name in "abc"}
    for _ in range(24):
        stream = draw.choice("abc")
        if draw.random() < 0.65:
            other = draw.choice("abc")
            races.wait(stream, races.mark(other))
            last[stream] = last[stream] | last[other]
            continue
        start = draw.randrange(12)
        span, writes = Span(start, start + draw.randint(1, 3)), draw.random() < 0.5
        name = f"{len(steps)}"
        races.access(stream, name, **{"writes" if writes else "reads": [span]})
        before.append(set(last[stream]))
        steps.append((stream, writes, span))
        last[stream] = last[stream] | {len(steps) - 1}
    racing = {
        (f"{i}", f"{j}")
        for i, j in product(range(len(steps)), repeat=2)
        if i < j
        and i not in before[j]
        and (steps[i][1] or steps[j][1])
        and steps[i][2].overlaps(steps[j][2])
    }
    return races, racing


def test_random_programs_race_where_nothing_leads_from_one_to_the_other() -> None:
    some = 0
    for seed in range(200):
        races, racing = _random_program(random.Random(seed))
        found = {(race.first.what, race.second.what) for race in races.found}
        assert found <= racing
        # A write hides what came before it: whoever is ordered after both races with neither.
        assert bool(found) == bool(racing)
        some += not racing
    assert 5 < some < 195
