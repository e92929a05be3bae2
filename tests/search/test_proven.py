"""Searches among some of all schedules and techniques: `--proven`, and what a trainer can run."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli.main import main
from fivefold.errors import FivefoldError
from fivefold.published.row import read_rows
from fivefold.published.runs import row_layouts
from fivefold.search.proven import PROVEN, settings_of
from fivefold.search.search import search
from fivefold.tell.within import PIPELINES, within
from tests.search.test_search import EXPERTS, FREE, SMALL, WIDE, asked, result_of
from tests.verify.cases import chosen

DATA = Path(__file__).parents[2] / "benchmarks/data"
PAIRS = f"{EXPERTS} --tp 2"
LONG = "llama3-8b --cluster H100 --gpus 32 --gbs 16 --seq-length 65536"


@pytest.mark.exhaustive
def test_what_is_proven_is_what_published_runs_have() -> None:
    seen: dict[str, set[Any]] = defaultdict(set)
    for path in ("published_runs.csv", "bloom_runs.csv", "mpt_runs.csv"):
        for row in read_rows(DATA / path):
            try:
                choices = row_layouts(row)
            except FivefoldError:
                continue
            for layout in (choice.layout for choice in choices):
                for name, value in settings_of(layout).items():
                    seen[name].add(value)
    assert seen == PROVEN


@pytest.mark.slow
@pytest.mark.parametrize("line", chosen([PAIRS, EXPERTS, FREE, LONG, *WIDE], PAIRS))
def test_all_that_is_found_is_proven(line: str) -> None:
    result = search(asked(line).among(PROVEN))
    fastest, of_all = (min(c.seconds for c in r.found) for r in (result, result_of(line)))
    assert fastest >= of_all
    for candidate in (*result.found, *result.rejected):
        config, layout = candidate.layout.config, candidate.layout
        assert layout.schedule in PROVEN["pipeline_schedule"]
        settings = {**vars(config.parallel), **vars(config.memory)}
        for name in PROVEN.keys() - {"pipeline_schedule", "cp_comm_type"}:
            assert settings[name] in PROVEN[name], name
        assert layout.grid.cp == 1 or config.parallel.cp_comm_type == ("p2p",)


def test_what_is_given_stays() -> None:
    request = asked(f"{SMALL} --pp 2 --pipeline-schedule zb_v").among(PROVEN)
    assert "pipeline_schedule" not in request.only
    assert search(request).best.layout.schedule == "zb_v"
    changed = asked(SMALL).among(PROVEN).but(pipeline_schedule="zb_v")
    assert changed.only == {n: v for n, v in PROVEN.items() if n != "pipeline_schedule"}


def test_where_nothing_proven_fits_the_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan llama3-8b --gpus 8 --gbs 8 --seq-length 32768 --max-position-embeddings 32768"
    line += " --tp 1 --cp 1 --pp 1 --memory-budget 44GiB --proven"
    assert main([*line.split(), "--json"]) == 2
    said = capsys.readouterr().err
    assert "published runs fits" in said
    assert "--no-proven" in said


@pytest.mark.slow
@pytest.mark.parametrize("target", PIPELINES)
@pytest.mark.parametrize("line", chosen([PAIRS, EXPERTS, SMALL, FREE, *WIDE], PAIRS))
def test_a_trainer_gets_a_pipeline_that_it_runs(line: str, target: str) -> None:
    result = result_of(line)
    _, schedules, its_pipeline = PIPELINES[target]
    found, notes = within(result, target)
    best = found.best.layout
    assert its_pipeline(best) is best
    assert best.schedule in schedules
    changed = its_pipeline(result.best.layout) is not result.best.layout
    assert bool(notes) == changed
    if not changed:
        assert found is result
    given = result_of(f"{line} --pp 4 --pipeline-schedule zb_v")
    assert within(given, target) == (given, ())
