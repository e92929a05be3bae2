"""The process that measures the machine for `tune` ends with it."""

import signal
import sys
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from fivefold.cli import tune
from fivefold.cli.main import main
from fivefold.train.ranks.signals import leaving_in_order
from tests.programs import Program


def measured(folder: Path) -> None:
    with leaving_in_order(), patch.object(sys, "executable", str(folder / "measure")):
        tune.measure(folder / "measured.toml", 2, "cpu")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_no_measurement_outlives_the_command(signum: int, tmp_path: Path) -> None:
    program = tmp_path / "measure"
    lines = ("#!/bin/sh", "echo $$ > pid.part", "mv pid.part pid", "exec sleep 100")
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    process = Program(measured, tmp_path, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signum)
    assert process.wait(20) != 0
    while psutil.pid_exists(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_impossible_layout_is_refused_before_the_machine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: object) -> None:
        raise AssertionError("the machine was measured")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fivefold.cli.tune.measure", measure)
    assert main(["tune", "debug", "--nproc", "2", "--tp", "3"]) == 2
    assert "2 / 3 = 0.6667" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
