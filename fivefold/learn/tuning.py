"""Decides which layout to try next on a machine, and when to stop: by the expected gain of a trial.

Each trial's time goes into the posterior of the machine's constants, so that one layout's trial
tells of all others. The next one is that with the largest expected improvement over the best so far
(Mockus, 1975), among those that are best on machines the runs leave possible. When the gain over
the steps to come is worth less than a trial's time, those that the noise leaves close are measured
again, with twice the steps and half of them each round (successive halving, Jamieson and Talwalkar,
2016).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import exp, log
from statistics import NormalDist, fmean, median

from fivefold.layout import Layout
from fivefold.learn.posterior import Observation, Posterior, learned, log_seconds
from fivefold.learn.runs import noise_of
from fivefold.predict.cluster import Cluster

CLOSE = 0.05  # share of a step within which layouts are measured again, beside their noise
POSSIBLE = 4  # further machines whose best layouts are candidates for a trial
FINALISTS = 4  # most layouts that are measured again
Attempt = Callable[[Layout, int], tuple[list[float], str]]
"""Trains a layout for a number of steps; returns the seconds of each, and why it failed (empty if
it did not)."""


@dataclass
class Tried:
    """A layout that was tried.

    Attributes:
        layout: the layout.
        predicted: seconds of a step as predicted just before its first trial.
        doubt: standard deviation of the logarithm of that.
        times: seconds of its steps, without the first of each trial.
        why: why it failed; empty if it did not.
        seconds: what its trials took, with their starts.
    """

    layout: Layout
    predicted: float
    doubt: float
    times: list[float] = field(default_factory=list)
    why: str = ""
    seconds: float = 0.0

    @property
    def usual(self) -> float:
        """Median seconds of a step."""
        return median(self.times)


@dataclass
class Tuning:
    """A search for the fastest layout by trials.

    Attributes:
        prior: the machine as known beforehand.
        candidates: machine -> layouts that may be the fastest on it.
        attempt: trains a layout.
        steps: steps of a first trial; the first of them prepares much and does not count.
        run_steps: steps of the runs to come, over which a gain is earned.
        most: most layouts to try.
        tried: what was tried, in order.
    """

    prior: Cluster
    candidates: Callable[[Cluster], list[Layout]]
    attempt: Attempt
    steps: int
    run_steps: float
    most: int
    tried: list[Tried] = field(default_factory=list)

    @property
    def known(self) -> Posterior:
        """The machine fitted to the trials so far."""
        runs = [
            Observation(f"trial {n}", each.layout, each.usual, noise_of(each.times))
            for n, each in enumerate(self.tried, 1)
            if each.times
        ]
        return learned(self.prior, runs)

    @property
    def best(self) -> Tried | None:
        """The fastest layout so far."""
        return min((t for t in self.tried if t.times), key=lambda t: t.usual, default=None)

    def explore(self) -> Iterator[Tried]:
        """Try layouts until the next trial is not worth its time; yields each."""
        pool: dict[Layout, None] = {}
        while len(self.tried) < self.most:
            known = self.known
            for machine in (known.cluster, *self._possible(known)):
                pool |= dict.fromkeys(self.candidates(machine))
            gone = [each.layout for each in self.tried]
            open_ones = [layout for layout in pool if layout not in gone]
            if not open_ones:
                return
            means = log_seconds(open_ones, known.cluster).tolist()
            spreads = known.spread(open_ones).tolist()
            gains = list(map(self._gain, means, spreads))
            at = max(range(len(gains)), key=gains.__getitem__)
            if self.best is not None and gains[at] * self.run_steps < self._cost(exp(means[at])):
                return
            one = Tried(open_ones[at], exp(means[at]), spreads[at])
            self.tried.append(one)
            self._measure(one, self.steps)
            yield one

    def halve(self) -> Iterator[Tried]:
        """Measure the close layouts again, half of them each round; yields each measured one."""
        steps, left = 2 * self.steps, self._close()
        while len(left) > 1:
            for one in left:
                self._measure(one, steps)
                yield one
            left = sorted((t for t in left if t.times), key=lambda t: t.usual)
            left, steps = left[: max(1, len(left) // 2)], 2 * steps

    def _possible(self, known: Posterior) -> Iterator[Cluster]:
        """Machines on which one constant deviates plausibly; a few in each trial, in turn."""
        ways = [(index, sign) for sign in (1.0, -1.0) for index in range(len(known.shifts))]
        for turn in range(POSSIBLE):
            index, sign = ways[(POSSIBLE * len(self.tried) + turn) % len(ways)]
            shifts = known.shifts.copy()
            shifts[index] += sign * known.doubts[index]
            yield known.at(shifts)

    def _gain(self, mean: float, spread: float) -> float:
        """Expected seconds by which a step of a layout is faster than the best one's."""
        best = self.best
        if best is None:
            return -mean  # the fastest one first
        normal, far = NormalDist(), (log(best.usual) - mean) / spread
        return best.usual * normal.cdf(far) - exp(mean + spread**2 / 2) * normal.cdf(far - spread)

    def _cost(self, step: float) -> float:
        """Seconds of a trial of a layout: a start like those of others, and its steps."""
        starts = [t.seconds - sum(t.times) for t in self.tried]
        return max(fmean(starts), 0.0) + self.steps * step

    def _close(self) -> list[Tried]:
        """Layouts that may be as fast as the best one, the fastest first."""
        ranked = sorted((t for t in self.tried if t.times), key=lambda t: t.usual)

        def near(one: Tried) -> bool:
            off = log(one.usual / ranked[0].usual)
            return off <= max(CLOSE, noise_of(one.times) + noise_of(ranked[0].times))

        return [one for one in ranked if near(one)][:FINALISTS]

    def _measure(self, one: Tried, steps: int) -> None:
        began = time.perf_counter()
        times, one.why = self.attempt(one.layout, steps)
        one.seconds += time.perf_counter() - began
        one.times = [] if one.why else one.times + (times[1:] or times)
