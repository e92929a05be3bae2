"""gloo's own collectives against the pairwise ones of `fivefold.mesh.collectives`, on this machine.

    python -m benchmarks.collectives [--ranks 2 4]

Prints, per collective, size of the whole buffer and number of ranks, the median wall time and the
CPU time of one call (of rank 0, user and system). CPU time is the fairer of the two where ranks
outnumber cores, since waiting for another rank's turn is wall time only.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.turns import about
from fivefold.mesh.collectives import all_gather, all_reduce, reduce_scatter
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.launch import launch_local
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.units import human_bytes

SIZES = tuple(4096 << shift for shift in (0, 4, 8, 12, 14))  # 4 KB to 64 MB
SECONDS = 0.5  # spent on each row, at least three calls


def _gloo_all_gather(x: Tensor) -> None:
    part = x.chunk(dist.get_world_size())[dist.get_rank()]
    dist.all_gather_into_tensor(torch.empty_like(x), part)


def _our_all_gather(x: Tensor) -> None:
    all_gather(x.chunk(dist.get_world_size())[dist.get_rank()], dist.group.WORLD)


def _gloo_reduce_scatter(x: Tensor) -> None:
    dist.reduce_scatter_tensor(x.new_empty(x.numel() // dist.get_world_size()), x)


def _our_reduce_scatter(x: Tensor) -> None:
    reduce_scatter(x, dist.group.WORLD)


def _gloo_all_reduce(x: Tensor) -> None:
    all_reduce(x, dist.group.WORLD)


def _pairwise_all_reduce(x: Tensor) -> None:
    """What ours would be: kept here to show why gloo's is used."""
    all_gather(reduce_scatter(x, dist.group.WORLD), dist.group.WORLD)


WAYS: Mapping[str, Mapping[str, Callable[[Tensor], None]]] = {
    "all-gather": {"gloo": _gloo_all_gather, "pairwise": _our_all_gather},
    "reduce-scatter": {"gloo": _gloo_reduce_scatter, "pairwise": _our_reduce_scatter},
    "all-reduce": {"gloo": _gloo_all_reduce, "pairwise": _pairwise_all_reduce},
}


@dataclass(frozen=True)
class Row:
    """One call: wall and CPU in ms."""

    collective: str
    way: str
    size: int
    wall: float
    cpu: float


def _time(call: Callable[[Tensor], None], x: Tensor) -> tuple[float, float]:
    """Median wall and mean CPU milliseconds of a call; the number of calls is agreed on."""
    start = time.perf_counter()
    call(x)
    once = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    calls = min(200, max(3, int(SECONDS / once.item())))
    walls = []
    dist.barrier()
    cpu = time.process_time()
    for _ in range(calls):
        start = time.perf_counter()
        call(x)
        walls.append(time.perf_counter() - start)
    return 1e3 * statistics.median(walls), 1e3 * (time.process_time() - cpu) / calls


def _measure(env: RankEnv) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # names that torch 2.13 is about to change
    init_process_group(env, "cpu")
    rows = []
    for size in SIZES:
        x = torch.zeros(size // 4)
        for collective, ways in WAYS.items():
            for way, call in ways.items():
                rows.append(Row(collective, way, size, *_time(call, x)))
    if env.rank == 0:
        _show(env.world_size, rows)
    dist.barrier()
    dist.destroy_process_group()


def _show(ranks: int, rows: list[Row]) -> None:
    by_key = {(row.collective, row.size, row.way): row for row in rows}
    print(f"\n{ranks} ranks, ms a call      wall: gloo  pairwise    CPU: gloo  pairwise  CPU ratio")
    for collective in WAYS:
        for size in SIZES:
            gloo, ours = (by_key[collective, size, way] for way in ("gloo", "pairwise"))
            print(
                f"{collective:<15}{human_bytes(size):>9}"
                f"{gloo.wall:>11.3f}{ours.wall:>10.3f}{gloo.cpu:>13.3f}{ours.cpu:>10.3f}"
                f"{gloo.cpu / ours.cpu:>10.1f}x",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    print(about("fp32 over loopback"))
    for ranks in options.ranks:
        launch_local(_measure, ranks)


if __name__ == "__main__":
    main()
