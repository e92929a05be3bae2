"""Finds layouts that may fit and be fast if the number of recomputed layers varies by stage.

Such a layout takes no less time than without recomputation, and no less memory than with that of
all layers. So it is worth a try only if the bound on the former's time is below the best time, and
the bound on the latter's memory fits the device. The time between the two is estimated from the
share of the layers that have to go.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.layout import Layout
from fivefold.search.bound_tables import Values
from fivefold.search.branch_and_bound import layout_of
from fivefold.search.columns import Column
from fivefold.search.memory_choices import RECOMPUTE, MemoryChoice
from fivefold.search.space import Space

PARTIALS = 64  # layouts that are kept for the recomputation of some of their layers


@dataclass(frozen=True)
class PartlyRecomputed:
    """A layout, some of whose layers may be recomputed.

    Attributes:
        bound: lower bound on its step time in seconds, whatever the number of layers.
        estimate: step time in seconds with as many layers recomputed as make it fit.
        plain: the layout without recomputation.
        whole: the layout that recomputes the first layers of each stage, and all of them.
    """

    bound: float
    estimate: float
    plain: Layout
    whole: Layout


def partials(
    space: Space, seconds: Values, sizes: Values, room: float, best: float
) -> list[PartlyRecomputed]:
    """The most promising layouts of a space with some layers recomputed.

    Args:
        space: candidates with each memory choice.
        seconds: lower bounds on their step times.
        sizes: lower bounds on their memory, in bytes.
        room: bytes that a layout may allocate.
        best: the step time to beat, in seconds.
    """
    whole, plain = _pairs(space, sizes <= room, seconds < best)
    excess = np.maximum(sizes[plain] - room, 0)
    saved = np.maximum(sizes[plain] - sizes[whole], 1)
    share = np.minimum(excess / saved, 1)
    estimates = seconds[plain] + share * np.maximum(seconds[whole] - seconds[plain], 0)
    first = np.argsort(estimates, kind="stable")[:PARTIALS].tolist()
    found = []
    for n in first:
        layout = layout_of(space, int(plain[n]))
        most = max(len(stage.layers) for stage in layout.split.stages)
        config = space.config_of(int(whole[n])).with_values(
            recompute_method="block", recompute_num_layers=(most,)
        )
        again = replace(layout, config=config)
        found.append(PartlyRecomputed(float(seconds[plain[n]]), float(estimates[n]), layout, again))
    return found


def _pairs(
    space: Space, fits: NDArray[np.bool_], is_fast: NDArray[np.bool_]
) -> tuple[Column, Column]:
    """Rows of layouts with recomputation that may fit, and rows of the same layouts without, if
    fast enough.

    Args:
        space: candidates.
        fits: whether each may fit.
        is_fast: whether each may be faster than the best.
    """
    without = np.array(_without_recompute(space.memory), np.intp)
    choice = space.columns["memory"]
    own = np.arange(len(without)) == without
    rows = np.flatnonzero(np.where(own[choice], is_fast, fits & (without[choice] >= 0)))
    few = space.take(rows)
    _, of = few.distinct([name for name in few.columns if name != "memory"])
    at = np.full((int(of.max(initial=-1)) + 1, len(without)), -1, np.intp)
    at[of, few.columns["memory"]] = rows
    whole = np.flatnonzero(~own[few.columns["memory"]])
    plain = at[of[whole], without[few.columns["memory"][whole]]]
    found = plain >= 0
    return rows[whole[found]], plain[found]


def _without_recompute(choices: Sequence[MemoryChoice]) -> list[int]:
    """For each memory choice the index of the same choice without recomputation; -1 if there is
    none."""

    def rest(choice: MemoryChoice) -> frozenset[tuple[str, Any]]:
        return frozenset((n, v) for n, v in choice.settings.items() if n not in RECOMPUTE)

    plain = {
        rest(choice): number
        for number, choice in enumerate(choices)
        if choice.settings.get("recompute_granularity", "given") is None
    }
    return [plain.get(rest(choice), -1) for choice in choices]
