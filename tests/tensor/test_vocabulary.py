"""Embedding and loss over a split vocabulary against torch's own, in fp64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.caps import capped
from fivefold.model.layers import Embedding
from fivefold.model.loss import LossRule
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.vocabulary import VocabularyCrossEntropy, VocabularyLookup, _own_rows
from tests.pool import run

T, H = 8, 5
TRUE, PADDED = 6, 16  # over four ranks: all true, half true, padding, padding


def _random(seed: int, *shape: int) -> Tensor:
    """The same on every rank, and not contiguous if it has two dims."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape[::-1], generator=generator, dtype=torch.float64).t()


def _close(ours: Tensor | None, true: Tensor | None) -> None:
    assert ours is not None and true is not None
    torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


def _look_up(rank: int, world: int, sequence: bool) -> None:
    table = _random(1, PADDED, H)
    indices_T = torch.randint(TRUE, (T,), generator=torch.Generator().manual_seed(2))
    weight = table.clone().requires_grad_()
    true = F.embedding(indices_T, weight)
    embedding = Embedding(PADDED // world, H).double()
    embedding.weight.data.copy_(table.chunk(world)[rank])
    embedding.lookup = VocabularyLookup(dist.group.WORLD, sequence, DeferredWeights())
    ours = embedding(indices_T)
    assert torch.equal(ours, true.chunk(world)[rank] if sequence else true)
    upstream = _random(3, T, H)
    true.backward(upstream)
    ours.backward(upstream.chunk(world)[rank] if sequence else upstream)
    assert weight.grad is not None
    _close(embedding.weight.grad, weight.grad.chunk(world)[rank])


@pytest.mark.parametrize("sequence", [False, True])
def test_look_up(sequence: bool) -> None:
    run(4, _look_up, sequence)


Z = 0.03
LABELS = {
    "all valid": [0, 1, 2, 3, 4, 5, 0, 3],
    "some ignored": [0, -100, 5, 3, -100, 1, 2, -100],
    "all ignored": [-100] * T,
    "all on one rank": [4, 5] * 4,
}


def _loss(
    rank: int, world: int, labels: list[int], smoothing: float, weighted: bool, padded: int
) -> None:
    labels_T = torch.tensor(labels)
    logits_TV = (4 * _random(4, T, padded)).requires_grad_()
    weights_T = torch.rand(T, generator=torch.Generator().manual_seed(5)).double()
    cap = 1.5 if weighted else None
    true_TV = capped(logits_TV[:, :TRUE], cap)
    losses_T = F.cross_entropy(true_TV, labels_T, reduction="none", label_smoothing=smoothing)
    losses_T = losses_T + Z * true_TV.logsumexp(1).square() * (labels_T != -100)
    true = (losses_T * weights_T if weighted else losses_T).sum()
    true.backward(torch.tensor(0.7, dtype=torch.float64))
    logits_Tv = logits_TV.detach().chunk(world, 1)[rank].requires_grad_()
    told: list[Tensor] = []
    rule, given = LossRule(TRUE, smoothing, Z, cap), weights_T if weighted else None
    ours = VocabularyCrossEntropy(dist.group.WORLD)(logits_Tv, labels_T, rule, given, told)
    _close(ours, true)
    z_T = Z * true_TV.logsumexp(1).square() * (labels_T != -100)
    _close(told[0], (z_T * weights_T if weighted else z_T).sum().detach())
    ours.backward(torch.tensor(0.7, dtype=torch.float64))
    assert logits_TV.grad is not None
    _close(logits_Tv.grad, logits_TV.grad.chunk(world, 1)[rank])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("labels", LABELS)
def test_cross_entropy(labels: str, smoothing: float) -> None:
    run(4, _loss, LABELS[labels], smoothing, True, PADDED)
    run(2, _loss, LABELS[labels], smoothing, False, TRUE)


def _half_precision(rank: int, world: int) -> None:
    labels_T = torch.tensor(LABELS["some ignored"])
    logits_TV = _random(6, T, PADDED).bfloat16()
    logits_Tv = logits_TV.chunk(world, 1)[rank].requires_grad_()
    ours = VocabularyCrossEntropy(dist.group.WORLD)(logits_Tv, labels_T, LossRule(TRUE))
    true = F.cross_entropy(logits_TV[:, :TRUE].float(), labels_T, reduction="sum")
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, true)
    ours.backward()
    assert logits_Tv.grad is not None and logits_Tv.grad.dtype == torch.bfloat16


def test_bf16_logits_give_an_fp32_loss() -> None:
    run(2, _half_precision)


def _far_apart(rank: int, world: int) -> None:
    """Logits whose exponentials overflow, the largest one on each rank in turn."""
    labels_T = torch.arange(T) % TRUE
    logits_TV = _random(7, T, PADDED).contiguous()
    logits_TV[torch.arange(T), torch.arange(T) % TRUE] = 1e4
    logits_Tv = logits_TV.chunk(world, 1)[rank]
    loss = VocabularyCrossEntropy(dist.group.WORLD)(logits_Tv, labels_T, LossRule(TRUE))
    assert loss.item() == 0.0


def test_large_logits_do_not_overflow() -> None:
    run(4, _far_apart)


def test_rows_of_other_ranks_are_spread_over_all_of_ones_own() -> None:
    """One row for all would be added up by a GPU token by token."""
    indices_T, held = torch.cat([torch.full((3,), -100), torch.arange(4 * 16)]), 16
    here_T, at_T = _own_rows(indices_T, 16, held)
    assert at_T[here_T].tolist() == [*range(16)]
    assert at_T[~here_T].bincount(minlength=held).max() <= 3 + 3  # each row three times, and -100
