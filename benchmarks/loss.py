"""What losses that keep no logits cost: CPU time of output layer and loss, forward and backward.

    python -m benchmarks.loss [--rounds 9]

1,024 tokens of 256 features, a vocabulary of 16,384, fp32, one thread; in turn, round after round,
so that a busy machine disturbs all alike. Prints the median CPU time, its ratio to the plain loss,
and the bytes of [tokens, vocabulary] tensors that are alive between forward and backward.
"""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.turns import about, cpu_ratio, in_turns
from fivefold.config.memory import DEFAULT_VOCAB_SPLIT
from fivefold.config.model import ModelConfig
from fivefold.memory.cross_entropy import LinearCrossEntropy, NativeCrossEntropy
from fivefold.model.init import initialise
from fivefold.model.transformer import Stage
from fivefold.pipeline.split.stages import StageSpec
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.units import human_bytes

TOKENS, HIDDEN, VOCABULARY = 1024, 256, 16_384
MODEL = ModelConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=8, vocab_size=VOCABULARY)
Loss = Callable[[], Tensor]


def _loss(impl: str) -> Loss:
    stage = Stage(MODEL, StageSpec(False, (), True))
    initialise(stage, seed=1)
    if impl == "native":
        stage.cross_entropy = NativeCrossEntropy(None)
    elif impl == "linear":
        split = DEFAULT_VOCAB_SPLIT
        stage.head_loss = LinearCrossEntropy(None, False, DeferredWeights(), split, split)
    generator = torch.Generator().manual_seed(2)
    x_TH = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    labels_T = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return lambda: stage.head_loss(stage, x_TH, labels_T, None)


def _backward(loss: Loss) -> None:
    loss().backward()


def _kept(loss: Loss) -> int:
    """Bytes of distinct memory, as large as the logits, that the backward needs."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.numel() == TOKENS * VOCABULARY:
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss().backward()
    return sum(sizes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(about(f"{rounds} rounds"))
    losses = {impl: _loss(impl) for impl in ("plain", "native", "linear")}
    backwards = {impl: partial(_backward, loss) for impl, loss in losses.items()}
    found = in_turns(backwards, rounds)
    for impl, taken in found.items():
        ratio, kept = cpu_ratio(taken, found["plain"]), human_bytes(_kept(losses[impl]))
        usual = 1e3 * median(each.cpu for each in taken)
        print(f"{impl:<8}{usual:>6.0f} ms {ratio:>6.2f}x {kept:>10}")


if __name__ == "__main__":
    main()
