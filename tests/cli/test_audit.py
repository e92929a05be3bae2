"""`fivefold audit` on run folders made by hand: what it says and its exit status."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.audit.record import RankRecord, expected_record, write_record
from fivefold.check import check
from fivefold.cli.main import main
from fivefold.config.sources import read_config, to_toml


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two ranks that did what theory says."""
    config = read_config("debug", data_parallel_sharding_strategy="optim")
    layout = check(config, 2)
    (tmp_path / "config.toml").write_text(to_toml(layout.config))
    steps = [{"step": n, "seconds": 1.0 + n, "grad_norm": 1.0} for n in range(1, 6)]
    text = "".join(json.dumps(step) + "\n" for step in [*steps, {"step": 5, "seconds": 9.0}])
    (tmp_path / "metrics.jsonl").write_text(text)
    for rank in range(2):
        empty = RankRecord(rank, 2, {}, 0.0, 0.0, 0.0, {}, 0.0)
        write_record(tmp_path / "audit", expected_record(layout, empty))
    return tmp_path


def test_a_run_as_predicted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run)]) == 0
    said = capsys.readouterr().out
    assert "step 2; 2 ranks: dp 2 (optim)" in said
    assert "sent over data" in said
    assert said.splitlines()[-1] == "as predicted: all 7 quantities on all 2 ranks"
    assert "step time" in said and "5.0 s" in said  # the median of steps 3, 4 and 5
    assert "name the machine: --cluster" in said


def test_a_run_that_went_on_in_another_layout(run: Path) -> None:
    """It is the start that was measured which is held to its theory."""
    (run / "audit" / "config.toml").write_text((run / "config.toml").read_text())
    other = check(read_config("debug", tensor_model_parallel_size=2), 4)
    (run / "config.toml").write_text(to_toml(other.config))
    assert main(["audit", str(run)]) == 0


def test_a_run_that_kept_too_much(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "audit" / "rank-1.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"optimizer": values["optimizer"] + 4}))
    assert main(["audit", str(run)]) == 1
    said = capsys.readouterr().out
    assert "+4 on rank 1, wrong on 1 of 2 ranks" in said
    assert said.splitlines()[-1] == "not as predicted: optimizer state"


def test_json_and_a_cluster(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run), "--json", "--cluster", "H100"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] and told["ranks"] == 2
    by_name = {finding["name"]: finding for finding in told["findings"]}
    assert by_name["step time"]["measured"] == 5.0
    assert by_name["step time"]["predicted"] > 0
    assert "probability of 80 %" in by_name["step time"]["note"]


def test_device_memory_is_told_where_it_was_counted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = check(read_config(run / "config.toml"), 2)
    for rank in range(2):
        on_gpu = RankRecord(rank, 2, {}, 0.0, 0.0, 0.0, {}, 0.0, peak_allocated=2.0**20)
        write_record(run / "audit", replace(expected_record(layout, on_gpu)))
    assert main(["audit", str(run), "--cluster", "H100"]) == 0
    assert "device memory" in capsys.readouterr().out


def test_a_run_that_was_not_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run / "audit").iterdir():
        path.unlink()
    assert main(["audit", str(run)]) == 2
    assert "train with --audit" in capsys.readouterr().err


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path / "nowhere")]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_a_damaged_record_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "audit" / "rank-0.json").write_text("{")
    assert main(["audit", str(run)]) == 2
    assert "rank-0.json" in capsys.readouterr().err
