"""Keeps threads of ranks on CPUs from pushing each other aside."""

import os
import sys
from contextlib import suppress


def finish_before_others() -> None:
    """Let this thread, and those that it starts, finish their turn although others wake up.

    A message wakes gloo's thread, here or in another rank. It would take the core of the thread
    that sent it, which may hold the lock of the connection, and gloo's other threads then ask for
    that lock over and over, a quarter of the CPU time of small messages with more ranks than cores.
    Linux has a policy for this, SCHED_BATCH; elsewhere, if the user has chosen a policy, and where
    a container forbids to, nothing is changed. See sched(7).
    """
    if sys.platform == "linux":
        with suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
