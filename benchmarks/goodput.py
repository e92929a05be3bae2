"""Goodput under one fault a minute: states in memory beside restarts from the disk.

    python -m benchmarks.goodput [--steps 1000] [--every 60] [--seq-length 64] [--minutes 20]
                                 [--jobs 4]

trains `debug` on two ranks several times, and in all runs but one kills a random rank every
minute. Goodput is that of `fivefold report`: the share of the time since the first start that went
into steps that count. `--jobs` runs share the machine, so that all of them find it as busy. A run
that has not done its steps after `--minutes` is asked to stop, and its goodput is that until then.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks.faults import journal, write_corpus
from benchmarks.planted_faults import write_plan
from fivefold.report.history import RunHistory, read_history

LAYOUT = "--nproc 2 --global-batch-size 4 --eval-interval 0 --max-restarts 1000"


@dataclass(frozen=True)
class Way:
    """How a run keeps what it has done, and whether ranks die."""

    name: str
    flags: str
    faults: bool = True


WAYS = (
    Way("no faults; disk every 100 steps", "--save-interval 100", faults=False),
    Way(
        "memory every 10 steps, disk every 100",
        "--save-interval 100 --non-persistent-save-interval 10",
    ),
    Way("disk every 10 steps", "--save-interval 10"),
    Way("disk every 100 steps", "--save-interval 100"),
)


@dataclass(frozen=True)
class Outcome:
    """A finished run: its history, the ranks that were killed, and the steps that ran in all."""

    way: Way
    history: RunHistory
    kills: int
    ran: int
    bits: list[list[str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two faults")
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=20.0, help="after which a run is stopped")
    parser.add_argument("--jobs", type=int, default=4, help="runs at the same time")
    options = parser.parse_args()
    with TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(name)
        corpus = write_corpus(folder)
        size = ["--train-iters", str(options.steps), "--seq-length", str(options.seq_length)]
        jobs = [
            pool.submit(
                run, way, folder / str(number), corpus, size, options.every, 60 * options.minutes
            )
            for number, way in enumerate(WAYS)
        ]
        found = [job.result() for job in jobs]
    print(table(found))
    same = all(outcome.bits == found[0].bits[: len(outcome.bits)] for outcome in found)
    print(f"losses {'are' if same else 'are NOT'} the same in all of them, to the last bit")
    return 0 if same else 1


def run(
    way: Way, folder: Path, corpus: Path, size: Sequence[str], every: float, limit: float
) -> Outcome:
    """Train to the end while ranks are killed."""
    write_plan(folder, [])
    words = [sys.executable, "-m", "benchmarks.planted_faults", str(folder), "train", "debug"]
    words += [*LAYOUT.split(), *size, *way.flags.split(), "--save", str(folder / "run")]
    words += ["--data-path", str(corpus), "--data-cache-path", str(folder / "cache")]
    if "--non-persistent" in way.flags:
        words += ["--non-persistent-local-ckpt-dir", str(folder / "memory")]
    chance, kills = random.Random(0), 0
    with (folder / "log").open("w") as log:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        job = subprocess.Popen(words, stdout=log, stderr=log, env=env)
        while not journal(folder) and job.poll() is None:
            time.sleep(0.1)
        following, end = time.time() + every, time.time() + limit
        while job.poll() is None:
            time.sleep(0.1)
            if way.faults and time.time() > following:
                if ranks := psutil.Process(job.pid).children():
                    chance.choice(ranks).kill()
                    kills += 1
                following += every
            if time.time() > end:
                job.terminate()
                job.wait()
    if job.returncode:
        raise SystemExit(f"{way.name}: ended with {job.returncode}\n{(folder / 'log').read_text()}")
    steps = [record for record in journal(folder) if "bits" in record]
    last = {record["step"]: record["bits"] for record in steps}
    bits = [last[step] for step in sorted(last)]
    return Outcome(way, read_history(folder / "run"), kills, len(steps), bits)


def table(found: Sequence[Outcome]) -> str:
    """One line a run."""
    lines = ["| states kept | steps done | faults | goodput | steps run again | minutes |"]
    lines.append("|---|" + "--:|" * 5)
    for outcome in found:
        goodput = outcome.history.goodput
        assert goodput is not None
        minutes = outcome.history.step_seconds / goodput / 60
        lines.append(
            f"| {outcome.way.name} | {len(outcome.bits)} | {outcome.kills} | {goodput:.1%} "
            f"| {outcome.ran - len(outcome.bits)} | {minutes:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
