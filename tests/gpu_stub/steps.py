"""Training steps under watch; runs where CUDA computes nothing, so without looking at numbers.

    python -m tests.gpu_stub.steps [--forget NAME] RECIPE FLAGS... [+ RECIPE FLAGS...]...

Takes steps in each layout, evaluates, saves and loads. Prints a line of JSON for each rank and
layout: the races, where the host waited for the GPU in a step, or copied memory for which it may
have to, and how many steps were replays. `--forget` plants a missing wait, see `FORGOTTEN`.
"""

import ctypes
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from fivefold.audit.streams import StreamWatch
from fivefold.audit.watch import project_line
from fivefold.check import check
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.cli.verify import Options
from fivefold.config.sources import load
from fivefold.layout import Layout
from fivefold.train.engine import Engine
from fivefold.train.machine.devices import choose_device, visible_gpus
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.launch import run_ranks
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.verify.batches import EVALUATION, global_batch, microbatches, rows_of
from tests.gpu_stub.planted import FORGOTTEN
from tests.gpu_stub.pretended import pretending

STEPS = 3
WAITS, PAGEABLE = 0, 3
"""What the stub's runtime counts: waits of the host, and copies that are asynchronous in name only,
of memory that is not pinned."""


class Places:
    """Where the host waits for the GPU, and where it copies memory that is not pinned."""

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL("libcudart.so.13")
        self._hook = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._count)
        self._lock = Lock()
        self._found: dict[int, Counter[str]] = {}

    @contextmanager
    def collected(self) -> Iterator[dict[int, Counter[str]]]:
        """The places of the block, complete at its end."""
        self._found = {WAITS: Counter(), PAGEABLE: Counter()}
        self._runtime.fake_set_hook(self._hook)
        try:
            yield self._found
        finally:
            self._runtime.fake_set_hook(None)

    def _count(self, kind: int) -> None:
        if kind in self._found:
            place = project_line()
            with self._lock:
                self._found[kind][place] += 1


@dataclass(frozen=True)
class Exercise:
    """What is done with a layout on one rank.

    Attributes:
        layout: the layout.
        rank: the rank.
        device: its device.
        folder: where it saves.
    """

    layout: Layout
    rank: int
    device: torch.device
    folder: Path

    def run(self) -> dict[str, Any]:
        """What is found."""
        config, grid = self.layout.config, self.layout.grid
        rows = rows_of(config, grid.dp_rank(self.rank), grid.dp)
        *batches, evaluation = [
            microbatches(config, global_batch(config, i), rows) for i in (*range(STEPS), EVALUATION)
        ]
        engine = Engine(self.layout, self.rank, self.device)
        # The watch itself does not wait, but a warm-up shows what a step usually does.
        with StreamWatch() as watch:
            engine.step(batches[0])
            engine.step(batches[1])
            self._save_and_load(engine, batches[2], evaluation)
        races = sorted(f"{race}" for race in watch.races.found)
        found: list[dict[int, Counter[str]]] = []
        for batch in batches[1:]:
            with Places().collected() as places:
                engine.step(batch)
            found.append(places)
        return {
            "rank": self.rank,
            "races": races,
            "waits": [places[WAITS] for places in found],
            "pageable": [places[PAGEABLE] for places in found],
            "replayed": engine.graphs.replayed,
        }

    def _save_and_load(self, engine: Engine, batch: Sequence[Any], evaluation: Any) -> None:
        """Go on while a thread writes, evaluate, and load what was written."""
        checkpointer = Checkpointer(self.folder, async_save=True)
        checkpointer.save(engine.steps, engine.written_tensors(), {})
        engine.step(batch)
        engine.evaluate([evaluation])
        engine.sound()
        checkpointer.wait()
        step = checkpointer.steps()[-1]
        kept = engine.stored_tensors()
        checkpointer.load(step, kept)
        engine.after_load(step, kept)


def main(argv: list[str]) -> int:
    """Start the ranks; the exit status of the run."""
    forgotten = argv[1] if argv[0] == "--forget" else None
    words = argv[2 if forgotten else 0 :]
    layouts = []
    for apart, part in groupby(words, lambda word: word == "+"):
        if not apart:
            options, config = load([*part], Options, lambda _: None)
            layouts.append(check(config, options.nproc))
    ranks = max(layout.grid.world_size for layout in layouts)
    device = choose_device("cuda", RankEnv(), ranks, visible_gpus())

    def rank(env: RankEnv) -> None:
        for number, layout in enumerate(layouts):
            world = layout.grid.world_size
            if env.rank >= world:
                continue
            mine = replace(env, world_size=world, local_world_size=world, generation=number)
            here = init_process_group(mine, device.kind, shared=device.shared, timeout_seconds=180)
            folder = Path(f"saved-{number}")
            with pretending(), FORGOTTEN[forgotten]() if forgotten else nullcontext():
                found = Exercise(layout, env.rank, here, folder).run()
            found["layout"] = number
            os.write(1, f"{json.dumps(found)}\n".encode())  # at once: other ranks write there, too
            dist.destroy_process_group()

    return run_ranks(rank, ranks, describe=layouts[0].grid.name).status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
