"""Triton compiles our kernels for GPUs as a step launches them, on a machine without one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.model.eight_bit.rules import ADA

ROOT = Path(__file__).parents[2]
EVERY = (75, 80, 89, 90, 100, 120)
RUNS = [
    ("90",),
    *(pytest.param((f"{each}", "every"), marks=pytest.mark.exhaustive) for each in EVERY),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_every_kernel_of_ours_compiles(words: tuple[str, ...]) -> None:
    pytest.importorskip("triton")
    texts = {path: path.read_text() for path in (ROOT / "fivefold").rglob("*.py")}
    kernels = {path: text for path, text in texts.items() if "@triton.jit" in text}
    if divmod(int(words[0]), 10) < ADA:
        del kernels[ROOT / "fivefold/model/kernels/quantise.py"]
    ours = {n for text in kernels.values() for n in re.findall(r"launch\(\s*(_\w+)", text)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearse.compiled_kernels", *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert ours and set(done.stdout.split()) == ours
