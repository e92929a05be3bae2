"""What a step takes the host for each layer and microbatch, on a GPU that has little to do.

    python -m benchmarks.gpu_host [--dry]

The engine of `fivefold train` on one rank: sixteen small Llama layers, eight microbatches of one
row, so that the GPU waits for its host throughout. Prints a line of JSON for each precision and way
to keep masters, with the least seconds of some steps. `--dry` has fewer layers and steps, on a CPU,
whose own work is then in the time.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu_layers import seconds, tell
from benchmarks.gpu_runs import batches
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.train.engine import Engine
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.rank_env import RankEnv

MICROBATCHES = 8
WARMUP, STEPS = {False: 3, True: 1}, {False: 6, True: 1}
LAYERS = {False: 16, True: 2}
REMAINDERS = {"use_precision_aware_optimizer": True, "store_param_remainders": True}
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "bf16, masters as weights and remainders": {"precision": "bf16"} | REMAINDERS,
    "fp32": {"precision": "fp32"},
}


def rows(dry: bool) -> Iterator[dict[str, Any]]:
    """A row for each kind of masters."""
    device = init_process_group(RankEnv(), "cpu" if dry else "cuda")
    small = Config(PRESETS["debug-llama"]).with_values(
        num_layers=LAYERS[dry],
        seq_length=64,
        global_batch_size=MICROBATCHES,
        micro_batch_size=1,
        reset_attention_mask=False,
    )
    for kind, settings in KINDS.items():
        layout = check(small.with_values(**settings), 1)
        engine, microbatches = Engine(layout, 0, device), batches(layout)

        def step(engine: Engine = engine, microbatches: Any = microbatches) -> None:
            engine.step(microbatches)

        times = [seconds(step, device) for _ in range(WARMUP[dry] + STEPS[dry])][WARMUP[dry] :]
        yield {"kind": kind, "seconds": min(times) / LAYERS[dry] / MICROBATCHES}


if __name__ == "__main__":
    tell(rows, __doc__)
