"""Tables of integers: a dict from column name to a numpy array with one value per row."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.integer[Any]]
Columns = dict[str, Column]


def codes(column: Column) -> tuple[Column, int]:
    """Index of each value among the distinct values, and their number; faster than sorting."""
    if not len(column):
        return column, 0
    occurs = np.zeros(int(column.max()) + 1, bool)
    occurs[column] = True
    found = np.flatnonzero(occurs)
    places = np.empty(len(occurs), np.int64)
    places[found] = np.arange(len(found))
    return places[column], len(found)


def table(columns: Mapping[str, Iterable[int]]) -> Columns:
    """A table with these columns."""
    return {name: np.array(list(values), np.int32) for name, values in columns.items()}


def join(left: Columns, right: Mapping[str, Iterable[int]]) -> Columns:
    """The cross product of two tables."""
    other = table(right)
    rows, more = (len(next(iter(each.values()))) for each in (left, other))
    return {
        **{name: np.repeat(column, more) for name, column in left.items()},
        **{name: np.tile(column, rows) for name, column in other.items()},
    }


def where(columns: Columns, holds: NDArray[np.bool_]) -> Columns:
    """The rows where `holds` is true."""
    rows = np.flatnonzero(holds)
    return {name: column[rows] for name, column in columns.items()}
