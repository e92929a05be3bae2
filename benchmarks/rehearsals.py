"""Published layouts at full size, rehearsed: peaks against the planner's, bytes, and seconds.

    python benchmarks/rehearsals.py [--layouts kimi-k2 ...] [--jobs 2] [--ranks 0 8 ...] [--every]

Rehearses the layouts under benchmarks/data/layouts, and the recipe of Llama 3 405B, with their
published numbers of ranks, as `fivefold rehearse` does or of the given ranks only, and prints for
each the rank whose peak is farthest from the planner's. `--every` runs every microbatch.
"""

import argparse
import datetime
import os
import platform
import time
from pathlib import Path
from typing import Any

from fivefold.check import check
from fivefold.cli.rehearse import Options
from fivefold.config.sources import load
from fivefold.predict.cluster_file import load_cluster
from fivefold.rehearse.report import make_report
from fivefold.rehearse.roles import rehearsed_layout, roles
from fivefold.rehearse.run import rehearse_ranks
from fivefold.units import human_bytes

LAYOUTS = Path(__file__).resolve().parent / "data" / "layouts"
WORLDS = {
    "llama3-405b": 16384,
    "llama3-405b-131072": 16384,
    "gpt-1t": 512,
    "deepseek-v3": 2048,
    "kimi-k2": 256,
    "qwen3-235b-a22b": 256,
}


def main() -> None:
    asked = parse()
    print(f"{datetime.date.today()}, {platform.machine()}, {asked.jobs} processes")
    for name in asked.layouts:
        start = time.perf_counter()
        report = rehearse(name, asked.jobs, asked.ranks, every=asked.every)
        seconds = time.perf_counter() - start
        worst = max(report["ranks"], key=lambda rank: abs(rank["peak"] / rank["planned"] - 1))
        peak, planned = worst["peak"], worst["planned"]
        print(
            f"{name} on {WORLDS[name]}: {len(report['ranks'])} ranks rehearsed in {seconds:.0f} s, "
            f"{len(report['problems'])} of their pairs disagree, {len(report['differing'])} send "
            f"other bytes than theory says; rank {worst['rank']} is farthest from the planner's "
            f"peak: {human_bytes(peak)} against {human_bytes(planned)} ({peak / planned - 1:+.1%})",
            flush=True,
        )


def rehearse(name: str, jobs: int, ranks: list[int] | None, *, every: bool) -> dict[str, Any]:
    path = LAYOUTS / f"{name}.toml"
    words = [str(path) if path.exists() else name, "--nproc", str(WORLDS[name])]
    _, config = load(words, Options, print)
    layout = rehearsed_layout(check(config, WORLDS[name]))
    scripts = rehearse_ranks(layout, ranks or roles(layout), every=every, processes=jobs)
    return make_report(layout, name, scripts, load_cluster("H100", WORLDS[name])).as_json()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--ranks", type=int, nargs="+", help="ranks to run (default: every role)")
    parser.add_argument("--every", action="store_true", help="run every microbatch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
