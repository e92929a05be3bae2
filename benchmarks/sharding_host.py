"""What sharding strategies cost the host, beside replicas: CPU time of a layer and microbatch.

    python -m benchmarks.sharding_host [--microbatches 1 8 32] [--rounds 3] [--steps 10]

Two ranks train 8 layers whose tensors are so small that kernels take next to nothing. The engine's
own thread is timed, without the threads that move messages; with every strategy in turn, so that a
busy machine is busy for all, and the least time of a step counts.
"""

import argparse
import time
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.config.sharding import SHARDING
from fivefold.layout import Layout
from fivefold.train.engine import Engine
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.launch import launch_local
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.verify.batches import global_batch, microbatches, rows_of

RANKS, LAYERS = 2, 8


def layout_of(strategy: str, count: int) -> Layout:
    """Two ranks with so many microbatches of one short row each."""
    config = Config(PRESETS["debug-llama"]).with_values(
        num_layers=LAYERS,
        seq_length=16,
        micro_batch_size=1,
        global_batch_size=count * RANKS,
        precision="fp32",
        data_parallel_sharding_strategy=strategy,
    )
    return check(config, RANKS)


def seconds(layout: Layout, steps: int) -> float:
    """Least CPU seconds of a step, of the thread of the first rank that runs it."""
    told = get_context("fork").SimpleQueue()

    def rank(env: RankEnv) -> None:
        torch.set_num_threads(1)
        config = layout.config
        engine = Engine(layout, env.rank, init_process_group(env, "cpu"))
        own = rows_of(config, layout.grid.dp_rank(env.rank), layout.grid.dp)
        rows = microbatches(config, global_batch(config, 0), own)
        least = min(_steps(engine, rows, steps + 2))  # the first two set things up
        if env.rank == 0:
            told.put(least)
        dist.barrier()
        dist.destroy_process_group()

    if launch_local(rank, RANKS):
        raise SystemExit("a rank failed")
    return float(told.get())


def _steps(engine: Engine, rows: Any, steps: int) -> Iterator[float]:
    for _ in range(steps):
        before = time.thread_time()
        engine.step(rows)
        yield time.thread_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each strategy, in turn")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run")
    asked = parser.parse_args()
    print(f"{'':<22}" + "".join(f"{count:>6} microbatches" for count in asked.microbatches))
    least: dict[tuple[str, int], float] = {}
    for _ in range(asked.rounds):
        for count in asked.microbatches:
            for strategy in SHARDING:
                taken = seconds(layout_of(strategy, count), asked.steps)
                least[strategy, count] = min(taken, least.get((strategy, count), taken))
    for strategy in SHARDING:
        cells = []
        for count in asked.microbatches:
            taken = least[strategy, count]
            each, ratio = 1e6 * taken / count / LAYERS, taken / least["no_shard", count]
            cells.append(f"{f'{each:.0f} us, {ratio:.2f}':>19}")
        print(f"{strategy:<22}" + "".join(cells))


if __name__ == "__main__":
    main()
