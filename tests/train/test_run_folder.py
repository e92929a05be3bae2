import json
import math
import os
import resource
import subprocess
from typing import Any

import pytest

from fivefold.cli.train import recipe_name
from fivefold.errors import FivefoldError
from fivefold.files import read_json_lines
from fivefold.train.folder.environment import describe_environment, git_state
from fivefold.train.folder.metrics_file import MetricsFile
from fivefold.train.folder.run_folder import RunFolder, new_run_path
from fivefold.train.metrics import EvalMetrics, LayerRouting
from tests.train.test_metrics import step_metrics


def steps(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_open_writes_config_environment_and_latest(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "tiny-1")
    folder.open("[training]\nseed = 1\n", ["NVIDIA H200"])
    assert folder.config_file.read_text() == "[training]\nseed = 1\n"
    (start,) = json.loads(folder.environment_file.read_text())
    assert start["devices"] == ["NVIDIA H200"]
    assert start["packages"]["torch"]
    assert os.readlink(tmp_path / "runs" / "latest") == "tiny-1"


def test_a_second_start_is_added_and_latest_moves(tmp_path):
    for name in ("a", "b", "a"):
        RunFolder(tmp_path / name).open(f"name = '{name}'")
    assert len(json.loads(RunFolder(tmp_path / "a").environment_file.read_text())) == 2
    assert (tmp_path / "latest").resolve() == tmp_path / "a"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "latest"]


def test_an_audit_has_no_records_of_an_earlier_start(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open("a = 1\n")
    folder.expect_audit("a = 1\n")
    (folder.audit / "rank-3.json").write_text("{}")
    folder.expect_audit("a = 2\n")
    assert [path.name for path in folder.audit.iterdir()] == ["config.toml"]
    assert (folder.audit / "config.toml").read_text() == "a = 2\n"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FivefoldError, match="cannot write the run folder"):
        RunFolder(tmp_path / "file" / "run").open("")


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("llama3-8b", "llama3-8b"),
        ("recipes/llama3.1-8b.toml", "llama3.1-8b"),
        ("~/my own.v2.toml", "my own.v2"),
        (None, "run"),
    ],
)
def test_new_paths_have_the_name_of_their_recipe_and_never_collide(
    recipe, name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    first = new_run_path(recipe_name(recipe))
    assert first.name.startswith(f"{name}-20") and not first.exists()
    first.mkdir(parents=True)
    assert new_run_path(recipe_name(recipe)) != first


def test_each_record_is_on_disk_at_once(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.record(step_metrics(1, loss=math.nan))
    file.record(EvalMetrics(1, 2.0, 10, 1.0))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["step"] == 1 and lines[0]["loss"] is None and lines[0]["tokens"] == 8000
    assert lines[1]["eval_loss"] == 2.0
    file.close()


def test_whatever_is_recorded_can_be_read(tmp_path):
    path, no = tmp_path / "metrics.jsonl", math.nan
    file = MetricsFile(path)
    routing = LayerRouting(3, (5.0, 1.0), no, -math.inf, (no, math.inf))
    file.record(step_metrics(1, loss=no, extra={"mtp_loss": math.inf}, routing=(routing,)))
    file.record(EvalMetrics(1, no, 10, 1.0))
    file.record(EvalMetrics(1, 1e4, 10, 1.0, "long"))
    file.close()
    first, *_ = read_json_lines(path, dict[str, Any])
    assert first["experts"]["3"]["tokens"] == [5, 1] and first["moe_aux_loss"] is None


@pytest.mark.parametrize("after", [0, 3, 5])
def test_a_resumed_run_never_records_a_step_twice(tmp_path, after):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(1, 6):
        file.record(step_metrics(step))
    file.close()
    resumed = MetricsFile(path, after_step=after)
    assert steps(path) == list(range(1, after + 1))
    resumed.record(step_metrics(after + 1))
    resumed.close()
    assert steps(path) == list(range(1, after + 2))


@pytest.mark.parametrize("tail", ['{"step": 3, "lo', '{"step": 3}', "\x00\x00\n", "[1]\n"])
def test_a_last_line_cut_short_is_dropped(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + tail)
    file = MetricsFile(path, after_step=9)
    file.record(step_metrics(3))
    file.close()
    assert steps(path) == [1, 2, 3]


def test_a_disk_that_fills_up_fails_the_record_and_not_the_close(tmp_path):
    """An error of `close` would take the place of the message about the first one."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.record(step_metrics(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            file.record(step_metrics(2))
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resumed = MetricsFile(tmp_path / "metrics.jsonl", after_step=9)
    resumed.close()
    assert steps(tmp_path / "metrics.jsonl") == [1]


def test_the_environment_holds_no_secrets(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SLURM_JWT", "s3cret")
    monkeypatch.setenv("TORCH_API_KEY", "s3cret")
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    found = describe_environment()
    assert found["variables"]["NCCL_DEBUG"] == "WARN"
    assert "s3cret" not in json.dumps(found)


def test_git_state(tmp_path):
    assert git_state(tmp_path) is None

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
        subprocess.run(["git", *identity, "-C", tmp_path, *arguments], check=True)

    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "one")
    state = git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "file").write_text("b")
    assert git_state(tmp_path) == {"commit": state["commit"], "dirty": True}


def test_a_rewound_run_records_no_step_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (1, 2, 3, 4, 5, 3, 4, 2, 3, 4):
        file.record(step_metrics(step))
        file.record(EvalMetrics(step, 2.0, 10, 1.0))
    assert steps(path) == [1, 1, 2, 2, 3, 3, 4, 4]
    file.close()


def test_records_that_are_lost_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert MetricsFile(path, after_step=9).missing == [], "a run that goes on from another's"
    for lines, lost in (
        (b"", [*range(1, 10)]),
        (b'{"step": 5}\n{"step": 6}\n{"step": 8, "lo', [7, 8, 9]),
        (b'{"step": 3}\n[]\n{"step": 5}\n{"step": 6}\n{"step": 8}\n{"step": 9}\n', [4, 7]),
        (b'{"step": 8}\n{"step": 9}\n{"step": 11}\n', []),
    ):
        path.write_bytes(lines)
        file = MetricsFile(path, after_step=9)
        file.close()
        assert file.missing == lost
