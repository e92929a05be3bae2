"""torch knows every operation that the program calls, also those of GPUs that no test here runs."""

import subprocess
import sys

import pytest

from tests.operations import ROOT, called


@pytest.mark.slow
def test_every_operation_is_known_where_it_is_called() -> None:
    names = {name for each in called().values() for name in each}
    assert ("symm_mem", "fused_all_gather_matmul") in names and len(names) > 15
    words = (sys.executable, "-m", "tests.operations")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
