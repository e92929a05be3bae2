"""Times of a layout are those of its own steps, however often a run was started in others."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.audit.record import RankRecord, write_record
from fivefold.cli.watch import view
from fivefold.errors import DataError
from fivefold.learn.runs import observed
from fivefold.report.history import read_history
from fivefold.report.starts import ComparableSteps
from tests.report.test_report import a_run


def start(command: str, ranks: int, step: int) -> dict[str, Any]:
    return {"command": [command], "variables": {"WORLD_SIZE": str(ranks)}, "step": step}


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=8,
    )
)
def test_each_step_is_of_the_start_that_took_it_last(runs: list[tuple[str, int, int, int]]) -> None:
    """Starts go on from any step that is done, as after damage."""
    taken: dict[int, tuple[str, int]] = {}
    starts = []
    for command, ranks, first, more in runs:
        begins = min(first, max(taken, default=0))
        starts.append(start(command, ranks, begins))
        taken = {step: what for step, what in taken.items() if step <= begins}
        taken |= dict.fromkeys(range(begins + 1, begins + 1 + more), (command, ranks))
    for step, what in taken.items():
        alike = ComparableSteps(starts, step)
        assert [s for s in taken if s in alike] == [
            s for s, other in taken.items() if other == what
        ]
    latest = ComparableSteps(starts)
    assert [s for s in taken if s in latest] == [s for s, w in taken.items() if w == runs[-1][:2]]


def test_starts_of_which_the_step_is_not_known_count_all() -> None:
    known = start("a", 1, 3)
    for starts in ([], [{"command": ["a"]}], [{"command": ["a"]}, known]):
        assert all(step in ComparableSteps(starts) for step in (1, 3, 4, 10**9))


def test_other_settings_of_the_same_command_are_another_layout() -> None:
    """As of a recipe that was edited between two starts."""
    starts = [start("a", 1, 0) | {"settings": "one"}, start("a", 1, 5) | {"settings": "other"}]
    assert [step for step in range(1, 9) if step in ComparableSteps(starts)] == [6, 7, 8]
    assert [step for step in range(1, 9) if step in ComparableSteps(starts, 3)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("each", [1, 2, 3])
def test_the_first_step_of_each_start_is_not_usual(each: int, tmp_path: Path) -> None:
    """As of a run that is stopped after every few steps; of single steps nothing else is known."""
    folder = a_run(tmp_path / "run", steps=12)
    slow = range(1, 13, each)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for line in lines:
        seconds = 100.0 if line["step"] in slow else 1.0 + line["step"] / 1e3
        line |= {"seconds": seconds, "tokens_per_second_per_rank": 1024.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    begun = {"time": "2026-11-22T10:00:00+00:00"}
    starts = [begun | start("a", 1, step - 1) for step in slow]
    (folder / "environment.json").write_text(json.dumps(starts))
    told = read_history(folder).usual("seconds")
    if each == 1:
        assert told == 100
        with pytest.raises(DataError, match=r"(?s)after the first one.*--train-iters 14"):
            observed(folder)
    else:
        seen, _ = observed(folder)
        assert told == seen.seconds == pytest.approx(1, rel=0.02)
        assert seen.noise < 0.02


@pytest.mark.parametrize("steps", [3, 9])
def test_a_step_that_was_looked_into_is_not_usual(steps: int, tmp_path: Path) -> None:
    watched = {"profile": True, "profile_step_start": 4, "profile_step_end": 6}
    folder = a_run(tmp_path / "run", steps=steps, **watched)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for line in lines:
        line["seconds"] = float(line["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_record(folder / "audit", RankRecord(0, 2, {}, 1, 1, 1, {}, 1))
    counted = [record["step"] for record in read_history(folder).usual_steps]
    assert counted == [step for step in range(3, steps + 1) if step not in (4, 5)]
    (folder / "audit" / "rank-0.json").write_text("cut sho")
    assert read_history(folder).usual_steps[0]["step"] == 2


def test_what_is_usual_is_so_of_the_size_that_a_growing_batch_has_now(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", steps=9)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for line in lines:
        grown = 1 + line["step"] // 6
        line |= {"seconds": float(grown), "tokens": 64 * grown}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_history(folder).usual("seconds") == 2.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:6]))
    assert read_history(folder).usual("seconds") == 1.0


def test_what_is_left_and_what_is_learnt_is_of_the_latest_layout(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", steps=9)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for line in lines:
        slow = line["step"] <= 6
        line |= {"seconds": 100.0 if slow else 1.0, "tokens_per_second_per_rank": 1024.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert view(read_history(folder), 80)[-1].startswith("1m40s left")
    assert observed(folder)[0].seconds == 100
    begun = {"time": "2026-11-22T10:00:00+00:00"}
    starts = [begun | start("first", 1, 0), begun | start("other", 1, 6)]
    (folder / "environment.json").write_text(json.dumps(starts))
    assert view(read_history(folder), 80)[-1].startswith("1.0 s left")
    assert observed(folder)[0].seconds == pytest.approx(1.0)
