"""What is off the device in a row of benchmarks/offload_steps.py; imports no torch."""

import argparse
from typing import NamedTuple

from benchmarks.peer_systems.rows import Row


class Way(NamedTuple):
    """What leaves the device, and for where.

    Attributes:
        zero: ZeRO stage.
        optimizer: "cpu" or "nvme".
        weights: "cpu" or "nvme"; None: they stay.
    """

    zero: int
    optimizer: str = "cpu"
    weights: str | None = None


WAYS = {
    "ZeRO-Offload, stage 2": Way(2),
    "ZeRO-Offload, stage 3": Way(3),
    "ZeRO-Infinity, host": Way(3, "cpu", "cpu"),
    "ZeRO-Infinity, disk": Way(3, "nvme", "cpu"),
}


class Asked(NamedTuple):
    """A worker's command line: the way, the row that it is timed as, and the folder of the disk."""

    way: Way
    row: Row
    steps: int
    warmup: int
    folder: str
    on_device: bool


def asked() -> Asked:
    """Read a worker's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--on-device", action="store_true")
    given = parser.parse_args()
    way = WAYS[given.way]
    row = Row(given.way, given.way, dp=given.ranks, zero=way.zero)
    return Asked(way, row, given.steps, given.warmup, given.folder, given.on_device)
