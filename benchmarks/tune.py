"""`fivefold tune` beside a sweep of every layout: how near its choice is, and what it cost.

    python -m benchmarks.tune [--recipe debug] [--nproc 8] [--rounds 5]

The sweep tries each mesh with every sharding strategy and micro-batches of one and of the most
sequences, for as many steps as a first trial of `tune`. The machine is measured
first, and that time is `tune`'s. At the end both
choices run in turns, and the ratio is that of their medians.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path

from fivefold.check import check
from fivefold.cli.tune import Options, candidates, measure
from fivefold.config.config import Config
from fivefold.config.sharding import SHARDING
from fivefold.config.sources import load_with_origins
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.learn.tuning import Tuning
from fivefold.predict.cluster_file import load_cluster
from fivefold.tell.describe import summary
from fivefold.train.corpora import open_data
from fivefold.train.trial import try_layout


def sweep(config: Config, world: int) -> list[Layout]:
    """The layouts of the sweep."""
    sizes = [1 << n for n in range(world.bit_length()) if 1 << n <= world]
    found: dict[Layout, None] = {}
    for tp, pp, cp, strategy, widest in product(sizes, sizes, sizes, SHARDING, (False, True)):
        if tp * pp * cp > world:
            continue
        dp = world // (tp * pp * cp)
        batch = config.training.global_batch_size
        settings = {
            "tensor_model_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp,
            "data_parallel_sharding_strategy": strategy,
            "micro_batch_size": max(1, batch // dp // pp) if widest else 1,
        }
        try:
            found[check(config.with_values(**settings), world)] = None
        except ConfigError:
            continue
    return [*found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="debug")
    parser.add_argument("--nproc", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    asked, flags = parser.parse_known_args()
    words = [asked.recipe, "--nproc", str(asked.nproc), "--device", "cpu", *flags]
    loaded = load_with_origins(words, Options, print)
    options, data = loaded.options, open_data(loaded.config, print)

    def attempt(layout: Layout, steps: int) -> tuple[list[float], str]:
        return try_layout(layout, data, "cpu", steps)

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        measure(file := Path(folder, "machine.toml"), asked.nproc, "cpu")
        machine = load_cluster(file)
    tuning = Tuning(
        machine,
        partial(candidates, loaded, asked.nproc),
        attempt,
        options.trial_steps,
        options.run_steps,
        options.max_trials,
    )
    trials = len([*tuning.explore()])
    again = len([*tuning.halve()])
    tuned = time.perf_counter() - began
    chosen = tuning.best
    assert chosen is not None
    print(f"tune: {trials} layouts, {again} measured again, {tuned:.0f} s", flush=True)
    print(f"  {summary(chosen.layout)}", flush=True)

    began, times = time.perf_counter(), dict[Layout, float]()
    for layout in (layouts := sweep(loaded.config, asked.nproc)):
        found, why = attempt(layout, options.trial_steps)
        if not why:
            times[layout] = statistics.median(found[1:])
    swept, best = time.perf_counter() - began, min(times, key=times.__getitem__)
    print(f"sweep: {len(layouts)} layouts, {swept:.0f} s, {swept / tuned:.1f} times tune's")
    print(f"  {summary(best)}", flush=True)
    runs: dict[Layout, list[float]] = {chosen.layout: [], best: []}
    for _ in range(asked.rounds):
        for layout, kept in runs.items():
            kept += attempt(layout, 4 * options.trial_steps)[0][1:]
    ours, theirs = (statistics.median(kept) for kept in (runs[chosen.layout], runs[best]))
    print(f"in turns: tune's {ours * 1e3:.1f} ms, the sweep's {theirs * 1e3:.1f} ms: ", end="")
    print(f"{ours / theirs - 1:+.1%}")


if __name__ == "__main__":
    main()
