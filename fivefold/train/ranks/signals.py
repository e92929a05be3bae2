"""What asks a run to stop: Ctrl-C, a scheduler before its time limit, the launcher, a duration."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

INTERRUPT = signal.SIGUSR2  # Ctrl-C as a launcher passes it on: ranks ignore the terminal's SIGINT
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, INTERRUPT)
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
BEGAN = time.monotonic()  # before a launcher forks ranks, each of which goes on counting
SAME_PRESS_SECONDS = 0.5  # terminals and wrappers often deliver one Ctrl-C twice


def passed_on(signum: int) -> int:
    """The signal that a launcher sends to its ranks for a signal it gets."""
    return INTERRUPT if signum == signal.SIGINT else signum


@contextmanager
def leaving_in_order() -> Iterator[None]:
    """SIGTERM and SIGUSR1 raise SystemExit in the block, so that locks and files are released.

    Ctrl-C raises KeyboardInterrupt, as it does anyway, but only once where it is delivered twice:
    the second would end what the first has begun to clean up.
    """
    pressed = -math.inf

    def leave(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if signum != signal.SIGINT:
            raise SystemExit(128 + signum)
        before, pressed = pressed, time.monotonic()
        if pressed - before > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt

    signums = (*LEAVE_SIGNALS, signal.SIGINT)
    noticed = [s for s in signums if signal.getsignal(s) != signal.SIG_IGN]
    previous = {signum: signal.signal(signum, leave) for signum in noticed}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def held_back() -> Iterator[None]:
    """`STOP_SIGNALS` wait for the end of the block, in which a process is forked.

    The child would inherit handlers that swallow them, until it has its own and lets them through
    (`children.leave_signals_to_parent`); what Python itself does around a fork swallows exceptions.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_at_once() -> None:
    """Have SIGTERM and SIGUSR1 end this process even where no handler would run: a rank that a
    launcher ends may be waiting for another one."""
    for signum in LEAVE_SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)


class StopRequest:
    """Records the `STOP_SIGNALS` while its block runs, so that the run can stop in order.

    `signum` is the first signal, or None. A second Ctrl-C raises KeyboardInterrupt, to stop at
    once. A signal that this process ignores stays ignored.

    The ranks of a run receive signals at different moments: before they act on one they must
    agree, for example by a maximum over all ranks at the end of a step.

    Args:
        minutes: duration of this start, after which it asks to stop, too; None: no limit.
        interval: after steps that are multiples of it the start ends; None: after none.
    """

    def __init__(self, minutes: float | None = None, interval: int | None = None) -> None:
        self.signum: int | None = None
        self._minutes, self._interval = minutes, interval
        self._reached = False
        self._when = 0.0
        self._previous: dict[int, object] = {}

    @property
    def made(self) -> bool:
        """Whether a signal has come, or the duration is over."""
        return self.signum is not None or self._is_over

    @property
    def reason(self) -> str:
        """What asked to stop: a signal, the interval, the duration, or else another rank."""
        if self.signum in (signal.SIGINT, INTERRUPT):
            return "interrupt"
        if self.signum is not None:
            return signal.Signals(self.signum).name
        if self._reached:
            return f"exit_interval {self._interval}"
        return f"{self._minutes:g} minutes are over" if self._is_over else "another rank was"

    def ends_after(self, step: int) -> bool:
        """Whether the start ends after this step by the interval, which all ranks know."""
        self._reached = self._interval is not None and step % self._interval == 0
        return self._reached

    @property
    def _is_over(self) -> bool:
        return self._minutes is not None and time.monotonic() - BEGAN >= 60 * self._minutes

    def __enter__(self) -> Self:
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._when = signum, now
        elif signum == signal.SIGINT and now - self._when > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt
