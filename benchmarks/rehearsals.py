"""Published layouts at full size, rehearsed: what they hold, against the planner, and how long.

    python benchmarks/rehearsals.py [--ranks first] [--jobs 2] [NAME ...]

Rehearses one rank of each pipeline rank (`--ranks first`: of the first only) of the layouts under
benchmarks/data/layouts, with their published numbers of ranks, and prints a line for each: peak of
the rank that is farthest from the planner's peak, what the ranks disagree on, and seconds.
"""

import argparse
import datetime
import os
import platform
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fivefold.check import check  # noqa: E402
from fivefold.config.sources import read_config  # noqa: E402
from fivefold.predict.cluster import load_cluster  # noqa: E402
from fivefold.rehearse.report import make_report  # noqa: E402
from fivefold.rehearse.roles import rehearsed_layout  # noqa: E402
from fivefold.rehearse.run import rehearse_ranks  # noqa: E402
from fivefold.units import human_bytes  # noqa: E402
from fivefold.verify.report import describe  # noqa: E402

WORLDS = {"deepseek-v3": 2048, "kimi-k2": 256, "qwen3-235b-a22b": 256}


def main() -> None:
    asked = parse()
    print(
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, {asked.jobs} jobs"
    )
    for name in asked.names:
        world = WORLDS[name]
        whole = check(read_config(str(ROOT / f"benchmarks/data/layouts/{name}.toml")), world)
        layout = rehearsed_layout(whole)
        ranks = layout.grid.group_of(0, ("pp",))[: 1 if asked.ranks == "first" else None]
        start = time.perf_counter()
        scripts = rehearse_ranks(layout, ranks, processes=asked.jobs)
        seconds = time.perf_counter() - start
        report = make_report(layout, name, scripts, load_cluster("H100", world))
        pairs = zip(scripts, report.planned, strict=True)
        script, planned = max(pairs, key=lambda pair: abs(pair[0].peak / pair[1] - 1))
        print(f"\n{name}: {describe(layout)}")
        print(
            f"  rank {script.rank}: peak {human_bytes(script.peak)}, planner {human_bytes(planned)}"
            f" ({script.peak / planned - 1:+.1%}); {len(report.problems)} problems, "
            f"{len(report.differing)} other bytes; {len(scripts)} ranks in {seconds:.0f} s"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(WORLDS))
    parser.add_argument("--ranks", choices=("first", "all"), default="all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
