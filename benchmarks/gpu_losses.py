"""Output layer and loss on one device: time and memory of the plain, native, linear and torch's.

    python -m benchmarks.gpu_losses [--dry]

16,384 tokens of 4,096 features and a vocabulary of 129,280 in bf16, forward and backward. Prints a
line of JSON for each. `--dry` runs a small one on a CPU.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_layers import Step, measured, tell
from fivefold.config.memory import DEFAULT_VOCAB_SPLIT
from fivefold.config.model import ModelConfig
from fivefold.memory.cross_entropy import LinearCrossEntropy, NativeCrossEntropy
from fivefold.model.transformer import Stage
from fivefold.pipeline.split.stages import StageSpec
from fivefold.tensor.deferred_weight import DeferredWeights

LOSSES = ("torch", "plain", "native", "linear")


def loss_step(kind: str, tokens: int, model: ModelConfig, device: torch.device) -> Step:
    """Forward and backward of output layer and loss."""
    stage = Stage(model, StageSpec(False, (), True)).to(device, torch.bfloat16)
    assert stage.lm_head is not None
    weight = stage.lm_head.weight
    torch.nn.init.normal_(weight, std=0.02)
    if kind == "native":
        stage.cross_entropy = NativeCrossEntropy(None)
    elif kind == "linear":
        split = DEFAULT_VOCAB_SPLIT
        stage.head_loss = LinearCrossEntropy(None, False, DeferredWeights(), split, split)
    x_TH = torch.randn(tokens, model.hidden_size, device=device, dtype=torch.bfloat16)
    x_TH.requires_grad_()
    labels_T = torch.randint(model.vocab_size, (tokens,), device=device)

    def loss() -> Tensor:
        if kind == "torch":
            return F.cross_entropy((x_TH @ weight.t()).float(), labels_T, reduction="sum")
        return stage.head_loss(stage, x_TH, labels_T, None)

    def step() -> None:
        loss().backward()
        weight.grad = x_TH.grad = None

    return step


def rows(dry: bool) -> Iterator[dict[str, Any]]:
    """A row for each loss."""
    device = torch.device("cpu" if dry else "cuda")
    tokens, hidden, vocabulary = (256, 64, 1024) if dry else (16_384, 4096, 129_280)
    model = ModelConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=8, vocab_size=vocabulary
    )
    for kind in LOSSES:
        found = measured(loss_step(kind, tokens, model, device), device)
        yield {"tokens": tokens, "vocabulary": vocabulary, "loss": kind} | found


if __name__ == "__main__":
    tell(rows, __doc__)
