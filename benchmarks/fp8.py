"""The loss of training in 8 bits beside bf16: python -m benchmarks.fp8 [STEPS [SEEDS]]

Trains the debug model from the same weights on the same data in fp32, in bf16, and with each 8-bit
recipe, on this machine's CPU, where 8-bit products are computed by their plain twin: the rounding
of operands is that of a GPU, only sums are rounded elsewhere. Prints, for each, the mean over the
last quarter of the steps of the loss, and of its difference from the bf16 run of the same seed,
with the standard error of that mean over seeds. The difference of fp32 from bf16 is the noise to
compare with: it is rounding, too, and nothing else.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fivefold.model.eight_bit.fp8 import RECIPES
from fivefold.model.eight_bit.rules import E4M3_ALONE

STEPS, SEEDS = 300, 3
WAYS = {
    "bf16": ("--bf16",),
    "fp32": ("--precision", "fp32"),
    **{
        f"fp8 {form}, {recipe}": ("--bf16", "--fp8-format", form, "--fp8-recipe", recipe)
        for recipe in ("delayed", *RECIPES)
        for form in ("hybrid", "e4m3")
        if form == "e4m3" or recipe not in E4M3_ALONE
    },
}


def losses(flags: Sequence[str], steps: int, seed: int, ranks: int = 1) -> list[float]:
    """The loss of each step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ["train", "debug", "--nproc", str(ranks), "--device", "cpu", *flags]
        words += ["--save", str(run), "--train-iters", str(steps), "--seed", str(seed)]
        words += ["--micro-batch-size", str(8 // ranks), "--lr-warmup-iters", str(steps // 10)]
        subprocess.run([sys.executable, "-m", "fivefold", *words], check=True, capture_output=True)
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows]


def compare(ways: Mapping[str, Sequence[str]], steps: int, seeds: int, ranks: int = 1) -> None:
    """Train each way with each seed and print a table; the first way is what others differ from."""
    last = steps // 4
    of_first: list[float] = []
    print(f"{'':<24}{'loss':>8}{'- ' + next(iter(ways)):>10}{'+-':>9}")
    for name, flags in ways.items():
        runs = [losses(flags, steps, seed, ranks)[-last:] for seed in range(seeds)]
        found = [statistics.mean(run) for run in runs]
        of_first = of_first or found
        off = [one - other for one, other in zip(found, of_first, strict=True)]
        error = statistics.stdev(off) / seeds**0.5 if seeds > 1 else float("nan")
        mean = statistics.mean(found), statistics.mean(off)
        print(f"{name:<24}{mean[0]:>8.4f}{mean[1]:>+10.4f}{error:>9.4f}", flush=True)


def parser(doc: str, steps: int, seeds: int) -> argparse.ArgumentParser:
    """What a comparison may be told: how many steps and seeds, unless these many."""
    words = argparse.ArgumentParser(description=doc.partition(": python")[0])
    words.add_argument("steps", nargs="?", type=int, default=steps, help="steps of a run")
    words.add_argument("seeds", nargs="?", type=int, default=seeds, help="runs of each way")
    return words


def main() -> None:
    """Train in 8 bits and without."""
    asked = parser(__doc__ or "", STEPS, SEEDS).parse_args()
    compare(WAYS, asked.steps, asked.seeds)


if __name__ == "__main__":
    main()
