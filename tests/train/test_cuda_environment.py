"""What torch and NCCL read from the environment, and deterministic mode."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.train.cuda_environment import keep_flight_record, set_defaults


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("TORCH_", "PYTORCH_", "NCCL_", "CUBLAS_")):
            monkeypatch.delenv(name)
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "")  # what is set is unset again
        monkeypatch.delenv(name)


def test_the_user_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    set_defaults()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"


def test_segments_grow_unless_the_new_name_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    set_defaults()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setattr(os, "environ", {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"})
    set_defaults()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


def test_the_last_calls_are_written_to_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    keep_flight_record(tmp_path)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl-rank-")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["debug", "demo-moe"])
def test_deterministic_runs_train(recipe: str, tmp_path: Path) -> None:
    """No operation of theirs lacks a deterministic kernel on the CPU."""
    words = ["train", recipe, "--train-iters", "2", "--lr-warmup-iters", "0"]
    words += ["--deterministic-mode", "--save", "run"]
    words += ["--nproc", "4"] if recipe == "demo-moe" else []
    command = [sys.executable, "-m", "fivefold", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
