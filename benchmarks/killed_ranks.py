"""Seconds from the death of a rank to the next step: kills ranks of a run at random moments.

    python -m benchmarks.killed_ranks [--nproc 4] [--kills 14] [--seed 1]

trains `debug` with states in memory every third step, and prints a line for each kill. The time
counts from the kill to the next step that is recorded, which takes part of it.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil

LAYOUT = "--tp 2 --data-parallel-sharding-strategy optim --seq-length 32 --global-batch-size 8"
PATIENCE = 60.0  # seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--kills", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        seconds = measure(Path(folder), options.nproc, options.kills, random.Random(options.seed))
    print(f"{len(seconds)} kills: {min(seconds):.1f} to {max(seconds):.1f} s, ", end="")
    print(f"median {median(seconds):.1f} s")
    return 0


def measure(folder: Path, nproc: int, kills: int, chance: random.Random) -> list[float]:
    """The seconds of each kill."""
    text = "\n".join(f"def function_{n}(x):\n    return x + {n}\n" for n in range(3000))
    (folder / "text.txt").write_text(text)
    words = [sys.executable, "-m", "fivefold", "train", "debug", "--nproc", str(nproc)]
    words += [*LAYOUT.split(), "--train-iters", "1000000", "--data-path", str(folder / "text.txt")]
    words += ["--save", str(folder / "run"), "--max-restarts", str(kills)]
    words += ["--non-persistent-save-interval", "3"]
    words += ["--non-persistent-local-ckpt-dir", str(folder / "memory")]
    metrics, found = folder / "run" / "metrics.jsonl", []
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(words, stdout=log, stderr=log, env=env)
        try:
            wait_for_record(metrics, 0.0, job)
            for number in range(kills):
                time.sleep(chance.uniform(0.3, 2.5))
                ranks = psutil.Process(job.pid).children()
                chance.choice(ranks).kill()
                killed = time.time()
                # A step that ended with the rank is recorded at once.
                wait_for_record(metrics, killed + 0.3, job)
                found.append(time.time() - killed)
                print(f"kill {number + 1}: {found[-1]:.1f} s", flush=True)
        finally:
            job.terminate()
            job.wait()
    return found


def wait_for_record(metrics: Path, after: float, job: "subprocess.Popen[bytes]") -> None:
    """Wait for a step that is recorded after this time."""
    deadline = time.time() + PATIENCE
    while not metrics.exists() or metrics.stat().st_mtime <= after:
        if job.poll() is not None or time.time() > deadline:
            raise SystemExit(f"no step is recorded any more: {(metrics.parents[1] / 'log')}")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
