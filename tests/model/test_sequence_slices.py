"""A stage run slice by slice computes what it computes of whole sequences."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fivefold.config.model import ModelConfig
from fivefold.model.batch import Batch
from fivefold.model.sequence_slices import SlicedSequence
from fivefold.model.transformer import Stage
from tests.model.models import GPT, LLAMA, batch_of, build

MODELS = {
    "llama": LLAMA,
    "dropout": replace(GPT, hidden_dropout=0.1, attention_dropout=0.1),
}
ROWS = {"documents": [[5, 7], [1, 11]], "whole rows": [[12], [12]]}


def whole(stage: Stage, batch: Batch) -> Tensor:
    loss = stage(None, batch)
    loss.backward()
    return loss.detach()


def sliced(stage: Stage, batch: Batch, count: int, *, again: bool) -> Tensor:
    """Forward from the first slice to the last, backward from the last to the first."""
    sequence, losses = SlicedSequence(), []
    pieces = batch.cut(count)
    for index, piece in enumerate(pieces):
        sequence.begin(index)
        with torch.set_grad_enabled(not again):
            losses.append(stage(None, piece, sequence))
    for index in reversed(range(count)):
        if again:
            sequence.begin(index)
            losses[index] = stage(None, pieces[index], sequence)
        roots: list = [(get_gradient_edge(losses[index]), None), *sequence.release(index)]
        edges, grads = zip(*roots, strict=True)
        torch.autograd.backward(edges, grads)
    assert not any(list(sequence.release(index)) for index in range(count))
    return torch.stack([loss.detach() for loss in losses]).sum()


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", MODELS)
def test_slices_are_the_whole(model: str, rows: str, again: bool) -> None:
    losses, grads = zip(*(_run(MODELS[model], ROWS[rows], k, again) for k in (1, 3)), strict=True)
    assert losses[1] == pytest.approx(losses[0], rel=1e-13)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-12, atol=1e-13)


def _run(
    model: ModelConfig, rows: Sequence[Sequence[int]], count: int, again: bool
) -> tuple[float, dict[str, Tensor]]:
    stage, batch = build(model), batch_of(model, rows)
    loss = whole(stage, batch) if count == 1 else sliced(stage, batch, count, again=again)
    return loss.item(), {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}


def test_a_later_slice_attends_to_an_earlier_one() -> None:
    stage, batch = build(LLAMA), batch_of(LLAMA, [[12]])
    alone = stage(None, batch.cut(2)[1], None)
    sequence = SlicedSequence()
    losses = []
    for index, piece in enumerate(batch.cut(2)):
        sequence.begin(index)
        losses.append(stage(None, piece, sequence))
    assert losses[1] != alone
