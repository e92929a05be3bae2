"""Training steps under watch; runs where CUDA computes nothing, so without looking at numbers.

    python -m tests.gpu_stub.steps [--forget-waits] RECIPE FLAGS...

Prints a line of JSON for each rank: the races, how often the host waited for the GPU in a step, and
how many steps were replays.
"""

import ctypes
import json
import os
import sys
from contextlib import nullcontext, suppress

from fivefold.audit.streams import StreamWatch
from fivefold.check import check
from fivefold.cli.verify import Options
from fivefold.config.sources import load
from fivefold.mesh.collectives import Pending
from fivefold.train.devices import choose_device, visible_gpus
from fivefold.train.engine import Engine
from fivefold.train.launch import init_process_group, launch_local
from fivefold.train.rank_env import RankEnv
from fivefold.verify.batches import global_batch, microbatches, rows_of

STEPS = 3


def host_waits() -> int:
    """How often this process has waited for the GPU, as the stub's runtime counts it."""
    count = ctypes.CDLL("libcudart.so.13").fake_counted
    count.restype = ctypes.c_long
    return int(count(0))


def main(argv: list[str]) -> int:
    """Start the ranks; the exit status of the run."""
    forgets = argv[0] == "--forget-waits"
    options, config = load(argv[forgets:], Options, print)
    layout = check(config, options.nproc)
    device = choose_device("cuda", RankEnv(), options.nproc, visible_gpus())

    def rank(env: RankEnv) -> None:
        here = init_process_group(env, device.kind, shared=device.shared, timeout_seconds=60)
        engine = Engine(layout, env.rank, here)
        rows = rows_of(config, layout.grid.dp_rank(env.rank), layout.grid.dp)
        batches = [microbatches(config, global_batch(config, i), rows) for i in range(STEPS)]
        if forgets:
            Pending.wait = lambda pending: pending.finish()  # type: ignore[method-assign]
        waits = []
        # The watch itself does not wait, but a warm-up shows what a step usually does.
        for watch in (StreamWatch(), nullcontext()):
            with watch as followed:
                before = host_waits()
                for batch in batches:
                    with suppress(ValueError, OverflowError):  # of what memory held, read last
                        engine.step(batch)
                    waits.append(host_waits() - before)
                    before = host_waits()
            if followed is not None:
                races = [f"{race}" for race in followed.races.found]
        found = {"rank": env.rank, "races": races, "waits": waits[STEPS + 1 :]}
        found["replayed"] = engine.graphs.replayed
        os.write(1, f"{json.dumps(found)}\n".encode())  # at once: other ranks write there, too

    return launch_local(rank, layout.grid.world_size, describe=layout.grid.name)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
