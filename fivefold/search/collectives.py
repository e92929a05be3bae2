"""Times of collectives of every layout of a search, as affine functions of the bytes."""

from collections.abc import Callable

import numpy as np

from fivefold.predict.cluster import Cluster
from fivefold.predict.times.communication import GroupSpan, span
from fivefold.search.bound_tables import Values
from fivefold.search.columns import Column, codes

_LARGE = 1e12  # bytes
Collective = Callable[[Cluster, GroupSpan, float], float]
"""Seconds of a collective for a group and a number of bytes."""


def affine(
    cluster: Cluster,
    collective: Collective,
    size: Column,
    stride: Column,
) -> tuple[Values, Values]:
    """Seconds of an empty collective over each group, and seconds per byte of a large one.

    Args:
        cluster: the hardware.
        collective: its seconds for a group and a number of bytes.
        size: ranks of each group.
        stride: distance of these ranks.
    """
    sizes, _ = codes(size)
    strides, more = codes(stride)
    index, groups = codes(sizes * more + strides)
    rows = np.zeros(groups, np.int64)
    rows[index] = np.arange(len(index))
    table = []
    for row in rows:
        group = span(cluster, int(size[row]), int(stride[row]))
        empty = collective(cluster, group, 0.0)
        table.append((empty, (collective(cluster, group, _LARGE) - empty) / _LARGE))
    values = np.array(table).reshape(-1, 2)[index]
    return values[:, 0], values[:, 1]


def no_bound(cluster: Cluster, group: GroupSpan, size: float) -> float:
    """No seconds: less than those of any collective."""
    return 0.0
