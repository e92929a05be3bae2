"""The score: sums that must come out, and a floor under the planner's accuracy."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.published.score import ranking, report

RUNS = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.csv"


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    """Two sources whose rows say all, and a row of an unknown model."""
    path = tmp_path_factory.mktemp("score") / "some.csv"
    with RUNS.open(newline="") as file, path.open("w", newline="") as out:
        reader = csv.DictReader(file)
        writer = csv.DictWriter(out, reader.fieldnames or ())
        writer.writeheader()
        for row in reader:
            if row["src"].startswith("Korthikanti"):
                writer.writerow(row)
            if row["model"] == "Nemotron-340B":
                writer.writerow(row | {"model": "Secret-340B"})
            if row["src"].startswith("nanotron") and row["ngpu"] == "8":
                writer.writerow(row)
    return report(path)


@pytest.mark.slow
def test_the_planner_is_near_published_runs(some):
    korthikanti, nanotron = (
        some.summary(row for row in some.rows if row.row.source.startswith(name))
        for name in ("Korthikanti", "nanotron")
    )
    assert korthikanti.rows == 8 and nanotron.rows == 3
    assert korthikanti.mape < 0.05 and abs(korthikanti.bias) < 0.05
    assert nanotron.mape < 0.1


def test_every_row_is_scored_or_said_to_be_left_out(some):
    assert len(some.rows) == 11
    ((row, why),) = some.skipped
    assert row.cells["model"] == "Secret-340B" and "known model" in why
    assert "Secret" not in "".join(row.row.name for row in some.rows)


def test_the_null_model_knows_one_mfu_for_each_kind_of_gpu(some):
    lines = {row.row.line: row.prediction.cluster.name for row in some.rows}
    for name in ("A100-80", "H100"):
        errors = sorted(some.null_errors[line] for line, gpu in lines.items() if gpu == name)
        assert errors[0] < 0 < errors[-1]


def test_tables_and_json_tell_the_same(some):
    table, data = some.table(), json.loads(some.as_json())
    assert "Korthikanti22 T5" in table and "not used:" in table
    assert data["summaries"]["all"]["rows"] == 11
    for row in data["rows"]:
        assert sum(row["parts"].values()) == pytest.approx(row["predicted_seconds"])


def test_rankings_count_pairs_in_order(some):
    rows = [row for row in some.rows if row.row.source.startswith("nanotron")]
    found = ranking("sizes", [rows])
    assert (found.sweeps, found.pairs, found.tau, found.regret) == (1, 3, 1.0, 0.0)
    upside_down = [
        replace(row, measured=row.predicted_rate**2 * row.prediction.step_time) for row in rows
    ]
    assert ranking("worst", [upside_down]).tau == -1.0
    assert not some.rankings()  # no model was run three times
