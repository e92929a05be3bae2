"""Whom gloo's threads give way to."""

import os
import sys
from contextlib import suppress
from pathlib import Path

BEHIND = 5
"""By how much the nice value of gloo's loops is above that of the thread that made their groups."""
_LOOP = "gloo_tcp_loop"
_NICEST = 19


def loops_give_way() -> None:
    """Let the threads in which gloo waits for messages give way to threads that compute.

    Such a loop tries the lock of a connection and, if another thread sends there, looks again for
    what has come, at once and over and over. With more ranks than cores it so takes the core of
    the thread whose lock it wants. Linux has a nice value for each thread; elsewhere nothing is
    changed. See sched(7).
    """
    if sys.platform != "linux":
        return
    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + BEHIND, _NICEST)
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # threads end meanwhile
            if (thread / "comm").read_text().rstrip("\n") == _LOOP:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
