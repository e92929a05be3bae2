"""Whatever goes wrong on one rank, in whichever phase and layout: that rank and the cause are named
at once, by all ranks alike, and the run ends with a status that is not 0.

A few cases of each kind are in the suite; `-m exhaustive` takes every deed in every phase and every
layout, and every value that can become NaN on every rank of every layout.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from fivefold.mesh.grid import Grid
from tests.programs import Program, torchrun
from tests.train import faults
from tests.train.faults import DEEDS, LAYOUTS, PHASES, SUBJECTS, Case

ROOT = Path(__file__).parents[2]
SECONDS = 60.0  # torch's own time-out would be 1800 s
GRIDS = {
    "replicas": Grid(dp_replicate=2),
    "zero1": Grid(dp_shard=2),
    "zero2": Grid(dp_shard=2),
    "zero3": Grid(dp_shard=2),
    "hsdp": Grid(dp_replicate=2, dp_shard=2),
    "tp2dp2": Grid(dp_shard=2, tp=2),
    "pp2": Grid(pp=2),
    "pp2tp2": Grid(pp=2, tp=2),
    "pp2zero3": Grid(pp=2, dp_shard=2),
    "cp2": Grid(cp=2),
}
CAUSES = {
    "kill": r"killed by SIGKILL; .*memory",
    "exit": r"left with status 0 before the end",
    "sysexit": r"left with sys.exit\(0\) before the end",
    "stop": r"is stopped \(by SIGSTOP.*\), while others wait for it\n  noticed by rank \d",
    "hang": r"hangs in hang \(.*faults.py:\d+\), while others wait for it\n  noticed by rank \d",
    "raise": r"ValueError: planted",
}
SPOILT = {
    "activation": r"first in the output of layers.\d.mlp, microbatch \d",
    "loss": r"first in the loss, microbatch \d",
    "cotangent": r"first in the gradient of the output of layers.\d.mlp, microbatch \d",
    "gradient": r"gradient of \S+ \(1 of \d+ elements\)\n  run once more, the step is finite",
    "parameter": r"parameter \S+ \(1 of \d+ elements\)",
    "exp_avg": r"exp_avg of \S+ \(1 of \d+ elements\) and 1 more",
    "exp_avg_sq": r"exp_avg_sq of \S+ \(1 of \d+ elements\) and 1 more",
}
WAITING = ("stop-forward-2-hsdp", "hang-save-1-tp2dp2")  # most of their time is idle
BUSY = (  # each told by other means than the others
    "kill-start-1-replicas",
    "raise-reduction-1-pp2",
    "gradient--1-zero2",
    "exp_avg--1-zero3",
    "cotangent--1-cp2",
)
TORCHRUN = (
    "exit-backward-1-replicas",
    pytest.param("stop-forward-0-pp2", marks=pytest.mark.exhaustive),
)


def check(case: Case, outcome: dict) -> None:
    """See that an outcome tells what was done, and nothing else."""
    errors = outcome["errors"]
    place = f"rank {case.rank} {GRIDS[case.layout].name(case.rank)}: "
    if case.deed in DEEDS:
        expected = rf"^error: {re.escape(place)}{CAUSES[case.deed]}"
        status = 137 if case.deed == "kill" else 1
    else:
        where = "not saved" if case.deed.startswith("exp_avg") else "not finite"
        expected = (
            rf"^error: step {faults.STEP} is {where}: .*\n  {re.escape(place)}{SPOILT[case.deed]}"
            r"[\s\S]*latest checkpoint: step 1\n"
        )
        status = 1
    assert re.search(expected, errors, re.MULTILINE), errors
    assert len(re.findall(r"^error:", errors, re.MULTILINE)) == 1, errors
    if case.deed in ("stop", "hang") and case.phase != "start":
        cause = CAUSES[case.deed].split(r"\n")[0]
        named = rf"^warning: no progress for .* {re.escape(place.rstrip(': '))} {cause}$"
        assert re.search(named, errors, re.MULTILINE), errors
    assert "Traceback" not in errors
    assert outcome["status"] == status
    assert outcome["seconds"] < SECONDS


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    lines = [f"def function_{n}(x):\n    return x + {n}\n" for n in range(300)]
    (folder / "part.txt").write_text("\n".join(lines))
    return folder


def start(corpus: Path, folder: Path, names: Sequence[str]) -> Program:
    return Program(faults.run_all, [str(corpus), str(folder), *names])


def outcomes(process: Program) -> Iterator[tuple[str, dict]]:
    output, _ = process.communicate()
    assert process.returncode == 0
    for line in output.splitlines():
        outcome = json.loads(line)
        yield outcome["case"], outcome


@pytest.fixture(scope="module")
def found(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict]:
    """What came of a case of the small set; those that wait do so beside all others."""
    folder = tmp_path_factory.mktemp("runs")
    processes = {names: start(corpus, folder, names) for names in (BUSY, *zip(WAITING))}

    @cache
    def of(names: tuple[str, ...]) -> dict[str, dict]:
        return dict(outcomes(processes[names]))

    return lambda name: next(of(names)[name] for names in processes if name in names)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUSY)
def test_the_rank_and_the_cause_are_named(found: Callable[[str], dict], name: str) -> None:
    check(Case.of(name), found(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHRUN)
def test_under_torchrun_too(corpus: Path, tmp_path: Path, name: str) -> None:
    case = Case.of(name)
    words = ["--torchrun", str(corpus), str(tmp_path), name]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = Program(torchrun, case.ranks, faults.run_and_leave, words, cwd=ROOT, env=env)
    _, errors = process.communicate(timeout=200)
    assert process.returncode != 0
    place = f"rank {case.rank} {GRIDS[case.layout].name(case.rank)}: "
    cause = "left before the end" if case.deed == "exit" else CAUSES[case.deed].split(r"\n")[0]
    (error,) = [line for line in errors.splitlines() if line.startswith("error:")]
    assert re.match(rf"error: {re.escape(place)}{cause}", error)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAITING)
def test_a_rank_that_others_wait_for_is_named(found: Callable[[str], dict], name: str) -> None:
    """After the others, which need the processors meanwhile."""
    check(Case.of(name), found(name))


def matrix(layout: str) -> list[str]:
    """Every deed in every phase, the ranks taking turns; every NaN on every rank."""
    ranks = LAYOUTS[layout][0]
    pairs = [(deed, phase) for deed in DEEDS for phase in PHASES]
    names = [
        f"{deed}-{phase}-{number % ranks}-{layout}" for number, (deed, phase) in enumerate(pairs)
    ]
    grid = GRIDS[layout]
    heads = [r for r in range(ranks) if grid.coordinates(r)["pp"] == grid.pp - 1]
    spoilt = [(s, r) for s in SUBJECTS for r in (heads if s == "loss" else range(ranks))]
    return [*names, *(f"{subject}--{rank}-{layout}" for subject, rank in spoilt)]


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_deed_in_every_phase(corpus: Path, tmp_path: Path, layout: str) -> None:
    wrong = {}
    for name, outcome in outcomes(start(corpus, tmp_path, matrix(layout))):
        try:
            check(Case.of(name), outcome)
        except AssertionError as error:
            wrong[name] = f"{outcome['status']}, {outcome['seconds']:.0f} s: {error}"
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
