import json
import os
import signal
import time

import pytest

from fivefold.cli.main import main
from fivefold.train.ranks import signals
from fivefold.train.ranks.signals import (
    SAME_PRESS_SECONDS,
    StopRequest,
    leaving_in_order,
    passed_on,
)


@pytest.mark.parametrize(
    ("signum", "reason"),
    [
        (signal.SIGINT, "interrupt"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGUSR1, "SIGUSR1"),
        (passed_on(signal.SIGINT), "interrupt"),
        (passed_on(signal.SIGTERM), "SIGTERM"),
        (passed_on(signal.SIGUSR1), "SIGUSR1"),
    ],
)
def test_a_signal_is_noted_and_the_handler_put_back(signum, reason):
    before = signal.getsignal(signum)
    with StopRequest() as stop:
        assert (stop.signum, stop.made) == (None, False)
        os.kill(os.getpid(), signum)
        assert (stop.signum, stop.made, stop.reason) == (signum, True, reason)
    assert signal.getsignal(signum) == before


def test_a_duration_counts_from_where_the_process_began(monkeypatch):
    stop = StopRequest(minutes=2)
    monkeypatch.setattr(signals, "BEGAN", time.monotonic())
    assert (stop.made, stop.reason) == (False, "another rank was")
    monkeypatch.setattr(signals, "BEGAN", time.monotonic() - 121)
    assert (stop.made, stop.reason) == (True, "2 minutes are over")
    assert not StopRequest().made


def test_a_start_that_is_over_saves_its_step_and_the_next_one_goes_on(tmp_path, capsys):
    line = ["train", "debug", "--train-iters", "3", "--save", f"{tmp_path}/run"]
    assert main([*line, "--exit-duration-in-mins", "1e-9"]) == 0
    assert "asked to stop (1e-09 minutes are over): saved step 1" in capsys.readouterr().out
    assert main(line) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(each)["step"] for each in lines] == [1, 2, 3]


def test_one_ctrl_c_delivered_twice_is_one_and_a_later_one_interrupts():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signum == signal.SIGINT
        time.sleep(SAME_PRESS_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.signum is None
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_who_holds_something_leaves_by_an_exception(signum):
    before = signal.getsignal(signum)
    with pytest.raises(SystemExit) as leaving, leaving_in_order():
        os.kill(os.getpid(), signum)
    assert leaving.value.code == 128 + signum
    assert signal.getsignal(signum) == before


def test_ctrl_c_delivered_twice_interrupts_no_cleaning_up_and_a_later_one_does():
    cleaned = []

    def clean_up():
        os.kill(os.getpid(), signal.SIGINT)
        cleaned.append("after the same press")
        time.sleep(SAME_PRESS_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)
        cleaned.append("after another one")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), leaving_in_order():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            clean_up()
    assert cleaned == ["after the same press"]
    assert signal.getsignal(signal.SIGINT) == before
