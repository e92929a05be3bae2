"""The folder that tells, years later, what a run was and how it went.

runs/llama3-8b-20261121-104500/
  config.toml        every setting, resolved
  environment.json   one entry for each start: machine, versions, git commit, command line
  metrics.jsonl      one line a step
  errors/            tracebacks of ranks that failed
  pipeline.jsonl     with --profile: when each act of the pipeline ran in one step
  audit/             with --audit: what each rank sent, held and computed in one step
runs/latest -> llama3-8b-20261121-104500
"""

import importlib.metadata
import json
import math
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fivefold.errors import FivefoldError
from fivefold.files import write_atomic
from fivefold.train.metrics import EvalMetrics, StepMetrics

PACKAGES = ("fivefold", "torch", "numpy", "tokenizers", "triton")
VARIABLES = re.compile(
    r"(CUDA|GLOO|KMP|MKL|NCCL|OMP|PYTORCH|SLURM|TORCH)_|(LOCAL_)?(RANK|WORLD_SIZE)$"
)
SECRETS = re.compile(r"KEY|TOKEN|SECRET|PASSW|JWT")


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run. Only its first rank writes here, except for errors and audits."""

    path: Path

    @property
    def config_file(self) -> Path:
        """Every setting of the latest start, as TOML."""
        return self.path / "config.toml"

    @property
    def environment_file(self) -> Path:
        """A JSON list, one entry for each start."""
        return self.path / "environment.json"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a line, each with its `step`."""
        return self.path / "metrics.jsonl"

    @property
    def audit(self) -> Path:
        """Where ranks leave what was measured of one step."""
        return self.path / "audit"

    @property
    def errors(self) -> Path:
        """Where ranks leave their tracebacks."""
        return self.path / "errors"

    def open(self, config_toml: str, device_names: Sequence[str] = ()) -> None:
        """Create the folder or add a start to it, and point `latest` beside it here.

        Raises:
            FivefoldError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.config_file, config_toml)
            starts = []
            if self.environment_file.exists():
                starts = json.loads(self.environment_file.read_text())
            starts.append(describe_environment(device_names))
            write_atomic(self.environment_file, json.dumps(starts, indent=2) + "\n")
            _point(self.path.parent / "latest", self.path.name)
        except OSError as error:
            raise FivefoldError(f"cannot write the run folder {self.path}: {error}") from error


def new_run_path(name: str, root: Path = Path("runs")) -> Path:
    """A path that does not exist yet: root/<name>-<date>-<time>. Creates nothing.

    The clocks and file systems of machines differ, so one rank chooses and tells the others.
    """
    stem = f"{Path(name).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    path, attempt = root / stem, 1
    while path.exists():
        attempt += 1
        path = root / f"{stem}-{attempt}"
    return path


class MetricsFile:
    """Appends to `metrics.jsonl`, one flushed line a step or evaluation.

    Records of steps later than `after_step`, the step a run resumes from, are removed: these steps
    will be run and recorded again. So is a last line that a crash cut short.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) <= after_step]
            if kept != lines:
                write_atomic(path, "".join(kept))
        self._file = path.open("a", encoding="utf-8")

    def record(self, metrics: StepMetrics | EvalMetrics) -> None:
        """Append one line; values that are not finite become null, as JSON knows no others."""
        values = {k: v if math.isfinite(v) else None for k, v in metrics.values.items()}
        self._file.write(json.dumps({"step": metrics.step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def describe_environment(device_names: Sequence[str] = ()) -> dict[str, Any]:
    """Machine, versions, git commit and command line of this process, without secrets."""
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "devices": list(device_names),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": git_state(Path.cwd()),
        "variables": _interesting(os.environ),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository around `folder` and whether files differ from it; None outside."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _interesting(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(variables.items())
        if VARIABLES.match(name) and not SECRETS.search(name)
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _step_of(line: str) -> float:
    """The step of a record; infinite if the line is not a whole record."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


def _point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to its neighbour `target` in one step."""
    temporary = link.with_name(f".tmp-{secrets.token_hex(4)}-{link.name}")
    temporary.symlink_to(target)
    os.replace(temporary, link)
