"""Which threads give way to which, as the kernel has it."""

import os
import sys
from pathlib import Path

import pytest

from fivefold.mesh.gloo_loops import BEHIND
from fivefold.mesh.grid import Grid
from fivefold.mesh.groups import build_groups
from tests.pool import Pool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's nice values of threads")


def _nice_values(rank: int, world_size: int) -> tuple[int, set[int], set[int]]:
    """Of this thread, of gloo's loops and of all others."""
    build_groups(Grid(tp=world_size), rank, "cpu", sharded=False)
    threads = Path("/proc/self/task").iterdir()
    names = {int(thread.name): (thread / "comm").read_text() for thread in threads}
    loops = {number for number, name in names.items() if name.startswith("gloo_tcp_loop")}
    own = os.getpriority(os.PRIO_PROCESS, 0)
    of = {number: os.getpriority(os.PRIO_PROCESS, number) for number in names}
    return own, {of[n] for n in loops}, {of[n] for n in names if n not in loops}


def test_loops_give_way_and_nothing_else(pool: Pool) -> None:
    for _ in range(2):  # more groups take them no further
        for own, loops, others in pool.run(2, _nice_values):
            # That of a group of one rank, which sends nothing, may not have its name yet.
            assert min(own + BEHIND, 19) in loops and loops <= {own, min(own + BEHIND, 19)}
            assert others == {own}
