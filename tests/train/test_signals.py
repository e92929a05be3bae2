import os
import signal
import time

import pytest

from fivefold.train.signals import SAME_PRESS_SECONDS, StopRequest, leaving_in_order, passed_on


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
        assert (stop.signum, stop.reason) == (None, None)
        os.kill(os.getpid(), signum)
        assert (stop.signum, stop.reason) == (signum, reason)
    assert signal.getsignal(signum) == before


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
