"""Attention to chosen tokens: with a mask over all, and from the latents of the chosen alone.

    python -m benchmarks.chosen_tokens [--lengths 1024 4096 ...] [--topk 256]

CPU seconds of a forward and a backward of one layer's attention, and by how much its process grows,
each way and length in a process of its own, in fp32 on one thread.
"""

import argparse
import resource
from functools import partial
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.turns import about, timed
from fivefold.context.sparse import SparseLatents
from fivefold.model.attention.grouped_query import Scope
from fivefold.model.attention.scores import Scores
from fivefold.model.attention.sparse import ChoiceSettings, Index, IndexerTraining
from fivefold.model.context import BackwardLosses
from fivefold.units import human_bytes

HEADS, PLAIN, ROTARY, VALUES, LATENT = 8, 32, 16, 32, 128
INDEX_HEADS, DIM = 4, 32


def _projected(weight: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    latent, key = both.split([LATENT, ROTARY], dim=-1)
    k, v = F.linear(latent, weight).unflatten(-1, (HEADS, -1)).split([PLAIN, VALUES], dim=-1)
    return torch.cat((k, key[:, :, None].expand(-1, -1, HEADS, -1)), dim=-1), v.contiguous()


def measured(length: int, topk: int, alone: bool) -> tuple[float, int]:
    """CPU seconds, and bytes that the process grows by."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q = torch.randn(1, length, HEADS, PLAIN + ROTARY, requires_grad=True)
    latent = torch.randn(1, length, LATENT + ROTARY, requires_grad=True)
    weight = torch.randn(HEADS * (PLAIN + VALUES), LATENT, requires_grad=True)
    of_index = (length, INDEX_HEADS, DIM), (length, DIM), (length, INDEX_HEADS)
    queries, keys, weights = (torch.randn(1, *size, requires_grad=True) for size in of_index)
    training = IndexerTraining(1e-3, True, None, HEADS, lambda x: x, BackwardLosses())
    index = Index(queries, keys, weights, ChoiceSettings(INDEX_HEADS, topk, DIM**-0.5, training))
    scope = Scope(index=index, scores=Scores(0.1, None))
    kernel, up = SparseLatents(None, alone), partial(_projected, weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = timed(lambda: kernel(q, latent, up, (weight,), scope, None).sum().backward())
    return taken.cpu, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def main() -> None:
    """Print a line for each length."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--topk", type=int, default=256)
    args = parser.parse_args()
    print(about(f"{HEADS} heads, topk {args.topk}, forward and backward"))
    print("tokens   with a mask           latents of chosen")
    for length in args.lengths:
        line = f"{length:<7}"
        for alone in (False, True):
            with get_context("spawn").Pool(1) as pool:
                seconds, size = pool.apply(measured, (length, args.topk, alone))
            line += f"{seconds:8.2f} s {human_bytes(size):>10}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
