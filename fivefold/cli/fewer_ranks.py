"""`train --min-nproc`: continues with the remaining ranks, in a layout that fits them."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.check import check
from fivefold.cli.auto_layout import planned
from fivefold.cli.style import note
from fivefold.config.config import Config
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.train.machine.devices import visible_gpus

if TYPE_CHECKING:
    from fivefold.train.ranks.launch import End

DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class FewerRanks:
    """Trains on fewer ranks after a failure that restarts did not cure.

    Such a failure may be caused by one device, which is then left out. If it recurs after the same
    step, the run itself causes it.

    Attributes:
        config: settings of the run; its layout is the planner's where it does not fit fewer ranks.
        by_flag: names of the settings that the planner leaves as they are; None: it is asked only
            where the layout does not fit.
        cluster: the machine by whose times it plans.
        budget: most bytes of tensors on a device as text; None: what the GPU has.
        least: fewest ranks.
        train: trains in a layout on `nproc` ranks.
    """

    config: Config
    by_flag: frozenset[str] | None
    cluster: str
    budget: str | None
    least: int
    train: Callable[..., "End"]

    def run(self, layout: Layout) -> "End":
        """Train in this layout, then, as long as that helps, in layouts of fewer ranks."""
        from fivefold.train.folder.run_folder import RunFolder

        assert self.config.checkpoint.save is not None
        folder, seen = RunFolder(Path(self.config.checkpoint.save)), set[tuple[str, int]]()
        end = self.train(layout, nproc=layout.grid.world_size)
        while end.rank is not None and not (end.stopped or end.of_settings):
            failure = end.why, folder.last_step()
            fewer = None if failure in seen else self._smaller(layout)
            if fewer is None:
                break
            seen.add(failure)
            layout, left = fewer, leave_out(end.rank, layout.grid.world_size)
            note(f"goes on with {layout.grid.world_size} ranks, without rank {end.rank}{left}")
            end = self.train(layout, nproc=layout.grid.world_size)
        return end

    def _smaller(self, layout: Layout) -> Layout | None:
        """The layout with the most ranks below these; None, after printing why, if there is
        none."""
        for world in range(layout.grid.world_size - 1, self.least - 1, -1):
            if self.by_flag is None:
                with suppress(ConfigError):
                    return check(self.config, world)
            try:
                fixed = self.by_flag or frozenset()
                return check(planned(self.config, world, self.cluster, fixed, self.budget), world)
            except ConfigError as error:
                note(f"no layout for {world} ranks: {error}")
        return None


def leave_out(rank: int, ranks: int) -> str:
    """Hide the GPU of a rank from later ranks, if each rank had its own; prints which."""
    count = visible_gpus()
    if count < ranks:  # they shared GPUs, or are on the CPU
        return ""
    named = os.environ.get(DEVICES) or ",".join(map(str, range(count)))
    devices = named.split(",")
    out = devices.pop(rank)
    os.environ[DEVICES] = ",".join(devices)
    return f" and GPU {out}"
