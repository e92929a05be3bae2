"""Excludes candidates that the trainer cannot run."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fivefold.check import lacking
from fivefold.errors import Mistakes
from fivefold.pipeline.rules import check_groups_used
from fivefold.search.columns import Column, codes
from fivefold.search.partitions import Partition
from fivefold.search.space import Space

_Counts = NDArray[np.int64]


def trained(space: Space, like: Space | None = None) -> Space:
    """The candidates with the fewest features that the trainer lacks; none unless given settings
    need one.

    Args:
        space: the candidates.
        like: others, left by this function, of which they must have no more than the first one.
    """
    if not len(space):
        return space
    count = _lacking(space)
    most = count.min() if like is None else _lacking(like.take(np.zeros(1, np.int64)))[0]
    return space.take(np.flatnonzero(count <= most))


def _lacking(space: Space) -> _Counts:
    return _settings_lacking(space) + _idle_groups(space)


def _settings_lacking(space: Space) -> _Counts:
    """For each candidate the number of its settings that the trainer lacks."""
    c = space.columns
    decides = {
        **{name: c[name] for name in ("sp", "ep", "pairs", "memory")},
        **{name: (c[name] > 1).astype(np.int32) for name in ("tp", "etp")},
        "context": _ways(space),
    }
    rows = {"row": np.arange(len(space))}
    few, index = replace(space, columns=decides | rows).distinct(tuple(decides))
    counts = [lacking(space.config_of(row)) for row in few.columns["row"].tolist()]
    return np.array(counts, np.int64)[index]


def _ways(space: Space) -> Column:
    """A number for the kind of context-parallel communication of each candidate."""
    few, index = space.distinct(("tp", "cp", "mbs"))
    keys = zip(*(few.columns[name].tolist() for name in ("tp", "cp", "mbs")), strict=True)
    ways = [str(space.context.get(key, key[1] > 1)) for key in keys]
    numbers = {way: number for number, way in enumerate(dict.fromkeys(ways))}
    return codes(np.array([numbers[way] for way in ways], np.int64)[index])[0]


def _idle_groups(space: Space) -> _Counts:
    """1 for each candidate whose schedule ignores a given size of microbatch groups."""

    def idle(partition: Partition) -> int:
        mistakes = Mistakes()
        parallel = space.config.with_values(**partition.settings).parallel
        check_groups_used(parallel, partition.split.num_virtual, mistakes)
        return mistakes.count

    return space.by_partition(idle)
