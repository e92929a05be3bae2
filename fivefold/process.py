"""How a process of Fivefold begins and ends: without looking for garbage where there is none.

Importing PyTorch makes a million objects that stay. Python looks through them a hundred times while
they are made, and three times when it exits: two of the five seconds of CPU time of a process that
does little else.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import threading
from typing import NoReturn

RARELY = 100_000
"""New objects after which Python looks for garbage, while a process imports and reads settings."""
_USUALLY = gc.get_threshold()
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def begin() -> None:
    """Look for garbage rarely, until `work`, and print whatever the output's encoding lacks."""
    gc.set_threshold(RARELY)
    if isinstance(sys.stdout, io.TextIOWrapper):  # as standard error does: names of files, texts
        sys.stdout.reconfigure(errors="backslashreplace")


def work() -> None:
    """Look for garbage as usual: what it holds may be large tensors."""
    gc.set_threshold(*_USUALLY)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent`, which forked it, ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


def leave(status: int) -> NoReturn:
    """Exit as `sys.exit` does, but leave all memory to the system, unless a thread still works."""
    if threading.active_count() > 1:
        sys.exit(status)
    # Not `gc.freeze`, which is as fast: extensions such as Triton's then report leaks.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            stream.flush()
    os._exit(status)
