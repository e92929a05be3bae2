"""The shortest step in which every rank of a job holds as much as in the whole one; torch-free."""

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.predict.memory.liveness import Acts, Moments, moments


def enough_to_hold_all(layout: Layout) -> int:
    """The fewest microbatches in which each moment of a step has its like.

    In a like moment a rank runs the same action, and has at least as many microbatches of each
    stage in flight, and gradients of at least the same stages.
    """
    splits = layout.sends_dx_first
    whole = list(map(_by_action, moments(layout, splits_backward=splits)))
    most = layout.enough_microbatches
    for count in range(1, most):
        try:
            found = moments(layout, splits_backward=splits, num_microbatches=count)
        except ConfigError:
            continue
        if all(map(_has_likes, map(_by_action, found), whole)):
            return count
    return most


def _by_action(found: Moments) -> dict[Acts, NDArray[np.float64]]:
    """What is held in each moment, one in a row, by the action that runs."""
    held = np.hstack([found.kept, found.inputs, found.waiting, -found.unmade])
    return {
        acts: np.unique(held[found.which == which], axis=0)
        for which, acts in enumerate(found.running)
    }


def _has_likes(
    short: dict[Acts, NDArray[np.float64]], whole: dict[Acts, NDArray[np.float64]]
) -> bool:
    """Whether each row of a whole step is nowhere above some row of a shorter one."""
    if short.keys() != whole.keys():
        return False
    for acts, rows in whole.items():
        reaches = np.all(rows[:, None] <= short[acts][None] + 1e-9, axis=2)
        if not np.all(np.any(reaches, axis=1)):
            return False
    return True
