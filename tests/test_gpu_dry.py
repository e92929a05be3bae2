"""What measures a GPU starts on a CPU, so that it starts on the day when there is a GPU."""

import importlib
from math import isfinite

import pytest

ROWS = {"gpu_layers": 11, "gpu_losses": 4, "gpu_eight_bit": 5, "gpu_messages": 2}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_measured(name: str) -> None:
    rows = list(importlib.import_module(f"benchmarks.{name}").rows(True))
    assert len(rows) == ROWS[name]
    for row in rows:
        times = [value for value in row.values() if isinstance(value, float)]
        assert times and all(isfinite(each) and each > 0 for each in times), row
