"""A run whose weights and optimizer lie on a disk, in little memory, dies and goes on."""

import random
import time
from pathlib import Path

import pytest

from tests.train.test_local import ranks, start
from tests.train.test_run import command, losses

LONG = ("--data-parallel-sharding-strategy", "optim_grads_params", "--train-iters", "8")
AWAY = ("--optimizer-cpu-offload", "--param-cpu-offload", "--recompute-granularity", "full")


@pytest.mark.slow
def test_a_run_from_a_disk_that_is_killed_resumes_with_the_same_bits(
    cache: Path, tmp_path: Path
) -> None:
    disk, run, chance = tmp_path / "disk", tmp_path / "run", random.Random()
    whole = start(command(cache, tmp_path / "whole", *LONG))
    paths = ("--optimizer-offload-path", str(disk), "--param-offload-path", str(disk))
    limit = ("--device-memory-limit", "3MiB", "--save-interval", "2")
    words = command(cache, run, *LONG, *AWAY, *paths, *limit)
    job, deadline = start(words), time.monotonic() + 60
    while not (run / "checkpoints" / "step-00000002").exists():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(chance.uniform(0, 0.1))
    for victim in (*ranks(job), job):
        victim.kill()
    job.communicate()
    last = start(words)
    assert last.communicate(timeout=200)[1] == "" and last.returncode == 0
    assert whole.communicate(timeout=200)[1] == "" and whole.returncode == 0
    assert losses(run) == losses(tmp_path / "whole")
    assert [*disk.iterdir()] == []
