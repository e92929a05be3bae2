"""Fivefold with its optimizer, and its weights, off the device; bf16 with fp32 masters."""

import time
from typing import Any

import torch

from benchmarks.peer_systems.common import end, measure
from benchmarks.peer_systems.fivefold import build, layout_of
from benchmarks.peer_systems.offload_ways import Asked, asked
from fivefold.check import check
from fivefold.layout import Layout
from fivefold.train.ranks.launch import launch_local
from fivefold.train.ranks.rank_env import RankEnv


def offloaded(given: Asked) -> Layout:
    """The layout with what the way has off the device."""
    way = given.way
    optimizer = "offload_optimizer_states" if given.on_device else "optimizer_cpu_offload"
    values: dict[str, Any] = {"precision": "bf16", optimizer: True}
    if way.optimizer == "nvme":
        values["optimizer_offload_path"] = given.folder
    if way.weights is not None:
        values["param_cpu_offload"] = True
    return check(layout_of(given.row).config.with_values(**values), given.row.ranks)


def main() -> None:
    imported = time.time()
    given = asked()
    layout = offloaded(given)

    def rank(env: RankEnv) -> None:
        torch.set_num_threads(1)
        end(measure(build(layout, env), given.row, given.steps, given.warmup, imported))

    raise SystemExit(launch_local(rank, given.row.ranks))


if __name__ == "__main__":
    main()
