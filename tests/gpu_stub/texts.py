"""Texts written under watch; runs where CUDA computes nothing, so without looking at numbers.

    python -m tests.gpu_stub.texts RECIPE FLAGS...

Continues two prompts on each rank of the layout, and prints a line of JSON for each: where the host
waited for the GPU, or copied memory for which it may have to, from one token to the next.
"""

import json
import os
import sys

import torch.distributed as dist

from fivefold.check import check
from fivefold.cli.verify import Options
from fivefold.config.sources import load
from fivefold.data.tokenizer import Tokenizer
from fivefold.inference.sample import Sampler, Sampling
from fivefold.inference.text_bounds import TextBounds
from fivefold.parallelize import parallelize
from fivefold.train.layout_groups import groups_of
from fivefold.train.machine.devices import choose_device, visible_gpus
from fivefold.train.places import join_group
from fivefold.train.ranks.launch import run_ranks
from fivefold.train.ranks.rank_env import RankEnv
from tests.byte_level import byte_level
from tests.gpu_stub.steps import PAGEABLE, WAITS, Places

TOKENS = 4


def main(argv: list[str]) -> int:
    """Start the ranks; the exit status of the run."""
    options, config = load(argv, Options, lambda _: None)
    layout = check(config, options.nproc)
    device = choose_device("cuda", RankEnv(), options.nproc, visible_gpus())
    tokenizer = Tokenizer(byte_level("the cat sat", ["<|endoftext|>"], 300).to_str(), "it")

    def rank(env: RankEnv) -> None:
        here = join_group(config, env, device)
        groups = groups_of(layout, env.rank, here.type)
        (stage,) = parallelize(layout, groups, here).stages.values()
        sampler = Sampler(config, stage, tokenizer, TextBounds((), frozenset()), groups.tp)
        news = sampler.write(["the cat", "a"], Sampling(TOKENS + 2, temperature=0))
        next(news), next(news)
        found = []
        for _ in range(TOKENS):
            with Places().collected() as places:
                next(news)
            found.append(places)
        report = {
            "rank": env.rank,
            "waits": [places[WAITS] for places in found],
            "pageable": [places[PAGEABLE] for places in found],
        }
        os.write(1, f"{json.dumps(report)}\n".encode())  # at once: other ranks write there, too
        dist.destroy_process_group()

    return run_ranks(rank, options.nproc, describe=layout.grid.name).status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
