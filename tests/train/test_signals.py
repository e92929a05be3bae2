import os
import signal
import time

import pytest

from fivefold.train.signals import SAME_PRESS_SECONDS, StopRequest


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_and_the_handler_put_back(signum):
    before = signal.getsignal(signum)
    with StopRequest() as stop:
        assert (stop.signum, stop.reason) == (None, None)
        os.kill(os.getpid(), signum)
        assert (stop.signum, stop.reason) == (signum, signum.name)
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
