"""Kill ranks at random moments, resume, and compare every loss with an uninterrupted run.

    python benchmarks/kill.py [--times 50] [--seed 0]

The same recipe runs once without interruption. Then it runs again and again in one folder while
`kill -9` hits one rank, or the whole job, at a random moment of start-up, step, evaluation or
checkpoint; each start resumes from the latest checkpoint until the run is done. Losses must be the
same to the last bit. At the end the run is resumed from the middle in another layout, where they
must be equal to 1e-12 (the runs are fp64).
"""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

FIVEFOLD = (sys.executable, "-m", "fivefold")
RECIPE = shlex.split(
    "train debug --precision fp64 --train-iters 60 --save-interval 4 --eval-interval 10 "
    "--eval-iters 1 --global-batch-size 8"
)
LAYOUT = shlex.split("--nproc 4 --tp 2 --pp 2")
OTHER = shlex.split(
    "--nproc 4 --tp 2 --dp-shard 2 --data-parallel-sharding-strategy optim_grads_params"
)


def main() -> int:
    """Run the experiment and say what was found; 0 if every loss agreed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=50, help="kills in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims")
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = whole_run(folder / "reference", LAYOUT)
        expected = losses(folder / "reference")
        print(f"uninterrupted: {len(expected)} steps in {seconds:.1f} s")
        kills = starts = finished = 0
        while kills < asked.times:
            run = folder / f"killed-{finished}"
            starts += 1
            done, kind = run_and_kill(run, LAYOUT, chance, seconds)
            if not done:
                kills += 1
                print(f"kill {kills}: {kind}, {latest(run)}", flush=True)
                continue
            finished += 1
            compare(run, expected)
            shutil.rmtree(run)
        last = folder / f"killed-{finished}"
        whole_run(last, LAYOUT)
        compare(last, expected)
        print(f"{kills} kills in {starts} starts, {finished + 1} runs finished: bitwise equal")
        worst = in_another_layout(folder, expected)
    print(f"resumed half-way as {' '.join(OTHER[2:])}: largest difference {worst:.1e}")
    return 0 if worst <= 1e-12 else 1


def whole_run(run: Path, layout: list[str]) -> float:
    """Run to the end; seconds it took."""
    began = time.perf_counter()
    subprocess.run(command(run, layout), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def run_and_kill(
    run: Path, layout: list[str], chance: random.Random, seconds: float
) -> tuple[bool, str]:
    """Start or resume a run and kill something; whether it was done before, and what was hit."""
    job = subprocess.Popen(
        command(run, layout), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        job.wait(timeout=chance.uniform(0.3, seconds))
    except subprocess.TimeoutExpired:
        kind = kill(job.pid, chance)
        _, errors = job.communicate(timeout=60)
        if job.returncode == 0:  # the victim had finished already
            return True, kind
        return False, f"{kind}; it said: {(errors.strip().splitlines() or ['nothing'])[0]}"
    if job.returncode:
        raise SystemExit(f"a resumed run failed by itself:\n{job.stderr and job.stderr.read()}")
    return True, "nothing"


def kill(pid: int, chance: random.Random) -> str:
    """kill -9 one rank or all processes of the job."""
    try:
        ranks = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return "nothing"
    if not ranks or chance.random() < 0.4:
        victims, kind = [pid, *(rank.pid for rank in ranks)], "all"
    else:
        victims, kind = [chance.choice(ranks).pid], "one rank"
    for victim in victims:
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            kind += " (gone)"
    return kind


def in_another_layout(folder: Path, expected: list[float]) -> float:
    """Largest relative difference of the losses after a resharded resume."""
    half = folder / "half"
    subprocess.run(
        [*command(half, LAYOUT), "--train-iters", "32", "--lr-decay-iters", "60"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    whole_run(half, OTHER)
    found = losses(half)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def compare(run: Path, expected: list[float]) -> None:
    """Exit with the first step whose loss is not bitwise that of the reference."""
    found = losses(run)
    for step, (a, b) in enumerate(zip(found, expected, strict=True), 1):
        if a != b:
            raise SystemExit(f"{run.name}: step {step} has loss {a!r} instead of {b!r}")


def losses(run: Path) -> list[float]:
    """Loss and gradient norm of every step, from metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [value for r in records if "loss" in r for value in (r["loss"], r["grad_norm"])]


def latest(run: Path) -> str:
    """What there is to resume from."""
    pointer = run / "checkpoints" / "latest"
    return (
        f"checkpoint of step {pointer.read_text().strip()}" if pointer.exists() else "no checkpoint"
    )


def command(run: Path, layout: list[str]) -> list[str]:
    """The command line of a run in a folder."""
    return [*FIVEFOLD, *RECIPE, *layout, "--save", str(run)]


if __name__ == "__main__":
    raise SystemExit(main())
