"""The circumstances in which a run starts: machine, versions, git commit and command line."""

import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

PACKAGES = ("fivefold", "torch", "numpy", "tokenizers", "triton")
VARIABLES = re.compile(
    r"(CUDA|GLOO|KMP|MKL|NCCL|OMP|PYTORCH|SLURM|TORCH)_|(LOCAL_)?(RANK|WORLD_SIZE)$"
)
SECRETS = re.compile(r"KEY|TOKEN|SECRET|PASSW|JWT")


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
        "variables": _variables(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the repository around `folder`, and whether files differ; None outside one."""

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


def _variables() -> dict[str, str]:
    """Environment variables that matter and are not secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
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
