"""How many sequences each optimizer step takes, in a run whose batch grows."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class BatchLevel:
    """Consecutive steps of one batch size.

    Attributes:
        first_sample: samples of the run before them.
        size: sequences of each.
        steps: number of steps; None: all that follow.
    """

    first_sample: int
    size: int
    steps: int | None


@dataclass(frozen=True)
class BatchSizes:
    """The batch size as a function of the samples that a run has taken.

    As Megatron-LM's `RampupBatchsizeNumMicroBatchesCalculator`: from `start` on it grows by
    `increment` at equal distances of samples, until after `ramp` samples it is `full`.

    Attributes:
        full: sequences of a step after the ramp.
        start: sequences of the first step.
        increment: sequences by which a batch grows; a divisor of `full - start`.
        ramp: samples over which it grows; 0: it does not.
    """

    full: int
    start: int = 0
    increment: int = 1
    ramp: int = 0

    def at(self, samples: int) -> int:
        """Sequences of the step that follows `samples` samples, in Megatron-LM's own floats: they
        may be an increment less where samples are a whole number of increments."""
        if samples > self.ramp or not self.ramp:
            return self.full
        each = self.ramp / ((self.full - self.start) // self.increment)
        return self.start + int(samples / each) * self.increment

    def levels(self) -> tuple[BatchLevel, ...]:
        """All levels in order; the last one has no end."""
        return _levels_of(self)

    def sizes(self) -> list[int]:
        """Every size, from the first to the whole batch."""
        return [level.size for level in self.levels()]

    @property
    def smaller_steps(self) -> int:
        """Number of steps before those of the whole batch."""
        return sum(level.steps or 0 for level in self.levels())

    def samples(self, steps: int) -> int:
        """Number of samples in the first `steps` steps."""
        for level in self.levels():
            if level.steps is None or steps <= level.steps:
                return level.first_sample + steps * level.size
            steps -= level.steps
        raise AssertionError("the last level has no end")

    def steps(self, samples: int) -> int:
        """Number of whole steps within the first `samples` samples."""
        done = 0
        for level in self.levels():
            within = max(samples - level.first_sample, 0) // level.size
            if level.steps is None or within < level.steps:
                return done + within
            done += level.steps
        raise AssertionError("the last level has no end")


@lru_cache(maxsize=64)
def _levels_of(sizes: BatchSizes) -> tuple[BatchLevel, ...]:
    """Cached, since every step asks for the levels of the same run, and there may be thousands."""
    levels, samples, counts = list[BatchLevel](), 0, range(sizes.ramp + 2)
    while (size := sizes.at(samples)) != sizes.full:
        end = bisect_right(counts, size, samples, key=sizes.at)  # the first of the next level
        steps = -(-(end - samples) // size)
        levels.append(BatchLevel(samples, size, steps))
        samples += steps * size
    return (*levels, BatchLevel(samples, sizes.full, None))
