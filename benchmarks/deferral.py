"""What it costs to leave weight gradients for later: CPU time of a stage's forward and backward.

    python -m benchmarks.deferral [--rounds 15]

Two layers of 512 features, 512 tokens, fp32, one thread. In turn, round after round, so that a busy
machine disturbs all alike: the backward in one piece; dX, then what Fivefold's linears put aside;
dX, then dW by PyTorch's split of the autograd graph (torch.distributed.pipelining). Each with and
without recomputation of every layer. Prints medians of the CPU time, and the median over rounds of
the ratio to the first.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.turns import about, cpu_ratio, in_turns
from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig
from fivefold.memory.recompute import install_recompute
from fivefold.model.batch import Batch
from fivefold.model.init import initialise
from fivefold.model.transformer import Stage
from fivefold.pipeline.split.stages import StageSpec
from fivefold.tensor.deferred_weight import DeferredWeights, run_works
from fivefold.tensor.install import install_deferral

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=512,
    num_attention_heads=8,
    ffn_hidden_size=1536,
    vocab_size=512,
    max_position_embeddings=512,
)
TOKENS = 512
RECOMPUTED = MemoryConfig(recompute_granularity="full")
Step = Callable[[], None]


def _stage(recomputed: bool) -> Stage:
    stage = Stage(MODEL, StageSpec(False, tuple(range(MODEL.num_layers)), False))
    initialise(stage, seed=1)
    if recomputed:
        install_recompute(stage, RECOMPUTED)
    return stage


def _input() -> tuple[Tensor, Batch, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, TOKENS, MODEL.hidden_size, generator=generator)
    ids = torch.arange(TOKENS)[None]
    return x.requires_grad_(), Batch(ids % 512, ids % 512, ids, None, ids), grad


def _whole(recomputed: bool) -> Step:
    stage, (x, batch, grad) = _stage(recomputed), _input()

    def step() -> None:
        stage(x, batch).backward(grad)

    return step


def _put_aside(recomputed: bool) -> Step:
    stage, deferred, (x, batch, grad) = _stage(recomputed), DeferredWeights(), _input()
    install_deferral(stage, deferred, recomputes=recomputed)

    def step() -> None:
        out = stage(x, batch)
        with deferred.collect() as works:
            out.backward(grad)
        del out
        for _ in run_works(works):
            pass

    return step


def _graph_split(recomputed: bool) -> Step:
    stage, (x, batch, grad) = _stage(recomputed), _input()

    def step() -> None:
        out = stage(x, batch)
        _, groups = stage_backward_input([out], [grad], [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
        x.grad = None

    return step


WAYS = {
    "in one piece": _whole,
    "dX, then what was put aside": _put_aside,
    "dX, then dW of the graph": _graph_split,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(about(f"{rounds} rounds"))
    print(f"{'':<30}{'kept':>16}{'recomputed':>18}")
    table: dict[str, list[str]] = {name: [] for name in WAYS}
    for recomputed in (False, True):
        found = in_turns({name: make(recomputed) for name, make in WAYS.items()}, rounds)
        for name, taken in found.items():
            ratio = cpu_ratio(taken, found["in one piece"])
            table[name].append(f"{1e3 * median(each.cpu for each in taken):.0f} ms {ratio:.2f}x")
    for name, cells in table.items():
        print(f"{name:<30}" + "".join(f"{cell:>17}" for cell in cells))


if __name__ == "__main__":
    main()
