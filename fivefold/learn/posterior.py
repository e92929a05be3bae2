"""A machine's constants fitted to runs by Bayes' rule, with their uncertainty.

The logarithm of a step's time is the planner's, as a function of the logarithms of the machine's
constants, plus what the planner does not explain of a layout, plus the noise of its measurement.
All three are normal; the constants' prior is that of `constants`. The most plausible constants are
found by Gauss and Newton's steps with Levenberg's damping, their covariance is Laplace's, and the
variance of what is not explained follows from the residuals and a prior of four of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log, sqrt

import numpy as np
from numpy.typing import NDArray

from fivefold.hardware import GPUS
from fivefold.layout import Layout
from fivefold.learn.constants import CONSTANTS, UNEXPLAINED, moved
from fivefold.predict.cluster import Cluster
from fivefold.predict.step import predict_all

Vector = NDArray[np.float64]
NORMAL_80 = 1.2816
"""Standard deviations from the middle of a normal distribution to the end of its 80 % interval."""
_STEP = 0.05  # of a logarithm, for finite differences
_ROUNDS, _SETTLED = 12, 1e-3  # most Gauss-Newton steps; a shorter step ends them
_PRIOR_RUNS = 4  # residuals that the prior of what is not explained counts for


@dataclass(frozen=True)
class Observation:
    """The measured time of a layout's step.

    Attributes:
        name: which run it was.
        layout: its layout.
        seconds: usual seconds of a step.
        noise: standard deviation of the logarithm of `seconds`.
    """

    name: str
    layout: Layout
    seconds: float
    noise: float


@dataclass(frozen=True)
class Posterior:
    """A machine with constants fitted to runs on it.

    Attributes:
        prior: the machine before.
        shifts: logarithms of the factors by which its constants moved, as `CONSTANTS`.
        covariance: covariance of these shifts.
        unexplained: standard deviation of what constants do not explain of a layout's step, as a
            logarithm.
        observations: the runs.
    """

    prior: Cluster
    shifts: Vector
    covariance: NDArray[np.float64]
    unexplained: float
    observations: tuple[Observation, ...] = ()

    @cached_property
    def cluster(self) -> Cluster:
        """The machine with its most plausible constants."""
        return self.at(self.shifts)

    def at(self, shifts: Vector) -> Cluster:
        """The machine with these shifts."""
        return moved(self.prior, shifts)

    @cached_property
    def doubts(self) -> Vector:
        """Standard deviations of the shifts."""
        found: Vector = np.sqrt(np.diag(self.covariance))
        return found

    def spread(self, layouts: Sequence[Layout]) -> Vector:
        """Standard deviations of the logarithms of layouts' steps, of a new run's time."""
        slopes = _slopes(layouts, self.prior, self.shifts)
        known = np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes)
        found: Vector = np.sqrt(known + self.unexplained**2)
        return found

    def difference_spread(self, one: Layout, other: Layout) -> float:
        """Standard deviation of the logarithm of two layouts' ratio, of new runs' times."""
        ours, theirs = _slopes([one, other], self.prior, self.shifts)
        known = (ours - theirs) @ self.covariance @ (ours - theirs)
        return sqrt(float(known) + 2 * self.unexplained**2)


def without_runs(cluster: Cluster) -> Posterior:
    """The prior, before any run is known."""
    doubts = np.array([constant.doubt(cluster) for constant in CONSTANTS])
    unexplained = UNEXPLAINED[cluster.gpu.name in GPUS]
    return Posterior(cluster, np.zeros(len(doubts)), np.diag(doubts**2), unexplained)


def learned(cluster: Cluster, observations: Sequence[Observation]) -> Posterior:
    """The machine fitted to these runs.

    Args:
        cluster: what is known beforehand.
        observations: runs on as many ranks as they had, on machines of this kind.
    """
    prior = without_runs(cluster)
    if not observations:
        return prior
    fit = _Fit(cluster, observations)
    trust = _inverse(prior.covariance)
    noise = np.array([each.noise for each in observations])
    shifts, unexplained = prior.shifts, prior.unexplained
    for _ in range(3):  # the shifts and the unexplained part depend on each other
        weights: Vector = 1 / (unexplained**2 + noise**2)
        shifts = _most_plausible(fit, weights, trust, shifts)
        residuals = fit.residuals(shifts)
        excess = np.maximum(residuals**2 - noise**2, 0.0).sum()
        known = _PRIOR_RUNS * prior.unexplained**2
        unexplained = float(np.sqrt((known + excess) / (_PRIOR_RUNS + len(noise))))
    slopes = fit.slopes(shifts)
    weights = 1 / (unexplained**2 + noise**2)
    covariance = _inverse(slopes.T @ (weights[:, None] * slopes) + trust)
    return Posterior(cluster, shifts, covariance, unexplained, tuple(observations))


def _inverse(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.inv(matrix), np.float64)


class _Fit:
    """Predictions of the observed runs as a function of the machine's constants."""

    def __init__(self, cluster: Cluster, observations: Sequence[Observation]) -> None:
        self._cluster = cluster
        self._layouts = [each.layout for each in observations]
        self._measured = np.array([log(each.seconds) for each in observations])
        self._found: tuple[Vector, NDArray[np.float64]] | None = None

    def residuals(self, shifts: Vector) -> Vector:
        """Logarithms of the measured over the predicted seconds."""
        found: Vector = self._measured - log_seconds(self._layouts, moved(self._cluster, shifts))
        return found

    def slopes(self, shifts: Vector) -> NDArray[np.float64]:
        """Slopes [runs, constants] here, or those found last if that was as good as here."""
        if self._found is None or np.abs(shifts - self._found[0]).max() >= _SETTLED:
            self._found = shifts, _slopes(self._layouts, self._cluster, shifts)
        return self._found[1]


