"""Lowers the priority of gloo's threads below that of threads that compute."""

import os
import sys
from contextlib import suppress
from pathlib import Path

BEHIND = 5
"""How much higher the nice value of gloo's threads is than that of the thread that made their
groups."""
_LOOP = "gloo_tcp_loop"
_NICEST = 19


def lower_loop_priority() -> None:
    """Make threads in which gloo waits for messages yield to threads that compute.

    Such a thread tries to lock a connection and, if another thread is sending there, polls again at
    once. With more ranks than cores it thus occupies the core of the thread whose lock it wants.
    Linux has a nice value for each thread; elsewhere nothing is changed. See sched(7).
    """
    if sys.platform != "linux":
        return
    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + BEHIND, _NICEST)
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # threads may end meanwhile
            if (thread / "comm").read_text().rstrip("\n") == _LOOP:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
