"""Keeps freed host memory for the next step.

glibc takes large tensors from the kernel one by one and gives them back when they are freed, as it
does with the upper end of its heap. So every step gets fresh pages, each with a fault in which the
kernel clears it; its caching allocator saves a GPU from this.
"""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>
_LARGEST = 1 << 30
"""Bytes from which on memory is still taken from the kernel and given back, one by one."""


def keep_freed_memory() -> None:
    """Have the C library keep what this process frees, unless the user tunes it or it is no glibc.

    See mallopt(3), whose variables begin with MALLOC_.
    """
    tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    tune = None if tuned else getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_M_MMAP_THRESHOLD, _LARGEST)
        tune(_M_TRIM_THRESHOLD, -1)
