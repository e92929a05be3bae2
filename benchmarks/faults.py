"""Two hundred faults of every kind in runs of several layouts: is each named, and is nothing lost?

    python -m benchmarks.faults [--faults 200] [--seed 0] [--jobs 2] [--only LAYOUT] [--keep FOLDER]

trains `debug` once undisturbed and once with faults in each layout, and starts the same command
again wherever it ended. A fault is named if the run says which rank, or which file, and what it
was. It is recovered if loss and gradient norm of every step from it to the next one are in the end
those of the undisturbed run, to the last bit. The seconds count from the fault until the third step
after it is finished for good, steps that run again included. Exits with 1 if a fault was not named
or not recovered.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.planted_faults import Fault, write_plan

PATIENCE = 240.0  # seconds without a step or a fault, after which a run has not recovered
GAP = (10, 13)  # steps between two faults
AFTER = 3  # steps after a fault until it counts as survived
SHARD = "--data-parallel-sharding-strategy"
COMMON = (
    "--seq-length 32 --global-batch-size 4 --eval-interval 0 --distributed-timeout-minutes 0.15 "
    "--watchdog-timeout-seconds 2 --max-restarts 1000 --lr-decay-style constant"
)
DISK = "--save-interval 5"
MEMORY = "--save-interval 20 --non-persistent-save-interval 3"
REPLICAS = "--check-weight-hash-across-dp-replicas-interval 5 --log-straggler"


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: one of `planted_faults.DEEDS`.
        weight: how often it comes, relative to the others.
        named: what the run must say, in regular expressions with {rank} and {step}.
        phases: where it may happen.
        needs: a part of a layout's flags without which it cannot be, or cannot be seen.
    """

    name: str
    weight: int
    named: tuple[str, ...]
    phases: tuple[str, ...] = ("forward", "backward", "reduction", "optimizer")
    needs: str = ""


AGAIN = r"restart \d+ of \d+ from the (checkpoint|state) of step \d+|from the beginning"
CONTINUES = r"continues after step \d+"
PLACE = r"rank {rank}( \w+\(\d+\))+"
KINDS = (
    Kind("rank killed", 30, (PLACE + ": killed by SIGKILL", AGAIN)),
    Kind("rank killed as it saves", 10, (PLACE + ": killed by SIGKILL", AGAIN), ("save",)),
    Kind("rank left", 10, (PLACE + ": left with status 0 before the end", AGAIN)),
    Kind("rank raised", 10, (PLACE + r": OSError: planted in step {step}", AGAIN)),
    Kind("rank stopped", 10, (PLACE + r":? is stopped \(by SIGSTOP", AGAIN)),
    Kind("rank hangs", 10, (PLACE + r":? hangs in hang \(", AGAIN)),
    Kind(
        "rank pauses",
        8,
        (PLACE + r" hangs in pause \(", r"hangs in .*: step {step}\b", "goes on after"),
    ),
    Kind(
        "rank slow",
        12,
        (PLACE + r" computes \S+ m?s a step, \d+\.\d+ times the median",),
        ("step",),
        "--log-straggler",
    ),
    Kind("connection cut", 10, (r"rank \d.*(onnection|waiting)", AGAIN)),
    Kind("disk full", 12, ("disk full: ", "bytes free", AGAIN), ("step",)),
    Kind("bit in a checkpoint", 14, (r"step-\d+ is damaged: \S+: expected",), ("step",)),
    Kind("bit in a state", 12, (r"\.safetensors is damaged",), ("step",), "--non-persistent"),
    Kind(
        "bit in a weight",
        14,
        (r"replicas differ", PLACE + r".* is not that of its replicas", AGAIN),
        ("step",),
        "--check-weight",
    ),
    Kind(
        "bit in a moment",
        8,
        (r"replicas differ", PLACE + r".* is not that of its replicas", AGAIN),
        ("step",),
        "--check-weight",
    ),
    Kind(
        "gradient NaN",
        14,
        (r"step \d+ is not (finite|saved)", PLACE + r": (gradient|exp_avg\S*) of \S+", AGAIN),
        ("optimizer",),
    ),
    Kind("asked to stop", 8, (r"asked to stop \(SIGTERM\): saved step \d+", CONTINUES), ("step",)),
    Kind("launcher killed", 8, ("exit -9", CONTINUES)),
    Kind("host lost", 8, ("exit -9",)),
    Kind("metrics damaged", 8, ("removed 1 line that is no record",), ("step",)),
    Kind("starts damaged", 6, (r"environment\.json is not JSON", AGAIN), ("step",)),
    Kind("folder moved", 4, (r"the run folder \S+ was moved to", CONTINUES), ("step",)),
    Kind("folder deleted", 2, (r"the run folder \S+ was deleted",), ("step",)),
)


