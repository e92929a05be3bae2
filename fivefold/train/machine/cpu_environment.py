"""Settings of the C library and the kernel for ranks that compute on CPUs."""

import ctypes
import os
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>
_LARGEST = 1 << 30
"""Bytes from which on memory is still taken from the kernel and given back, one by one."""


def keep_freed_memory() -> None:
    """Have the C library keep what this process frees, unless the user tunes it or it is no glibc.

    glibc takes large tensors from the kernel one by one and gives them back when they are freed, as
    it does with the upper end of its heap. So every step gets fresh pages, each with a fault in
    which the kernel clears it; its caching allocator saves a GPU from this. See mallopt(3), whose
    variables begin with MALLOC_.
    """
    tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    tune = None if tuned else getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_M_MMAP_THRESHOLD, _LARGEST)
        tune(_M_TRIM_THRESHOLD, -1)


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
