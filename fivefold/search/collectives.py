"""Times of collectives of every layout of a search, as affine functions of the bytes."""

from collections.abc import Callable

import numpy as np

from fivefold.search.bound_tables import Values
from fivefold.search.columns import Column, codes

_LARGE = 1e12  # bytes


def affine(
    seconds: Callable[[int, int, float], float], size: Column, stride: Column
) -> tuple[Values, Values]:
    """Seconds of an empty collective over each group, and seconds per byte of a large one.

    Args:
        seconds: those of a group of a size, whose ranks lie so far apart, for a number of bytes.
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
        group = int(size[row]), int(stride[row])
        empty = seconds(*group, 0.0)
        table.append((empty, (seconds(*group, _LARGE) - empty) / _LARGE))
    values = np.array(table).reshape(-1, 2)[index]
    return values[:, 0], values[:, 1]
