"""Whether a rank may open as many files as its connections to other ranks need. No torch.

gloo connects every two ranks of a group: W - 1 sockets for each group of W ranks. On GPUs it only
carries Python objects, and connects ranks when they first talk (`TORCH_GLOO_LAZY_INIT`).
"""

import resource
from collections.abc import Mapping
from math import ceil, log2

from fivefold.errors import ConfigError, Mistake
from fivefold.layout import Layout

OTHERS = 256  # libraries, data, checkpoints, logs, devices
A_GROUP = 4  # a listening socket, and its event queue


def check_open_files(layout: Layout, device_type: str) -> None:
    """Raise this process's limit of open files if need be, and check that it suffices.

    Args:
        layout: layout of the run.
        device_type: "cpu" or "cuda".

    Raises:
        ConfigError: it does not suffice.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    groups = gloo_groups(layout, device_type)
    needed = open_files(groups, device_type)
    if limit != resource.RLIM_INFINITY and needed > limit:
        limit = needed if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit != resource.RLIM_INFINITY and needed > limit:
        summed = " + ".join(f"{size - 1} ({name})" for name, size in groups.items())
        raise ConfigError(
            Mistake(
                f"a rank needs about {needed:,} open files, and may have {limit:,} (ulimit -Hn)",
                (
                    f"connections to other ranks: {summed}; {A_GROUP} for each group, and "
                    f"{OTHERS} for all else",
                ),
                attempt=f"ulimit -n {needed}, after raising the hard limit in limits.conf",
            )
        )


def open_files(groups: Mapping[str, int], device_type: str) -> int:
    """Number of open files of a rank in gloo groups of these sizes."""
    sockets = sum(size - 1 for size in groups.values())
    if device_type == "cuda":  # objects are gathered in log2 W rounds, each with two ranks
        sockets = sum(2 * ceil(log2(size)) for size in groups.values())
    return sockets + A_GROUP * len(groups) + OTHERS


def gloo_groups(layout: Layout, device_type: str) -> dict[str, int]:
    """Sizes, by purpose, of the groups for which a rank uses gloo."""
    grid, parallel = layout.grid, layout.config.parallel
    sizes = {"all": grid.world_size, "checkpoints": grid.world_size}
    if device_type == "cpu":
        sharded = parallel.sharding.splits_optimizer
        data, shard = grid.dp * grid.cp, grid.dp_shard * grid.cp
        sizes |= {"pipeline": grid.pp, "tensor": grid.tp, "data": data, "context": grid.cp}
        for place, size in enumerate(parallel.hierarchical_context_parallel_sizes):
            sizes[f"context, level {place + 1}"] = size
        if sharded and grid.dp_replicate > 1:
            sizes |= {"shards": shard, "replicas": grid.dp_replicate}
        if layout.config.model.num_experts is not None:
            both = grid.ep * grid.etp
            sizes |= {"experts": grid.ep, "tensor of experts": grid.etp, "same experts": grid.edp}
            sizes |= {"all experts": both} if min(grid.ep, grid.etp) > 1 else {}
            sizes |= {"microbatch": grid.cp * grid.tp, "stage": grid.ranks_per_stage}
    return {name: size for name, size in sizes.items() if size > 1}
