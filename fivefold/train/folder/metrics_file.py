"""`metrics.jsonl`: the measurements of each step of a run."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fivefold.errors import FivefoldError
from fivefold.files import finite, parse_json, write_atomic
from fivefold.train.metrics import EvalMetrics, StepMetrics

MOST_STEPS = 1 << 53
StepNumber = Annotated[int, msgspec.Meta(ge=0, lt=MOST_STEPS)]


class MetricsFile:
    """Appends to `metrics.jsonl`, one flushed line per step or evaluation.

    Records of steps later than `after_step`, the step a run resumes from, are removed, since these
    steps will be run and recorded again; the same happens when a run goes back to an earlier state.
    A last line that a crash cut short is removed, too. If the file is deleted during the run, it is
    written again with all of its lines.

    Attributes:
        removed: number of whole lines that were removed because they are not records.
        missing: steps after the first one recorded, up to `after_step`, that have no record.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        self._path, self._last = path, after_step
        is_there = path.exists()
        found = self._remove_after(after_step)
        self.removed = sum(map(math.isnan, found))
        kept = {int(step) for step in found if step <= after_step}
        first = min(kept, default=1) if is_there else after_step + 1
        self.missing = [step for step in range(first, after_step + 1) if step not in kept]
        # Unbuffered, so that closing does not retry what a full disk refused.
        self._file = path.open("a+b", buffering=0)

    def record(self, metrics: StepMetrics | EvalMetrics) -> None:
        """Append one line; values that are not finite become null, since JSON cannot write them."""
        if isinstance(metrics, StepMetrics):
            if metrics.step <= self._last:
                self._remove_after(metrics.step - 1)
            self._last = metrics.step
        self._see_file()
        values = {"step": metrics.step, **metrics.record}
        line = (json.dumps(finite(values)) + "\n").encode()
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _remove_after(self, step: int) -> list[float]:
        """Remove records of later steps and lines that are no records; return `step_of` of all
        lines."""
        if not self._path.exists():
            return []
        lines = self._path.read_bytes().splitlines(keepends=True)
        steps = [step_of(line, f"{self._path}:{n}") for n, line in enumerate(lines, 1)]
        kept = [line for line, of in zip(lines, steps, strict=True) if of <= step]
        if kept != lines:
            write_atomic(self._path, b"".join(kept))
        return steps

    def _see_file(self) -> None:
        """Make sure that the file still exists at its path; write it again if it does not."""
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return
        except FileNotFoundError:
            self._file.seek(0)
            write_atomic(self._path, self._file.read())
        self._file.close()
        self._file = self._path.open("a+b", buffering=0)


@dataclass(frozen=True)
class _Record:
    step: StepNumber


def is_step(value: Any) -> bool:
    """Whether a value of a line of `metrics.jsonl` is the number of a step."""
    return type(value) is int and 0 <= value < MOST_STEPS


def step_of(line: bytes, place: str) -> float:
    """The step of a record; infinite if the line was cut short, NaN if it is not a record."""
    if not line.endswith(b"\n"):
        return math.inf
    try:
        return parse_json(line.decode(errors="replace"), _Record, place).step
    except FivefoldError:
        return math.nan
