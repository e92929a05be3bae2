"""The run folder, which documents a run and its course.

runs/llama3-8b-20261121-104500/
  config.toml        every setting, resolved
  environment.json   one entry for each start: machine, versions, git commit, command line
  metrics.jsonl      one line per step
  run.lock           which run uses the folder, while one does
  errors/            tracebacks of ranks that failed
  hangs/             stacks of every rank while the run waited for one of them
  pipeline.jsonl     with --profile: when each pipeline action ran in one step
  profile/           with --profile: the settings of that step's start, and with
                     --use-pytorch-profiler torch's trace of each profiled rank
  audit/             with --audit: what each rank sent, held and computed in one step
runs/latest -> llama3-8b-20261121-104500
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any, TypedDict

from fivefold.errors import DataError, Mistake
from fivefold.files import (
    as_kind,
    at_home,
    read_json,
    telling_unwritable,
    temporary_path,
    temporary_paths,
    write_atomic,
)
from fivefold.train.folder.environment import describe_environment
from fivefold.train.folder.metrics_file import StepNumber, step_of

RUNS = "runs"  # folder of run folders that the user did not name
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer.json"
LATEST = "latest"


class _Entry(TypedDict, total=False):
    """The fields of an entry of `environment.json` that are read again."""

    time: str
    command: list[str]
    folder: str
    host: str
    devices: list[str]
    variables: dict[str, str]
    step: StepNumber
    settings: str
    after: str


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run. Only its first rank writes here, except for errors and audits."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The file with every setting of the latest start, as TOML."""
        return self.path / "config.toml"

    @property
    def environment_file(self) -> Path:
        """The file with a JSON list that has an entry for each start."""
        return self.path / "environment.json"

    @property
    def metrics_file(self) -> Path:
        """The file with one JSON object per line, each with its `step`."""
        return self.path / "metrics.jsonl"

    @property
    def tokenizer(self) -> Path:
        """The file with the run's tokenizer."""
        return self.path / TOKENIZER

    @property
    def audit(self) -> Path:
        """The folder with each rank's measurements of one step."""
        return self.path / "audit"

    @property
    def profile(self) -> Path:
        """The folder with what a profiled step's ranks recorded."""
        return self.path / "profile"

    @property
    def errors(self) -> Path:
        """The folder with the tracebacks of ranks."""
        return self.path / "errors"

    @property
    def hangs(self) -> Path:
        """The folder with what ranks did while the run made no progress."""
        return self.path / "hangs"

    def starts(self) -> list[dict[str, Any]]:
        """The entries of earlier starts.

        Raises:
            DataError: the file that lists them is damaged.
        """
        if not self.environment_file.exists():
            return []
        file = self.environment_file
        try:
            starts = read_json(file, list[dict[str, Any]], DataError)
            as_kind(starts, list[_Entry], str(file), DataError)
        except DataError as error:
            aside = f"mv {quote(str(file))} {quote(f'{file}.damaged')}"
            raise DataError(Mistake(str(error), attempt=aside)) from None
        return starts

    @property
    def started_in(self) -> Path:
        """The folder that relative paths of the latest start refer to; the current folder if not
        known."""
        with suppress(DataError):
            return Path((self.starts() or [{}])[-1].get("folder", ""))
        return Path()

    def named(self, path: str) -> Path:
        """A path from the settings of the latest start, resolved as that start resolved it."""
        return self.started_in / at_home(path, DataError)

    def set_aside_damaged_starts(self) -> str:
        """Rename a damaged list of starts, so that ranks which start again begin a new one; return
        the reason, empty if the list is intact."""
        try:
            self.starts()
        except DataError as error:
            aside = self.environment_file.with_suffix(".json.damaged")
            os.replace(self.environment_file, aside)
            return f"{str(error).splitlines()[0]}; it is {aside.name} now, and another one begins"
        return ""

    def identity(self) -> str | None:
        """A hash of this run's path and first start, which no other run has; None before the first
        start."""
        starts = self.starts()
        if not starts:
            return None
        return _short_hash(f"{self.path.resolve()} {json.dumps(starts[0], sort_keys=True)}")

    def last_step(self) -> int:
        """The last step in `metrics.jsonl`; 0 if there is none."""
        if not self.metrics_file.exists():
            return 0
        lines = self.metrics_file.read_bytes().splitlines(keepends=True)
        steps = (step_of(line, str(self.metrics_file)) for line in lines)
        return int(max((step for step in steps if math.isfinite(step)), default=0))

    def open(
        self, config_toml: str, device_names: Sequence[str] = (), after: str = "", step: int = 0
    ) -> None:
        """Create the folder or add a start to it, and point the link `latest` in its parent here.

        The link is left out if the parent folder cannot be written.

        Args:
            config_toml: every setting.
            device_names: devices of the first rank.
            after: the failure after which ranks were started again.
            step: number of steps done before.

        Raises:
            DataError: the list of earlier starts is damaged.
            FivefoldError: the folder cannot be written.
        """
        here = {"step": step, "settings": _short_hash(config_toml)}
        here |= {"after": after} if after else {}
        starts = [*self.starts(), describe_environment(device_names) | here]
        with telling_unwritable(f"the run folder {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            own = (self.config_file, self.environment_file, self.metrics_file, self.tokenizer)
            for left in (left for file in own for left in temporary_paths(self.path, file.name)):
                left.unlink()  # of a start that was killed
            write_atomic(self.config_file, config_toml)
            write_atomic(self.environment_file, json.dumps(starts, indent=2) + "\n")
        with suppress(OSError):
            _point(self.path.absolute().parent / LATEST, self.path.absolute().name)

    def expect_audit(self, config_toml: str) -> None:
        """Create the audit folder with the settings of this start.

        Records of an earlier start are removed, since they may be of other ranks.

        Raises:
            FivefoldError: the folder cannot be written.
        """
        with telling_unwritable(self.audit):
            shutil.rmtree(self.audit, ignore_errors=True)
            self.audit.mkdir()
            write_atomic(self.audit / self.config_file.name, config_toml)


def new_run_path(name: str) -> Path:
    """A path that does not exist yet: runs/<name>-<date>-<time>. Creates nothing.

    The clocks and file systems of machines differ, so one rank must choose it for all.
    """
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, attempt = Path(RUNS, stem), 1
    while path.exists():
        attempt += 1
        path = Path(RUNS, f"{stem}-{attempt}")
    return path


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target` in the same folder, atomically.

    A run folder or anything else of that name that is not a link stays as it is.
    """
    if link.name == target or (link.exists() and not link.is_symlink()):
        return
    temporary = temporary_path(link)
    try:
        temporary.symlink_to(target)
        os.replace(temporary, link)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
