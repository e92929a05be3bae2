"""What measures a GPU starts on a CPU, so that it starts on the day when there is a GPU."""

import importlib
import json
import runpy
import sys
from math import isfinite

import pytest

from benchmarks.gpu import ROOT, of_gpu
from tests.conftest import COLLECTED
from tests.programs import Program

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


def host() -> None:
    sys.argv = ["gpu_host", "--dry"]
    runpy.run_module("benchmarks.gpu_host", run_name="__main__")


@pytest.mark.slow
def test_steps_of_an_engine_are_measured() -> None:
    """In a process of its own, since an engine needs the process group of its process."""
    process = Program(host, cwd=ROOT)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    rows = [json.loads(line) for line in output.splitlines()]
    assert len(rows) == 3 and all(0 < row["seconds"] < 10 for row in rows)


def test_tests_of_a_gpu_are_all_found(request: pytest.FixtureRequest) -> None:
    """By their text, since pytest, which imports every file, takes half a minute."""
    collected = request.config.stash[COLLECTED]
    found = {file for file, of_a_gpu in collected.items() if of_a_gpu}
    assert found == collected.keys() & set(of_gpu())
