"""Runs a few real steps of a layout to time them, without run folder or checkpoint."""

import contextlib
import io
import json
import time

from fivefold.data.prepare import PreparedData
from fivefold.files import write_atomic
from fivefold.layout import Layout
from fivefold.train.engine import Engine
from fivefold.train.evaluation import rank_loader
from fivefold.train.folder.scratch import scratch_folder
from fivefold.train.machine.devices import Asked
from fivefold.train.places import choose_places, join_group
from fivefold.train.ranks.launch import run_ranks
from fivefold.train.ranks.rank_env import RankEnv


def try_layout(
    layout: Layout, data: PreparedData, asked: Asked, steps: int
) -> tuple[list[float], str]:
    """Train for some steps on ranks of this machine, from new weights.

    Args:
        layout: the layout; as many processes are started as it has ranks.
        data: the corpora of the run.
        asked: kind of device to train on.
        steps: number of steps.

    Returns:
        Seconds of each step, of the first rank; and why a rank failed, empty if none did.

    Raises:
        SystemExit: a signal asked to stop.
    """
    config, ranks = layout.config, layout.grid.world_size
    device, threads, bindings = choose_places(layout, RankEnv(), ranks, asked)
    with scratch_folder("trial") as folder:
        file = folder / "times.json"

        def rank(env: RankEnv) -> None:
            engine = Engine(layout, env.rank, join_group(config, env, device, bindings))
            loader, times = rank_loader(layout, env.rank, data.train), list[float]()
            try:
                for _ in range(steps):
                    began = time.perf_counter()
                    engine.step(loader.next_batch())
                    times.append(time.perf_counter() - began)
            finally:
                loader.close()
                engine.graphs.release()
            if env.rank == 0:
                write_atomic(file, json.dumps(times))

        with contextlib.redirect_stderr(io.StringIO()):  # a failure becomes an entry of the table
            end = run_ranks(rank, ranks, describe=layout.grid.name, threads=threads.count)
        if end.signum is not None:
            raise SystemExit(128 + end.signum)
        if end.status:
            return [], end.why or f"exit status {end.status}"
        return json.loads(file.read_text()), ""
