"""Lower bounds on the time of a pipeline program that follow from the work of one of its ranks.

A program that is built needs them only where it is extrapolated from shorter ones. A search asks
for those of a million programs before it builds any, so that all times are arrays.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Number = Values | float


@dataclass(frozen=True)
class RankWork:
    """What a rank has to do in a step and to wait for, in seconds of N programs.

    Attributes:
        total: microbatches of each copy of the model.
        slices: slices of a sequence: the first comes soon, the last goes alone.
        hop: a message from one rank to the next.
        work: all that the rank computes.
        weights: of that, all dW.
        own: dW of a microbatch in its first stage.
        first: the same in the model's first stage.
        deferred: most dW of a stage that its schedule defers at once; inf: unknown.
        before: the forward of a microbatch, and its dX, in all stages before its first one.
        hops: number of messages between ranks on that way.
        ahead: forward and dX from each of its stages to the end, summed over them.
        crossings: number of messages on these ways.
        chunks: microbatches that each stage of the rank computes, summed over them.
        most: most of these that it keeps at once between forward and backward; inf: unknown.
    """

    total: Number
    slices: int
    hop: Values
    work: Values
    weights: Values
    own: Values
    first: Values
    deferred: Number
    before: tuple[Values, Values]
    hops: Number
    ahead: Values
    crossings: Number
    chunks: Number
    most: Number

    def _way(self, seconds: Values) -> Values:
        """Seconds of a slice until it reaches the rank, or comes back from there."""
        return seconds / self.slices + self.hop * self.hops

    @property
    def whole(self) -> Values:
        """The rank begins when a microbatch has passed the stages before, and then has its work."""
        return self._way(self.before[0]) + self.work

    @property
    def through(self) -> Values:
        """Then its last dX still has to travel to stage 0, while only deferred dW can run."""
        known = np.isfinite(self.deferred)
        later = np.minimum(self.weights, np.where(known, self.deferred, 0.0) * self.own)
        ended = self.whole - np.where(known, later, self.weights)
        return ended + self._way(self.before[1]) + self.first / self.slices

    @property
    def kept(self) -> Values:
        """What the rank needs for all chunks, given how many it can keep at once.

        A chunk is kept until it has reached the end of the model and come back. By Little's law
        (1961) the average number kept is the rate of chunks times this residence time.
        """
        lasts = self.ahead / self.slices + 2 * self.hop * self.crossings
        there, back = map(self._way, self.before)
        return there + self.total * lasts / np.minimum(self.most, self.chunks) + back
