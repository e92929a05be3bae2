"""Tensor-parallel linears with their messages hidden and not, side by side, over gloo.

    python -m benchmarks.tensor_overlap [--ranks 2] [--rounds 15] [--trace FOLDER]

Forward and backward of an MLP under sequence parallelism: all tokens gathered before they are
multiplied (`whole`), each rank's multiplied when they arrive and sent when they have been
(`parts`), and the same with tokens that every rank passes on to the next (`ring`). The ways take
turns in every round. Prints the medians of wall and CPU time (of rank 0, user and system), the
median over rounds of the ratio to `whole`, and the share of the products' time in which a receive
was under way, from torch's profiler; `--trace` keeps its Chrome traces.

The CPUs that multiply also move the messages here, so hiding them can gain little but waiting.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.turns import Taken, about, timed
from fivefold.mesh.collectives import start_messages
from fivefold.model.layers import Linear
from fivefold.model.products import Kept
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.exchange import Exchange, Factor, SplitTokens, TokensInParts
from fivefold.tensor.linear import ColumnParallel, RowParallel
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.launch import launch_local
from fivefold.train.ranks.rank_env import RankEnv

TOKENS, HIDDEN, INNER = 1024, 768, 2048
STEPS = 3  # timed together
HALVES = ("forward", "backward")


@dataclass(frozen=True)
class Ring(TokensInParts):
    """Gathers in a ring, as papers draw it; kept here to show why pairs exchange directly."""

    def gather_products(self, x: Tensor, factors: Sequence[Factor]) -> tuple[Kept, list[Tensor]]:
        size, rank = self.group.size(), self.group.rank()
        whole = x.new_empty(size, *x.shape)
        whole[rank] = x
        products = [x.new_empty(size, len(x), factor.features) for factor in factors]
        for step in range(size):
            here, comes = (rank - step) % size, (rank - step - 1) % size
            messages = None
            if step < size - 1:
                sends, receives = (
                    {(rank + 1) % size: whole[here]},
                    {(rank - 1) % size: whole[comes]},
                )
                messages = start_messages(sends, receives, self.group)
            for factor, product in zip(factors, products, strict=True):
                factor.times(factor.taken(whole[here]), product[here])
            if messages is not None:
                messages.wait()
        return factors[0].kept(whole.flatten(0, 1)), [product.flatten(0, 1) for product in products]


WAYS: dict[str, type[SplitTokens]] = {"whole": SplitTokens, "parts": TokensInParts, "ring": Ring}


Half = Callable[[], None]


def _halves(exchange: Exchange, ranks: int) -> tuple[Half, Half]:
    torch.manual_seed(0)
    deferred = DeferredWeights()
    column, row = ColumnParallel(exchange, deferred), RowParallel(exchange, deferred)
    gate, up = Linear(HIDDEN, INNER // ranks), Linear(HIDDEN, INNER // ranks)
    down = Linear(INNER // ranks, HIDDEN)
    for linear in (gate, up, down):
        torch.nn.init.normal_(linear.weight, std=0.02)
    x_tH, grad_tH = torch.randn(2, TOKENS // ranks, HIDDEN)
    x_tH.requires_grad_()

    made: list[Tensor] = []

    def forward() -> None:
        made.append(row(torch.mul(*column(x_tH, gate, up)), down))

    def backward() -> None:
        made.pop().backward(grad_tH)

    return forward, backward


def _steps(halves: tuple[Half, Half]) -> None:
    for _ in range(STEPS):
        for half in halves:
            half()


def _measure(env: RankEnv, rounds: int, folder: Path | None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    init_process_group(env, "cpu")
    assert dist.group.WORLD is not None
    halves = {name: _halves(way(dist.group.WORLD), env.world_size) for name, way in WAYS.items()}
    times: dict[str, list[Taken]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, both in halves.items():
            dist.barrier()
            times[name].append(timed(partial(_steps, both)))
    shares = {
        name: [
            _beside(half, f"{name}-{what}", env, folder)
            for half, what in zip(both, HALVES, strict=True)
        ]
        for name, both in halves.items()
    }
    if env.rank == 0:
        _show(env.world_size, times, shares)
    dist.barrier()
    dist.destroy_process_group()


def _beside(half: Half, name: str, env: RankEnv, folder: Path | None) -> float:
    """The share of the products' time in which a message was being received."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        half()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(folder / f"{name}-of-{env.world_size}-rank-{env.rank}.json"))
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in seen.events()]
    waits = [(start, end) for what, start, end in spans if what == "gloo:recv"]
    products = [(start, end) for what, start, end in spans if what in ("aten::mm", "aten::addmm_")]
    total = sum(end - start for start, end in products)
    return sum(_covered(*span, waits) for span in products) / total


def _covered(start: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """How much of a time lies in any of some others."""
    covered, reached = 0.0, start
    for first, last in sorted(spans):
        first, last = max(first, reached), min(last, end)
        covered += max(last - first, 0.0)
        reached = max(reached, last)
    return covered


def _show(ranks: int, times: dict[str, list[Taken]], shares: dict[str, list[float]]) -> None:
    print(f"\n{ranks} ranks{'ms a step: wall':>24}{'CPU':>8}{'ratio: wall':>14}{'CPU':>7}", end="")
    print("   products while receiving: forward  backward")
    for name, each in times.items():
        wall, cpu = (1e3 / STEPS * statistics.median(column) for column in zip(*each, strict=True))
        ratios = "".join(
            f"{ratio:>{w}.2f}"
            for ratio, w in zip(_ratios(each, times["whole"]), (14, 7), strict=True)
        )
        beside = "".join(
            f"{share:>{w}.0%}" for share, w in zip(shares[name], (36, 10), strict=True)
        )
        print(f"{name:<7}{wall:>24.1f}{cpu:>8.1f}{ratios}{beside}", flush=True)


def _ratios(each: Sequence[Taken], base: Sequence[Taken]) -> Iterator[float]:
    for column in range(2):
        yield statistics.median(a[column] / b[column] for a, b in zip(each, base, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    print(about(f"fp32, {TOKENS} tokens, {HIDDEN} -> 2 x {INNER} -> {HIDDEN}"))
    for ranks in options.ranks:
        launch_local(partial(_measure, rounds=options.rounds, folder=options.trace), ranks)


if __name__ == "__main__":
    main()
