"""The course of a run, from the files of its run folder."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fivefold.audit.record import audited_step
from fivefold.audit.report import AuditReport
from fivefold.config.config import Config
from fivefold.errors import ConfigError, DataError
from fivefold.files import read_json_lines
from fivefold.pipeline.costs.measured import FILE, read_measured
from fivefold.pipeline.draw.chart import Chart
from fivefold.pipeline.draw.study import measured_results
from fivefold.pipeline.ir import ProgramError
from fivefold.report.audited import audited
from fivefold.report.settings import run_config
from fivefold.report.starts import ComparableSteps
from fivefold.train.folder.metrics_file import is_step
from fivefold.train.folder.run_folder import CHECKPOINTS, RunFolder

LAST = 20
"""Steps over which the latest values of a run are averaged."""
EVALUATION = "eval_loss"
LARGEST = 1e300
"""Largest number that is taken for one: sums of such numbers are finite."""
_CHECKPOINT = re.compile(r"step-0*(\d+)(?:\.old)?")  # only complete ones
Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunEvent:
    """An event of a run.

    Attributes:
        when: local time.
        what: name of the event in a few words.
        details: more about it, or empty.
    """

    when: datetime
    what: str
    details: str = ""


@dataclass(frozen=True)
class RunHistory:
    """The course of a run.

    Attributes:
        folder: run folder.
        config: settings of the latest start.
        starts: machine and command line of each start, the first one first.
        records: lines of `metrics.jsonl`, of steps and of evaluations.
        happenings: starts, checkpoints, hangs and failures in order of time.
        seen: when the run last wrote metrics.
    """

    folder: Path
    config: Config
    starts: tuple[Record, ...]
    records: tuple[Record, ...]
    happenings: tuple[RunEvent, ...]
    seen: datetime | None

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @cached_property
    def steps(self) -> list[Record]:
        """Records of optimizer steps."""
        return [record for record in self.records if "grad_norm" in record]

    @cached_property
    def evaluations(self) -> list[Record]:
        """Records of evaluations."""
        return [r for r in self.records if any(key.startswith(EVALUATION) for key in r)]

    def values(self, name: str, records: Iterable[Record] | None = None) -> dict[int, float]:
        """A metric by step, where it was recorded and is a number."""
        every = self.steps if records is None else records
        return {r["step"]: r[name] for r in every if _is_number(r.get(name))}

    def latest(self, name: str) -> float | None:
        """The mean of a metric over the last `LAST` steps."""
        found = [*self.values(name).values()][-LAST:]
        return fmean(found) if found else None

    def usual(self, name: str) -> float | None:
        """The median of a metric over the `usual_steps` of as many tokens as the last one; where
        they have none, over all of them, all in the layout of the latest start, or else over all.
        """
        alike, size = (
            ComparableSteps(self.starts),
            self.steps[-1].get("tokens") if self.steps else None,
        )
        latest = [record for record in self.steps if record["step"] in alike]
        of_size = [record for record in self.usual_steps if record.get("tokens") == size]
        for records in (of_size, self.usual_steps, latest, self.steps):
            if found := self.values(name, records):
                return median(found.values())
        return None

    @cached_property
    def usual_steps(self) -> list[Record]:
        """Records of the steps that were taken as the latest start takes them: a layout's times are
        theirs. The first one of each start is left out and, if there are others, those that were
        audited or profiled."""
        usual = ComparableSteps(self.starts).usual([record["step"] for record in self.steps])
        logging, audited = self.config.logging, audited_step(RunFolder(self.folder).audit)
        ends = (logging.profile_step_start, logging.profile_step_end) if logging.profile else (0, 0)
        unwatched = {step for step in usual if step != audited and step not in range(*ends)}
        return [record for record in self.steps if record["step"] in (unwatched or usual)]

    @property
    def done(self) -> int:
        """Steps that are done."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def is_finished(self) -> bool:
        """Whether no step is left to do."""
        return self.done >= self.config.training.num_steps

    @property
    def step_seconds(self) -> float:
        """Seconds of all steps that count."""
        return sum(self.values("seconds").values())

    @property
    def goodput(self) -> float | None:
        """Share of the time since the first start that went into steps that count."""
        begun = _time_of(self.starts[0]) if self.starts else None
        if begun is None or self.seen is None:
            return None
        whole = (self.seen - begun).total_seconds()
        return min(1.0, self.step_seconds / whole) if whole > 0 else None

    def audit(self) -> AuditReport | None:
        """The audit of a step; None if none was measured, or its files are damaged."""
        with suppress(DataError, ConfigError):
            return audited(self.folder)
        return None

    def timeline(self) -> list[Chart]:
        """The profiled step beside its simulation; empty if none was profiled."""
        if not (self.folder / FILE).is_file():
            return []
        with suppress(ConfigError, ProgramError):
            return [r.chart for r in measured_results(read_measured(self.folder), self.name)]
        return []


def read_history(folder: Path) -> RunHistory:
    """The course of a run so far, from its folder.

    Raises:
        DataError: it is not a run folder, or a file of it is damaged.
    """
    config = run_config(folder)
    run = RunFolder(folder)
    starts, metrics = run.starts(), run.metrics_file
    records: list[dict[str, Any]] = []
    if metrics.is_file():
        lines = read_json_lines(metrics, dict[str, Any])
        records = [line for line in lines if is_step(line.get("step"))]
    seen = _changed(metrics) if records else None
    happenings = sorted(_happenings(run, starts), key=lambda each: each.when)
    return RunHistory(folder, config, tuple(starts), tuple(records), tuple(happenings), seen)


def evaluated(records: Iterable[Record]) -> list[str]:
    """The names of the losses of validation sets."""
    return [*dict.fromkeys(key for r in records for key in r if key.startswith(EVALUATION))]


def validation_set(column: str) -> str:
    """' NAME' of the set whose losses a column of `evaluated` has; empty for the split."""
    name = column.removeprefix(EVALUATION)
    return f" {name[1:]}" if name else ""


def _happenings(run: RunFolder, starts: Iterable[Record]) -> Iterable[RunEvent]:
    for number, start in enumerate(starts):
        command = shlex.join(start.get("command", ()))
        host, devices = start.get("host", ""), start.get("devices") or ["CPU"]
        what = f"start{' again' * bool(number)} on {host} ({devices[0]})"
        if start.get("after"):
            what += f" after {start['after']}"
        if when := _time_of(start):
            yield RunEvent(when, what, command)
    for checkpoint, when in _dated(run.path / CHECKPOINTS, "step-*/manifest.json"):
        if match := _CHECKPOINT.fullmatch(checkpoint.parent.name):
            yield RunEvent(when, f"checkpoint of step {match[1]}")
    for error, when in _dated(run.errors, "rank-*.txt"):
        lines = error.read_text(errors="replace").strip().splitlines()
        rank = error.stem.removeprefix("rank-")
        yield RunEvent(when, f"rank {rank} failed", lines[-1] if lines else "")
    for hang, when in _dated(run.hangs, "step-*.txt"):
        lines = hang.read_text(errors="replace").splitlines()
        yield RunEvent(when, lines[0] if lines else "no progress", " ".join(lines[1:2]))


def _dated(folder: Path, pattern: str) -> Iterator[tuple[Path, datetime]]:
    """Files that match, with their modification times; the run may remove some meanwhile."""
    for path in sorted(folder.glob(pattern)):
        with suppress(FileNotFoundError):
            if path.is_file():
                yield path, _changed(path)


def _time_of(start: Record) -> datetime | None:
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(str(start.get("time"))).astimezone()
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST


def _changed(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime).astimezone()
