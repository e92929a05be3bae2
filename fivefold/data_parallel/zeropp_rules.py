"""Validation of the settings of ZeRO++; torch-free."""

from collections.abc import Callable

from fivefold.config.divisors import divisors
from fivefold.config.parallel import ParallelConfig
from fivefold.config.settings import flag_of
from fivefold.config.sharding import SHARDING, Sharding
from fivefold.errors import Mistakes
from fivefold.mesh.grid import Grid
from fivefold.mesh.nodes import experts_within

WEIGHTS, GRADIENTS = "zero_quantized_weights", "zero_quantized_gradients"
HPZ, QGZ = "zero_hpz_partition_size", "zero_qgz_partition_size"
ACTS_ON: dict[str, Callable[[Sharding], bool]] = {
    WEIGHTS: lambda sharding: sharding.splits_optimizer,
    GRADIENTS: lambda sharding: sharding.splits_optimizer,
    HPZ: lambda sharding: sharding.splits_parameters,
}
"""The sharding strategies for which each technique has an effect."""


def techniques(parallel: ParallelConfig) -> list[str]:
    """The enabled settings of ZeRO++."""
    return [n for n in ACTS_ON if getattr(parallel, n) != getattr(ParallelConfig, n)]


def check_zeropp(grid: Grid, parallel: ParallelConfig, experts: bool, mistakes: Mistakes) -> None:
    """Report settings of ZeRO++ that have no effect, or do not divide the sharding group.

    Args:
        grid: the ranks.
        parallel: settings of the layout.
        experts: whether the model has experts.
        mistakes: collection to which mistakes are added.
    """
    strategy = parallel.data_parallel_sharding_strategy
    for name in techniques(parallel):
        fitting = [each for each, sharding in SHARDING.items() if ACTS_ON[name](sharding)]
        if strategy not in fitting:
            why = "gathers nothing" if strategy == "no_shard" else "gathers weights once a step"
            flags = [f"--data-parallel-sharding-strategy {each}" for each in fitting]
            mistakes.add(
                f"{name} has no effect on {strategy}, which {why}", works=[*flags, _off(name)]
            )
        elif grid.dp_shard * grid.cp == 1:
            mistakes.add(
                f"{name} has no effect: the sharding group, dp_shard x cp, is a single rank",
                works=[_off(name)],
            )
    for name in (HPZ, QGZ):
        _check_part(name, getattr(parallel, name), grid, experts, mistakes)


def part_fits(size: int, grid: Grid, experts: bool) -> bool:
    """Whether nodes with `size` ranks of a sharding group divide it, and the experts' groups."""
    shards, unit = grid.dp_shard * grid.cp, grid.ep * grid.etp
    if shards % size or size >= shards:
        return False
    whole = size * grid.tp % unit == 0 or size * grid.tp < unit
    return not experts or (whole and grid.expert_shards % experts_within(size, grid) == 0)


def _check_part(name: str, size: int, grid: Grid, experts: bool, mistakes: Mistakes) -> None:
    shards = grid.dp_shard * grid.cp
    if size == 1 or shards == 1 or part_fits(size, grid, experts):
        return
    wanted = f"a divisor of dp_shard {grid.dp_shard} x cp {grid.cp} = {shards}, and less"
    if experts:
        wanted += f"; {size} x tp {grid.tp} ranks hold whole groups of ep x etp = "
        wanted += f"{grid.ep * grid.etp}, or part of one"
    fitting = [n for n in divisors(shards) if part_fits(n, grid, experts)]
    near = sorted(fitting, key=lambda n: (n == 1, abs(n - size)))[:3]
    flag = flag_of(name)
    mistakes.add(
        f"{name} = {size} does not divide the sharding group into parts",
        f"it must be {wanted}",
        works=[f"{flag} {n}" for n in near],
    )


def _off(name: str) -> str:
    return f"{flag_of(name)} 1" if name in (HPZ, QGZ) else flag_of(f"no_{name}")
