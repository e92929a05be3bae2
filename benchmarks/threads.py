"""What threads of one process are worth: seconds and CPU seconds of a step, by size of its work.

    python -m benchmarks.threads [--rounds 7]

Llama-shaped models of two layers, each trained for a few steps with 1, 2, 4 ... threads in turn,
round after round, so that a busy machine disturbs all alike. Prints how many numbers the hidden
states of a microbatch have, the least that each number of threads took, as what disturbs only adds
to it, and how many threads `fivefold train` would choose.
"""

import argparse
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.turns import Taken, timed
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.training import TrainingConfig
from fivefold.data.packing import Microbatch
from fivefold.layout import Layout
from fivefold.train.engine import Engine
from fivefold.train.machine.threads import choose_threads
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.units import human_seconds

SIZES = ((64, 64), (128, 128), (256, 128), (256, 256), (512, 256), (512, 512))
"""Features and tokens."""
MODEL = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=512)
MICROBATCHES = 4


def _layout(hidden: int, tokens: int) -> Layout:
    model = replace(
        MODEL,
        hidden_size=hidden,
        ffn_hidden_size=3 * hidden,
        num_attention_heads=hidden // 16,
        max_position_embeddings=tokens,
    )
    training = TrainingConfig(
        seq_length=tokens, global_batch_size=MICROBATCHES, train_iters=1000, precision="fp32"
    )
    return check(Config(model=model, training=training), 1)


def _batch(layout: Layout) -> list[Microbatch]:
    length = layout.config.training.seq_length
    chance = np.random.default_rng(1)
    vocabulary = layout.config.model.vocab_size
    positions = np.arange(length)[None]
    return [
        Microbatch(
            tokens_BS=chance.integers(vocabulary, size=(1, length)),
            labels_BS=chance.integers(vocabulary, size=(1, length)),
            positions_BS=positions,
            documents_BS=np.zeros_like(positions),
            token_ids_BS=positions + length * number,
        )
        for number in range(MICROBATCHES)
    ]


def _step(engine: Engine, batch: list[Microbatch], threads: int) -> Taken:
    torch.set_num_threads(threads)
    engine.step(batch)  # what the threads need to wake up is not counted
    return timed(partial(engine.step, batch))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    cores = torch.get_num_threads()
    counts = [2**i for i in range(cores.bit_length()) if 2**i <= cores]
    init_process_group(RankEnv(), "cpu")
    titles = "".join(f"{f'{n} threads' if n > 1 else '1 thread':>14}{'CPU':>10}" for n in counts)
    print(f"{'features':>8}{'tokens':>8}{'numbers':>10}{titles}{'chosen':>8}")
    for hidden, tokens in SIZES:
        layout = _layout(hidden, tokens)
        engine, batch = Engine(layout, 0, torch.device("cpu")), _batch(layout)
        measured = [[_step(engine, batch, n) for n in counts] for _ in range(rounds)]
        cells = ""
        for taken in zip(*measured, strict=True):
            wall, cpu = (min(column) for column in zip(*taken, strict=True))
            cells += f"{human_seconds(wall):>14}{human_seconds(cpu):>10}"
        torch.set_num_threads(cores)
        chosen = choose_threads(layout, 1, "cpu", {}).count
        print(f"{hidden:>8}{tokens:>8}{hidden * tokens:>10,}{cells}{chosen:>8}", flush=True)


if __name__ == "__main__":
    main()
