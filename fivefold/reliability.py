"""The effect of failures on a long run: goodput, and the best checkpoint interval.

The rate is that of the 54-day snapshot of Llama 3's pre-training on 16,384 H100s ("The Llama 3 Herd
of Models", table 5): 419 unexpected interruptions, 78 % of them of hardware. Failures are assumed
to be independent of each other and of age, so a run on n devices fails n times as often as one.
"""

from dataclasses import dataclass
from math import exp, expm1, sqrt

HOURS = 3600.0
DAYS = 24 * HOURS
INTERRUPTIONS_PER_GPU_DAY = 419 / 54 / 16384
DEVICE_MTBF = DAYS / INTERRUPTIONS_PER_GPU_DAY
"""Seconds between two interruptions of one device: 5.8 years."""
STORAGE_BANDWIDTH = 1e9
"""Bytes/s that one node writes to storage; 16,384 GPUs then reach the 2 TB/s of Llama 3's."""
RESTART_SECONDS = 600.0
"""Seconds from a failure to the next training step: detection, a new node, starting, loading."""


@dataclass(frozen=True)
class Goodput:
    """The share of time in which a run with interruptions makes progress.

    Attributes:
        mtbf: mean seconds between interruptions of the whole run.
        checkpoint: seconds for which writing a checkpoint stops training.
        restart: seconds from an interruption until training continues.
        interval: seconds of training between two checkpoints.
        share: share of the wall-clock time that advances the training, 0 to 1.
    """

    mtbf: float
    checkpoint: float
    restart: float
    interval: float
    share: float


def checkpoint_seconds(size: float, nodes: int) -> float:
    """Seconds that these nodes need to write a checkpoint of so many bytes."""
    return size / (nodes * STORAGE_BANDWIDTH)


def goodput(
    devices: int,
    checkpoint: float,
    *,
    interval: float | None = None,
    restart: float = RESTART_SECONDS,
    device_mtbf: float = DEVICE_MTBF,
) -> Goodput:
    """The expected goodput of a run.

    J. T. Daly's model of exponential failures ("A higher order estimate of the optimum checkpoint
    interval", FGCS 2006): an interval of tau seconds of training takes, with M the mean time
    between interruptions, M e^(R/M) (e^((tau + delta)/M) - 1) seconds on average.

    Args:
        devices: number of devices, all of which must work.
        checkpoint: delta, the seconds for which a checkpoint stops training.
        interval: tau, the seconds of training between checkpoints; None: the best.
        restart: R, the seconds from an interruption to training again.
        device_mtbf: seconds between two interruptions of one device.
    """
    mtbf = device_mtbf / devices
    if interval is None:
        interval = best_interval(mtbf, checkpoint)
    # Turned round, of numbers below 1: where failures are frequent the exponentials would overflow.
    between = (interval + checkpoint) / mtbf
    share = interval / mtbf * exp(-restart / mtbf - between) / -expm1(-between)
    return Goodput(mtbf, checkpoint, restart, interval, share)


def best_interval(mtbf: float, checkpoint: float) -> float:
    """The interval between checkpoints that loses the least time, in seconds: Daly's estimate.

    Young's sqrt(2 delta M) is its leading term; for delta above 2 M the best interval is M.
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    ratio = sqrt(checkpoint / (2 * mtbf))
    return sqrt(2 * checkpoint * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - checkpoint
