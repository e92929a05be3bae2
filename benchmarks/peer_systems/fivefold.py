"""Fivefold, as a user runs it: `fivefold train` in a process tree of its own.

Reads from each step's line of metrics.jsonl: `loss`, `time` (seconds since the epoch at the end
of the step), `cpu_seconds` (user + system so far, summed over ranks), and on the last line
`peak_rss_mb`, `peak_rss_max_mb` and `pss_mb` over the ranks.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.peer_systems.common import BATCH, MICROBATCH, SEQ, parse, say
from benchmarks.peer_systems.rows import Row

RECIPE = Path(__file__).parent.parent / "recipes" / "peers.toml"
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def supports(row: Row) -> bool:
    return True


def command(row: Row, train_iters: int, folder: str) -> list[str]:
    flags = {
        "--nproc": row.ranks,
        "--tensor-model-parallel-size": row.tp,
        "--pipeline-model-parallel-size": row.pp,
        "--data-parallel-sharding-strategy": STRATEGIES[row.zero],
        "--micro-batch-size": MICROBATCH if row.pp > 1 else BATCH // row.dp,
        "--train-iters": train_iters,
        "--save": folder,
    }
    words = [str(word) for flag in flags.items() for word in flag]
    fivefold = [sys.executable, "-m", "fivefold.cli.main"]
    return [*fivefold, "train", str(RECIPE), *words, *["--sequence-parallel"] * row.sp]


def run(row: Row, steps: int, warmup: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command(row, warmup + steps, folder), check=True, stdout=sys.stderr)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    metrics = [line for line in map(json.loads, lines) if "loss" in line]
    first, before, last = metrics[0], metrics[warmup - 1], metrics[-1]
    return {
        "cpu_s_per_step": (last["cpu_seconds"] - before["cpu_seconds"]) / steps,
        "tokens_per_s": BATCH * SEQ * steps / (last["time"] - before["time"]),
        "startup_s": first["time"] - float(os.environ["PEERS_LAUNCHED"]),
        "first_step_after_import_s": None,
        **{key: last[key] for key in ("peak_rss_mb", "peak_rss_max_mb", "pss_mb")},
        "loss": [line["loss"] for line in metrics],
    }


if __name__ == "__main__":
    asked = parse(supports)
    say(run(asked.row, asked.steps, asked.warmup))