@dataclass(frozen=True)
class Layout:
    """What is trained: its ranks, its recipe, and where it is kept."""

    name: str
    ranks: int
    flags: str
    recipe: str = "debug"


LAYOUTS = (
    Layout("dp2", 2, f"{MEMORY} {REPLICAS}"),
    Layout("tp2", 2, f"--tp 2 {DISK}"),
    Layout("pp2", 2, f"--pp 2 {MEMORY}"),
    Layout("zero3", 2, f"{SHARD} optim_grads_params {MEMORY}"),
    Layout("ep2", 2, f"--ep 2 {DISK}", "debug-mixtral"),
    Layout("tp2dp2", 4, f"--tp 2 --sequence-parallel {DISK} {REPLICAS}"),
    Layout("pp2zero1", 4, f"--pp 2 {SHARD} optim {MEMORY}"),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a fault; `seconds` is None if the run did not get on."""

    fault: Fault
    named: bool
    same: bool
    seconds: float | None

    @property
    def good(self) -> bool:
        return self.named and self.same and self.seconds is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="layouts that run at the same time")
    parser.add_argument("--only", help="name of a layout")
    parser.add_argument("--keep", type=Path, help="folder for runs and logs")
    options = parser.parse_args()
    chosen = [layout for layout in LAYOUTS if options.only in (None, layout.name)]
    chance, began = random.Random(options.seed), time.time()
    plans = planned(chosen, options.faults, chance)
    with TemporaryDirectory() as name:
        folder = options.keep or Path(name)
        corpus = write_corpus(folder)
        with ThreadPoolExecutor(options.jobs) as pool:
            jobs = [
                pool.submit(survived, layout, plans[layout], folder / layout.name, corpus)
                for layout in chosen
            ]
            found = [outcome for job in jobs for outcome in job.result()]
    print(table(found))
    print(f"{len(found)} faults in {len(chosen)} layouts in {time.time() - began:.0f} s")
    return 0 if found and all(outcome.good for outcome in found) else 1


def planned(layouts: Sequence[Layout], count: int, chance: random.Random) -> dict[Layout, list]:
    """The faults of each layout: every kind as often as its weight says, dealt to the layouts that
    can have it in turn."""
    total = sum(kind.weight for kind in KINDS)
    dealt: dict[Layout, list] = {layout: [] for layout in layouts}
    for kind in KINDS:
        able = [layout for layout in layouts if kind.needs in layout.flags]
        for _ in range(max(1, round(count * kind.weight / total)) if able else 0):
            fewest = min(len(dealt[layout]) for layout in able)
            layout = chance.choice([x for x in able if len(dealt[x]) <= fewest])
            dealt[layout].append(kind)
    return {layout: in_order(layout, kinds, chance) for layout, kinds in dealt.items()}


def in_order(layout: Layout, kinds: list[Kind], chance: random.Random) -> list[Fault]:
    """A plan in random order; what takes a run back to its beginning comes first."""
    chance.shuffle(kinds)
    kinds.sort(key=lambda kind: kind.name != "folder deleted")
    plan, step = [], 1
    for number, kind in enumerate(kinds):
        step += chance.randint(*GAP)
        phase = chance.choice(kind.phases)
        if phase == "save" and "--non-persistent" in layout.flags:  # which saves more often
            phase = "state"
        plan.append(Fault(number, kind.name, step, chance.randrange(layout.ranks), phase))
    return plan


def survived(layout: Layout, plan: list[Fault], folder: Path, corpus: Path) -> list[Outcome]:
    """Train with and without these faults."""
    steps = (plan[-1].step if plan else 0) + GAP[1]
    whole, faulty = folder / "undisturbed", folder / "faulty"
    write_plan(whole, [])
    write_plan(faulty, plan)
    for place in (whole, faulty):
        train(layout, steps, place, corpus, starts=1 if place == whole else 2 * len(plan) + 1)
    expected = {r["step"]: r["bits"] for r in journal(whole) if "bits" in r}
    if len(expected) != steps:
        raise SystemExit(f"the undisturbed run of {layout.name} ended early: {whole / 'log'}")
    found = [*outcomes(plan, journal(faulty), (faulty / "log").read_text(), expected, steps)]
    for outcome in found:
        if not outcome.good:
            print(f"{layout.name}: {outcome}; {faulty / 'log'}", flush=True)
    print(f"{layout.name}: {sum(o.good for o in found)} of {len(found)} faults", flush=True)
    return found


def train(layout: Layout, steps: int, folder: Path, corpus: Path, *, starts: int) -> None:
    """Train, and start again until all steps are done or a start did not help."""
    words = [sys.executable, "-m", "benchmarks.planted_faults", str(folder), "train"]
    words += [layout.recipe, "--nproc", str(layout.ranks), "--train-iters", str(steps)]
    words += [*COMMON.split(), *layout.flags.split(), "--save", str(folder / "run")]
    words += ["--data-path", str(corpus), "--data-cache-path", str(corpus / "cache")]
    if "--non-persistent" in layout.flags:
        words += ["--non-persistent-local-ckpt-dir", str(folder / "memory")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (folder / "log").open("ab", buffering=0) as log:
        for _ in range(starts):
            job = subprocess.Popen(words, stdout=log, stderr=log, env=env)
            status = ended(job, folder)
            log.write(f"exit {status}\n".encode())
            if status is None or (status == 0 and journal(folder)[-1].get("step") == steps):
                return
            if (folder / "away").exists():
                shutil.rmtree(folder / "run", ignore_errors=True)
                (folder / "away").rename(folder / "run")


def ended(job: "subprocess.Popen[bytes]", folder: Path) -> int | None:
    """Its status, or None if nothing happened any more."""
    while job.poll() is None:
        path = folder / "journal"
        latest = path.stat().st_mtime if path.exists() else folder.stat().st_mtime
        if time.time() > latest + PATIENCE:
            job.terminate()
            job.wait()
            return None
        time.sleep(0.1)
    return job.returncode


def outcomes(
    plan: list[Fault],
    records: list[dict[str, Any]],
    log: str,
    expected: dict[int, list[str]],
    steps: int,
) -> Iterator[Outcome]:
    """What became of each fault."""
    parts = re.split(r"^fault (\d+)", log, flags=re.MULTILINE)[1:]
    said = dict(zip(parts[::2], parts[1::2], strict=True))
    last = {record["step"]: record for record in records if "bits" in record}
    begun = {record["fault"]: record for record in records if "fault" in record}
    for fault in plan:
        text, kind = said.get(str(fault.number), ""), next(k for k in KINDS if k.name == fault.kind)
        start, end = begun.get(fault.number), begun.get(fault.number + 1, {"step": steps + 1})
        if start is None:
            yield Outcome(fault, named=False, same=False, seconds=None)
            continue
        patterns = [p.format(rank=fault.rank, step=start["step"]) for p in kind.named]
        named = all(re.search(pattern, text) for pattern in patterns)
        span = range(start["step"], max(end["step"], start["step"] + 1))
        same = all(s in last and last[s]["bits"] == expected[s] for s in span if s <= steps)
        until = end.get("time", float("inf"))
        later = [
            r["time"] - start["time"]
            for r in records
            if r.get("step") == start["step"] + AFTER and "bits" in r and r["time"] < until
        ]
        seconds = later[-1] if later and later[-1] > 0 else None
        yield Outcome(fault, named, same, seconds)


def journal(folder: Path) -> list[dict[str, Any]]:
    """The steps and faults of a run, in the order in which they ended and began."""
    path = folder / "journal"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(found: Sequence[Outcome]) -> str:
    """One line a kind, and one for all of them."""
    lines = ["| fault | times | named | nothing lost | median s | worst s |", "|---|" + "--:|" * 5]
    names = [kind.name for kind in KINDS if any(o.fault.kind == kind.name for o in found)]
    for name in (*names, "all"):
        of = [o for o in found if name in (o.fault.kind, "all")]
        seconds = [o.seconds for o in of if o.seconds is not None] or [float("nan")]
        counts = f"{len(of)} | {sum(o.named for o in of)} | {sum(o.same for o in of)}"
        lines.append(f"| {name} | {counts} | {median(seconds):.1f} | {max(seconds):.1f} |")
    return "\n".join(lines)


def write_corpus(folder: Path) -> Path:
    """A small corpus."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    lines = [f"def function_{n}(x):\n    return x + {n}\n" for n in range(3000)]
    (corpus / "text.txt").write_text("\n".join(lines))
    return corpus


if __name__ == "__main__":
    sys.exit(main())
