"""Determines the size of each mesh axis, and checks it against the number of ranks."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod
from typing import Any

from fivefold.config.config import SETTINGS, Config
from fivefold.config.divisors import divisors
from fivefold.config.parallel import ParallelConfig
from fivefold.config.rules.dependence import without_orphans
from fivefold.errors import Mistakes
from fivefold.mesh.grid import Grid
from fivefold.mesh.rules import tensor_parallel_sizes
from fivefold.units import several

DEGREES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "dp_replicate": "num_distributed_optimizer_instances",
    "dp_shard": "data_parallel_shard_size",
}
"""The setting of each mesh axis; the product of their values is the number of ranks."""


def grid_of(parallel: ParallelConfig) -> Grid:
    """The grid of degrees that are all known."""
    return Grid(
        **{axis: getattr(parallel, name) for axis, name in DEGREES.items()},
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
    )


def infer_degrees(
    config: Config, world_size: int, passes: Callable[[Config], bool], mistakes: Mistakes
) -> ParallelConfig:
    """Infer the degree that is -1, and check that the product of all is the number of ranks.

    Args:
        config: the configuration.
        world_size: number of ranks.
        passes: function that tells whether another configuration passes every check, so that only
            such ones are suggested.
        mistakes: collection to which mistakes are added.

    Returns:
        The degrees; those that cannot be determined are 1.
    """
    parallel = config.parallel
    sizes = {axis: getattr(parallel, name) for axis, name in DEGREES.items()}
    wrong = {axis: size for axis, size in sizes.items() if size < 1 and size != -1}
    for axis, size in wrong.items():
        mistakes.add(
            f"{DEGREES[axis]} must be at least 1, or -1 to infer it, not {size}",
            works=[f"{SETTINGS[DEGREES[axis]].flag} 1"],
        )
    unknown = [axis for axis, size in sizes.items() if size == -1]
    if len(unknown) > 1:
        mistakes.add(
            f"only one degree can be inferred, but {' and '.join(unknown)} are -1",
            works=[f"{SETTINGS[DEGREES[axis]].flag} 1" for axis in unknown],
        )
    changes: dict[str, Any]
    if wrong or len(unknown) > 1:
        changes = {DEGREES[axis]: 1 for axis in (*wrong, *unknown)}
        return replace(parallel, **changes)
    known = prod(size for size in sizes.values() if size != -1)
    if unknown and world_size % known == 0:
        sizes[unknown[0]] = world_size // known
    elif unknown or known != world_size:
        _explain_world(config, sizes, world_size, passes, mistakes)
        sizes.update(dict.fromkeys(unknown, 1))
    return replace(parallel, **{DEGREES[axis]: size for axis, size in sizes.items()})


def _explain_world(
    config: Config,
    sizes: dict[str, int],
    world_size: int,
    passes: Callable[[Config], bool],
    mistakes: Mistakes,
) -> None:
    """Report that the ranks cannot be split like this, with splits that work."""
    unknown = [axis for axis, size in sizes.items() if size == -1]
    given = {axis: size for axis, size in sizes.items() if size != -1}
    known = prod(given.values())
    named = " ".join(f"{a}={s}" for a, s in given.items() if s != 1) or "tp=1 pp=1 dp=1"
    product = " x ".join(f"{axis} {size}" for axis, size in given.items())
    if unknown:
        result = f"{world_size} / {known} = {world_size / known:.4g} ({unknown[0]} must be whole)"
        nproc = -(-world_size // known) * known
    else:
        result, nproc = f"{known} is not {world_size}", known
    mistakes.add(
        f"{several(world_size, 'rank')} cannot be split as {named}",
        f"{product} = {known}, and {result}",
        works=_splits_near(config, sizes, world_size, passes),
        attempt=f"--nproc {nproc}",
    )


def _splits_near(
    config: Config, sizes: dict[str, int], world_size: int, passes: Callable[[Config], bool]
) -> list[str]:
    """Up to three splits of the ranks that pass every check and change tp and pp least."""
    tp, pp = max(sizes["tp"], 1), max(sizes["pp"], 1)
    rest = max(sizes["cp"], 1) * max(sizes["dp_replicate"], 1)
    near = sorted(
        (abs(t - tp) / tp + abs(p - pp) / pp, t, p)
        for t in tensor_parallel_sizes(config.model)
        if world_size % t == 0
        for p in divisors(world_size // t)
        if (world_size // (t * p)) % rest == 0
    )
    plain: list[str] = []
    others: list[str] = []  # choices that also take back settings
    for _, t, p in near:
        changes = {
            "tensor_model_parallel_size": t,
            "pipeline_model_parallel_size": p,
            "data_parallel_shard_size": world_size // (t * p * rest),
            "num_distributed_optimizer_instances": max(sizes["dp_replicate"], 1),
        }
        fitting, left_out = without_orphans(config.with_values(**changes), changes)
        changed = _with_whole_batch(fitting)
        if passes(changed):
            words = _in_words(changed, config, [orphan.off for orphan in left_out])
            (others if left_out else plain).append(words)
        if len(plain) == 3:
            break
    return [*plain, *others][:3]


def _with_whole_batch(config: Config) -> Config:
    """The configuration, with a global batch that its data-parallel ranks can share."""
    training = config.training
    unit = training.micro_batch_size * config.parallel.data_parallel_size
    return config.with_values(global_batch_size=max(training.global_batch_size // unit, 1) * unit)


def _in_words(config: Config, asked: Config, others: Iterable[str]) -> str:
    """The flags of a split, including batch and replicas if they differ from the given ones."""
    parallel, batch = config.parallel, config.training.global_batch_size
    words = [
        f"--tp {parallel.tensor_model_parallel_size} --pp {parallel.pipeline_model_parallel_size}",
        f"--dp-shard {parallel.data_parallel_shard_size}",
    ]
    if parallel.num_distributed_optimizer_instances > 1:
        words.append(f"--dp-replicate {parallel.num_distributed_optimizer_instances}")
    if batch != asked.training.global_batch_size:
        words.append(f"--gbs {batch}")
    return " ".join([*words, *others])
