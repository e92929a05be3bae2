"""A rehearsal for GPUs is the same where Triton is not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

import fivefold
from fivefold.rehearse.run import rehearse_rank
from tests.rehearse.test_planned_memory import layout_of

PROGRAM = """
import sys
sys.modules["triton"] = None  # as if it was not installed
from fivefold.rehearse.run import rehearse_rank
from tests.rehearse.test_planned_memory import layout_of
print(rehearse_rank(layout_of("gradients of rows"), 0).peak, *sys.modules)
"""


def test_a_rehearsal_needs_no_triton() -> None:
    pytest.importorskip("triton")
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert not found.returncode, found.stderr
    peak, *modules = found.stdout.split()
    assert int(peak) == rehearse_rank(layout_of("gradients of rows"), 0).peak
    assert {*_with_kernels()} <= {*modules}


def _with_kernels() -> list[str]:
    """The modules of the project that import Triton."""
    root = Path(fivefold.__file__).parents[1]
    files = (root / "fivefold").rglob("*.py")
    return [
        ".".join(file.relative_to(root).with_suffix("").parts)
        for file in files
        if "\nimport triton\n" in file.read_text(encoding="utf-8")
    ]
