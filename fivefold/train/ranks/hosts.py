"""Names groups of tensor parallelism whose ranks are on several hosts."""

import socket
from collections.abc import Sequence

import torch.distributed as dist

from fivefold.layout import Layout
from fivefold.mesh.collectives import gather_objects


def gather_hosts() -> list[str]:
    """The host of every rank."""
    return gather_objects(socket.gethostname(), dist.group.WORLD)


def crossing(layout: Layout, hosts: Sequence[str]) -> str | None:
    """What is said of tensor-parallel groups that cross hosts; None if none does.

    Args:
        layout: layout of the ranks.
        hosts: host of every rank.
    """
    grid = layout.grid
    groups = sorted({grid.group_of(rank, ("tp",)) for rank in range(len(hosts))})
    across = [group for group in groups if len({hosts[rank] for rank in group}) > 1]
    if not across:
        return None
    first = across[0]
    where = ", ".join(dict.fromkeys(hosts[rank] for rank in first))
    each = sorted({hosts.count(host) for host in set(hosts)})
    ranks = " or ".join(map(str, each))
    return (
        f"tensor parallelism of ranks {first[0]} to {first[-1]} crosses hosts {where}, and so do "
        f"{len(across)} of {len(groups)} such groups: every layer waits for the network. A host "
        f"has {ranks} ranks, of which tp {grid.tp} should be a divisor"
    )
