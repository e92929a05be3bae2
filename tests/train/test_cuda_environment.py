"""What torch and NCCL read from the environment, and deterministic mode."""

import os
from pathlib import Path

import pytest
import torch

from fivefold.train.machine import cuda_environment
from fivefold.train.machine.cuda_environment import (
    keep_flight_record,
    let_segments_grow,
    set_defaults,
)
from tests import programs


def test_the_user_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"})
    set_defaults()
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"


def test_a_name_that_torch_no_longer_likes_counts_as_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "x"}
    monkeypatch.setattr(os, "environ", {**old})
    set_defaults()
    keep_flight_record(tmp_path)
    assert not {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"} & os.environ.keys()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_stay_as_the_user_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {name: "max_split_size_mb:128"})
    monkeypatch.setattr(cuda_environment, "_set_allocator", lambda settings: pytest.fail(settings))
    let_segments_grow(torch.device("cpu"))


@pytest.mark.parametrize("fails", [False, True])
def test_segments_grow_where_they_can(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(cuda_environment, "_set_allocator", said.append)
    device = torch.device("cpu")
    if fails:
        monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(-1))  # a RuntimeError
    let_segments_grow(device)
    wanted = ["expandable_segments:True", "expandable_segments:False"]
    assert said == wanted[: 1 + fails]
    assert ("NCCL_GRAPH_REGISTER" in os.environ) != fails


@pytest.mark.parametrize(
    ("environment", "kept"),
    [
        ({}, "0"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "0"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native,expandable_segments:True"}, "0"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"NCCL_GRAPH_REGISTER": "1"}, "1"),
    ],
    ids=str,
)
def test_graphs_register_nothing_in_segments_that_grow(
    environment: dict[str, str], kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**environment})
    monkeypatch.setattr(cuda_environment, "_set_allocator", lambda _: None)
    let_segments_grow(torch.device("cpu"))
    assert os.environ.get("NCCL_GRAPH_REGISTER") == kept


def test_the_last_calls_are_written_to_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    keep_flight_record(tmp_path)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl-rank-")


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["debug", pytest.param("demo-moe", marks=pytest.mark.exhaustive)]
)
def test_deterministic_runs_train(recipe: str, tmp_path: Path) -> None:
    """No operation of theirs lacks a deterministic kernel on the CPU."""
    words = ["train", recipe, "--train-iters", "2", "--lr-warmup-iters", "0"]
    words += ["--deterministic-mode", "--save", "run"]
    words += ["--nproc", "4"] if recipe == "demo-moe" else []
    done = programs.run(words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
