"""What measures a GPU starts on a CPU, so that it starts on the day when there is a GPU."""

import importlib
import json
import subprocess
import sys
from math import isfinite

import pytest

from benchmarks.gpu import ROOT, of_gpu

ROWS = {
    "gpu_layers": 14,
    "gpu_losses": 4,
    "gpu_eight_bit": 5,
    "gpu_messages": 2,
    "gpu_updates": 5,
}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_measured(name: str) -> None:
    rows = list(importlib.import_module(f"benchmarks.{name}").rows(True))
    assert len(rows) == ROWS[name]
    for row in rows:
        times = [value for value in row.values() if isinstance(value, float)]
        assert times and all(isfinite(each) and each > 0 for each in times), row


@pytest.mark.slow
def test_steps_of_an_engine_are_measured() -> None:
    """In a process of its own, since an engine needs the process group of its process."""
    words = (sys.executable, "-m", "benchmarks.gpu_host", "--dry")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 3 and all(0 < row["seconds"] < 10 for row in rows)


def test_tests_of_a_gpu_are_all_found() -> None:
    """pytest finds them by importing every file, which takes a minute."""
    words = ("-m", "pytest", "-q", "-p", "no:xdist", "--collect-only", "-m", "gpu", "tests")
    found = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = {line.split("::")[0] for line in found.stdout.splitlines() if "::" in line}
    assert files == set(of_gpu())
