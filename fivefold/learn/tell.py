"""Reports what was learned from runs."""

from collections.abc import Iterator, Sequence
from itertools import chain
from math import exp
from statistics import NormalDist
from typing import Any

from fivefold.layout import Layout
from fivefold.learn.constants import CONSTANTS
from fivefold.learn.posterior import Observation, Posterior, half_width, log_seconds
from fivefold.predict.cluster import Cluster
from fivefold.tell.columns import prose
from fivefold.tell.describe import summary
from fivefold.tell.explain import percent
from fivefold.units import human_seconds, table

_NARROWED = 0.8  # share of its doubt above which nothing was learned of a constant


def runs_table(known: Posterior) -> Iterator[str]:
    """The runs: measured step times, and predictions before and after fitting."""
    rows: list[tuple[str, ...]] = [("run", "measured", "predicted", "off", "now", "off", "layout")]
    for run, *predicted in _before_and_now(known):
        differences = ((human_seconds(each), percent(each / run.seconds - 1)) for each in predicted)
        rows.append(
            (run.name, human_seconds(run.seconds), *chain(*differences), summary(run.layout))
        )
    yield from table(rows, right=range(1, 6))
    runs = known.observations
    yield (
        f"mean error {mean_error(runs, known.prior):.1%} before, "
        f"{mean_error(runs, known.cluster):.1%} now; 80 % of new runs are expected within "
        f"{_interval_factor(known) - 1:.0%}"
    )


def _before_and_now(known: Posterior) -> Iterator[tuple[Observation, float, float]]:
    """The runs, with the seconds of a step predicted before and after they were known."""
    layouts = [run.layout for run in known.observations]
    both = (log_seconds(layouts, cluster).tolist() for cluster in (known.prior, known.cluster))
    for run, old, new in zip(known.observations, *both, strict=True):
        yield run, exp(old), exp(new)


def _interval_factor(known: Posterior) -> float:
    """The factor from the middle to an end of the 80 % interval of new runs like these."""
    return half_width(float(known.spread([run.layout for run in known.observations]).mean()))


def mean_error(runs: Sequence[Observation], cluster: Cluster) -> float:
    """Mean absolute error of the planner's step times of these runs."""
    found = log_seconds([each.layout for each in runs], cluster).tolist()
    off = (abs(exp(new) / run.seconds - 1) for run, new in zip(runs, found, strict=True))
    return sum(off) / len(runs)


def constants_table(known: Posterior) -> Iterator[str]:
    """The constants that moved or are better known, with their 80 % intervals."""
    rows = [("", "before", "now", "80 % interval", "")]
    untold = []
    parts = zip(CONSTANTS, known.doubts.tolist(), strict=True)
    for constant, doubt in parts:
        if doubt > _NARROWED * constant.doubt(known.prior):
            untold.append(constant.name)
            continue
        unit, one = constant.shown
        old, new = (f"{constant.of(c) / one:.4g}" for c in (known.prior, known.cluster))
        wide = half_width(doubt)
        ends = (constant.of(constant.moved(known.cluster, by)) / one for by in (1 / wide, wide))
        rows.append((constant.name, old, new, " to ".join(f"{end:.3g}" for end in ends), unit))
    if len(rows) > 1:
        yield from table(rows, right=(1, 2, 3))
    if untold:
        yield from prose([f"these runs say little of: {', '.join(untold)}"])


def record(known: Posterior) -> dict[str, Any]:
    """The fitted machine as a value for JSON; times in seconds, rates in bytes or FLOPs per
    second."""
    return {
        "runs": [
            {"run": run.name, "measured": run.seconds, "before": old, "now": new}
            for run, old, new in _before_and_now(known)
        ],
        "constants": {
            constant.name: {
                "before": constant.of(known.prior),
                "now": constant.of(known.cluster),
                "interval_factor": half_width(doubt),
            }
            for constant, doubt in zip(CONSTANTS, known.doubts.tolist(), strict=True)
        },
        "interval_factor": _interval_factor(known),
    }


def gain(known: Posterior, run: Layout, best: Layout) -> tuple[float, float]:
    """The share by which `best` is expected to be faster than a run's layout, and the probability
    that it is faster.

    The second number is the probability that it is faster at all. What is uncertain of a constant
    is so of both layouts alike.
    """
    ours, other = log_seconds([best, run], known.cluster).tolist()
    deviation = known.difference_spread(best, run)
    if best == run or deviation == 0:
        return 0.0, 0.0
    return 1 - exp(ours - other), NormalDist(0, deviation).cdf(other - ours)


def advice(known: Posterior, run: Observation, best: Layout) -> str:
    """What a run could gain, in one sentence."""
    share, sure = gain(known, run.layout, best)
    if share <= 0 or sure < 0.5:
        return f"{run.name}: no layout is expected to be faster"
    seconds = human_seconds(run.seconds * (1 - share))
    return (
        f"{run.name}: could be {share:.0%} faster ({seconds} a step) by {summary(best)}; faster at "
        f"all with {min(sure, 0.99):.0%} probability{' or more' if sure > 0.99 else ''}"
    )