def _most_plausible(
    fit: _Fit, weights: Vector, trust: NDArray[np.float64], start: Vector
) -> Vector:
    """The shifts with the least sum of weighted squares of residuals and of themselves."""

    def cost(shifts: Vector, off: Vector) -> float:
        return float(weights @ off**2 + shifts @ trust @ shifts)

    shifts, damping = start, 1e-3
    off = fit.residuals(shifts)
    least = cost(shifts, off)
    for _ in range(_ROUNDS):
        slopes = fit.slopes(shifts)
        curve = slopes.T @ (weights[:, None] * slopes) + trust
        pull = slopes.T @ (weights * off) - trust @ shifts
        while damping < 1e6:
            step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), pull)
            left = fit.residuals(shifts + step)
            if (found := cost(shifts + step, left)) <= least:
                break
            damping *= 10
        else:
            break
        shifts, off, least, damping = shifts + step, left, found, max(damping / 10, 1e-6)
        if np.abs(step).max() < _SETTLED:
            break
    return shifts


def log_seconds(layouts: Sequence[Layout], cluster: Cluster) -> Vector:
    """Logarithms of the predicted seconds of layouts' steps, on the ranks that each has."""
    return np.array([log(each.step_time) for each in predict_all(layouts, cluster)])


def _slopes(layouts: Sequence[Layout], cluster: Cluster, shifts: Vector) -> NDArray[np.float64]:
    """Slopes [layouts, constants] of the predicted logarithms."""
    columns = []
    for index in range(len(CONSTANTS)):
        ahead, behind = shifts.copy(), shifts.copy()
        ahead[index] += _STEP
        behind[index] -= _STEP
        up = log_seconds(layouts, moved(cluster, ahead))
        down = log_seconds(layouts, moved(cluster, behind))
        columns.append((up - down) / (2 * _STEP))
    return np.stack(columns, axis=1)


def half_width(spread: float) -> float:
    """The factor from the middle to an end of the 80 % interval of a logarithm with this
    deviation."""
    return exp(NORMAL_80 * spread)
