"""Lower bounds on the time of a pipeline program that follow from the work of one of its ranks."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Seconds = Callable[[str, int], Values]


def rank_bounds(
    seconds: Seconds,
    hidden: Values,
    hop: Values,
    slices: int,
    *,
    total: Values | float,
    deferred: Values | float,
    hops: Values | float,
    crossings: Values | float,
    chunks: Values | float,
    most: Values | float,
) -> tuple[Values, Values, Values]:
    """Lower bounds on the seconds of N programs from the work of one rank of each.

    The rank begins when a slice has passed the stages before it, and then has all its work. Then
    its last dX still has to travel to stage 0, while only deferred dW can run. Last, a chunk (a
    microbatch of a stage) is kept until it has reached the end of the model and come back: by
    Little's law (1961) the average number kept is the rate of chunks times this time.

    Args:
        seconds: seconds of a microbatch in a phase (forward, dX or dW) of the stages that the rank
            has ("held"), of all "before" its first one, of that one ("own"), of the model's "first"
            one, and of all from each of its stages to the end, summed over these ("ahead").
        hidden: seconds that pairs hide in the whole step at most.
        hop: seconds of a message between ranks.
        slices: slices of a sequence.
        total: microbatches of each copy of the model.
        deferred: most dW of a stage that the schedule defers at once; inf: unknown.
        hops: number of messages from stage 0 to the rank.
        crossings: number of messages from each of its stages to the end, summed over these.
        chunks: chunks of the rank in a step.
        most: most of these that it keeps at once; inf: unknown.
    """
    there, back = (seconds("before", phase) / slices + hop * hops for phase in range(2))
    forward, dx, dw = (seconds("held", phase) for phase in range(3))
    whole, known = there + (total * (forward + dx + dw) - hidden), np.isfinite(deferred)
    later = np.minimum(total * dw, np.where(known, deferred, 0.0) * seconds("own", 2))
    ended = whole - np.where(known, later, total * dw)
    lasts = (seconds("ahead", 0) + seconds("ahead", 1)) / slices + 2 * hop * crossings
    kept = there + total * lasts / np.minimum(most, chunks) + back
    return whole, ended + back + seconds("first", 2) / slices, kept
