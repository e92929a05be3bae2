"""Attention to chosen tokens, and what an indexer learns, against their definitions."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.description import pieces
from fivefold.model.attention.sparse import best
from fivefold.model.batch import Batch
from fivefold.model.transformer import Stage
from tests.model.models import SPARSE, batch_of, build

ROWS = [[5, 7, 4], [16]]


def taught(
    model: ModelConfig, documents: Sequence[Sequence[int]] = ROWS
) -> tuple[float, dict[str, Tensor]]:
    """Loss of all indexers, and gradients of every parameter."""
    stage = build(model)
    stage(None, batch_of(model, documents)).backward()
    return float(sum(stage.noted.take())), {n: p.grad for n, p in stage.named_parameters()}


def by_definition(stage: Stage, batch: Batch) -> Tensor:
    """The loss of all indexers, of which autograd can make gradients; attention is left as it is.

    The divergence of an indexer's softmax from the mean of all heads', over the keys that a query
    sees or attends to, of each layer by itself.
    """
    model, total = stage.model, torch.zeros((), dtype=torch.float64)

    def kernel(q: Tensor, k: Tensor, v: Tensor, scope: object, drop: object) -> Tensor:
        nonlocal total
        index, D = scope.index, q.shape[-1]
        products = torch.einsum("bsid,btd->bsit", index.q_BSID, index.k_BLD).relu()
        scores = torch.einsum("bsit,bsi->bst", products, index.w_BSI) * index.rule.scale
        seen = torch.ones(16, 16, dtype=torch.bool).tril() & same
        ranked = scores.masked_fill(~seen, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        chosen = torch.zeros_like(seen).scatter(-1, ranked[..., : index.rule.topk], True) & seen
        attended = torch.einsum("bsnd,btnd->bnst", q, k) * scope.scores.factor(D)
        over = chosen if model.dsa_indexer_use_sparse_loss else seen
        target = attended.masked_fill(~over[:, None], -torch.inf).softmax(-1).mean(1).detach()
        p = scores.masked_fill(~over, -torch.inf).softmax(-1)
        divergence = target * ((target + 1e-10).log() - (p + 1e-10).log())
        total = total + model.dsa_indexer_loss_coeff * divergence.sum() / 16
        heads = attended.masked_fill(~chosen[:, None], -torch.inf).softmax(-1)
        return torch.einsum("bnst,btnd->bsnd", heads, v)

    ids = torch.zeros(2, 16, dtype=torch.int64) if batch.documents is None else batch.documents
    same = ids[:, :, None] == ids[:, None]
    for layer in stage.transformer_layers:
        layer.self_attn.kernel = kernel
    return stage(None, batch) + total


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("topk", [2, 5, 40])
def test_gradients_are_those_of_the_definition(sparse: bool, topk: int) -> None:
    model = replace(SPARSE, dsa_indexer_use_sparse_loss=sparse, dsa_indexer_topk=topk)
    loss, grads = taught(model)
    stage, batch = build(model), batch_of(model, ROWS)
    token_loss = stage(None, batch)
    expected = by_definition(stage, batch)
    expected.backward()
    assert abs(float((expected - token_loss).detach()) - loss) <= 1e-12 * max(loss, 1.0)
    for name, parameter in stage.named_parameters():
        assert (grads[name] - parameter.grad).abs().max() <= 1e-12 * parameter.grad.abs().max()


def test_the_loss_trains_the_indexer_alone() -> None:
    _, grads = taught(SPARSE)
    loss, without = taught(replace(SPARSE, dsa_indexer_loss_coeff=None))
    assert loss == 0.0
    for name, grad in grads.items():
        if ".indexer." in name:
            assert grad.any() and not without[name].any()
        else:
            assert torch.equal(grad, without[name])


def test_queries_may_be_taken_in_any_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, grads = taught(SPARSE)
    monkeypatch.setattr(pieces, "SCORES", 2 * 4 * 16 * 3)  # three queries at a time
    again, sliced = taught(SPARSE)
    assert abs(loss - again) <= 1e-14
    for name, grad in grads.items():
        assert (grad - sliced[name]).abs().max() <= 1e-13 * grad.abs().max(), name


def test_the_best_are_as_many_as_asked_for_and_the_first_of_equal_ones() -> None:
    scores = torch.tensor([[0.0, 3.0, 0.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0, 5.0]])
    assert best(scores, 3).tolist() == [
        [True, True, False, True, False],
        [True, True, False, False, True],
    ]
    hidden = torch.tensor([[1.0, -torch.inf, -torch.inf, -torch.inf]])
    assert best(hidden, 2)[0, 0]
