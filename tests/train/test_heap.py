"""Host memory that is freed and used again, as the kernel counts it."""

import os
import subprocess
import sys

import pytest

# Larger than what glibc ever keeps by itself.
STEPS = """
from resource import RUSAGE_SELF, getrusage
from fivefold.train.machine.cpu_environment import keep_freed_memory
{}
def step():
    x = b"x" * (40 << 20)
step()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""


def faults(call: str, **more: str) -> int:
    command = [sys.executable, "-c", STEPS.format(call)]
    environment = {n: v for n, v in os.environ.items() if not n.startswith("MALLOC_")} | more
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own ways")
def test_freed_memory_is_used_again_without_faults_unless_the_user_tunes_it() -> None:
    fresh = faults("")
    if fresh < 100:
        pytest.skip("this C library keeps freed memory anyway")
    assert faults("keep_freed_memory()") < fresh / 10
    assert faults("keep_freed_memory()", MALLOC_TOP_PAD_="131072") > fresh / 2
