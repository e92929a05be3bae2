"""Names replicas that compute more slowly than the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from fivefold.mesh.collectives import all_gather
from fivefold.mesh.grid import Grid
from fivefold.train.engine import Engine
from fivefold.units import human_seconds

SLOW = 1.1
"""Times the median of its replicas from which a rank is a straggler; documents of other lengths
cost a few percent."""


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison: in words, empty if no rank is slow, and in numbers for the
    metrics."""

    text: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


class Stragglers:
    """Compares the compute times of ranks that hold the same parts of the model.

    Ranks of one tensor-, context- or expert-parallel group wait for each other in every layer, so a
    slow one slows down its whole group.

    Args:
        engine: engine of this rank; its settings say over how many steps times are averaged.
    """

    def __init__(self, engine: Engine) -> None:
        self._grid, self._world = engine.layout.grid, engine.groups.world
        self._device = engine.device
        self._interval = engine.layout.config.logging.log_interval
        self._seconds: list[float] = []

    def look(self, step: int, seconds: float) -> Comparison:
        """Add a step's compute time; at each console line, compare; collective.

        Returns:
            The same on every rank.
        """
        self._seconds.append(seconds)
        if step % self._interval:
            return Comparison()
        mine = sum(self._seconds) / len(self._seconds)
        steps, self._seconds = len(self._seconds), []
        own = torch.tensor([mine], dtype=torch.float64, device=self._device)
        return compare(self._grid, all_gather(own, self._world).tolist(), steps)


def compare(grid: Grid, seconds: Sequence[float], steps: int) -> Comparison:
    """Compare each rank's seconds of a step, by rank, with the median of its replicas."""
    slow, worst, slowest = [], 0.0, 0
    for replicas in grid.groups(("dp_replicate", "dp_shard")):
        usual = median(seconds[rank] for rank in replicas)
        for rank in replicas:
            ratio = seconds[rank] / usual if usual else 1.0
            if ratio > worst:
                worst, slowest = ratio, rank
            if ratio >= SLOW:
                slow.append(
                    f"rank {rank} {grid.name(rank)} computes {human_seconds(seconds[rank])} a "
                    f"step, {ratio:.2f} times the median of its replicas"
                )
    text = f"stragglers in {steps} steps: " if steps > 1 else "stragglers in this step: "
    return Comparison(
        text + "; ".join(slow) if slow else "",
        {"straggler_ratio": worst, "straggler_rank": float(slowest)},
    )
