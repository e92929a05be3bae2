"""Packed rows in one call: the definition's results, by a stand-in that has no device."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fivefold.model.attention.blocks import DocumentMask, cut
from fivefold.model.attention.cuda_kernels import Grads
from fivefold.model.attention.grouped_query import Scope, attention
from fivefold.model.attention.kernels import Plain
from fivefold.model.attention.scores import Scores
from fivefold.model.attention.varlen import PackedFlash, Pieces, lacking_packed, packed_attention
from fivefold.model.batch import Documents
from tests.model.plain_attention import plain_attention

STARTS = (0, 7, 8, 20, 39, 40)


class ByDocument:
    """What a packed kernel computes, document by document."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Pieces) -> tuple[Tensor, Tensor]:
        out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_zeros(q.shape[1], len(q))
        for first, last in pairwise(at.starts.tolist()):
            rows = slice(first, last)
            for block in _blocks(last - first, at):
                one, other = Plain().forward(*(_heads_first(x[rows]) for x in (q, k, v)), block)
                out[rows], lse[:, rows] = one[0].transpose(0, 1), other[0]
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Pieces
    ) -> Grads:
        found = tuple(torch.zeros_like(x) for x in (q, k, v))
        for first, last in pairwise(at.starts.tolist()):
            rows = slice(first, last)
            parts = [_heads_first(x[rows]) for x in (grad, q, k, v, out)]
            for block in _blocks(last - first, at):
                grads = Plain().backward(*parts, lse[None, :, rows], block)
                for whole, part in zip(found, grads, strict=True):
                    whole[rows] = part[0].transpose(0, 1)
        return found


def _blocks(length: int, at: Pieces):
    """The one block that a short document is."""
    blocks = cut(((0, length),), ((0, length),), DocumentMask((0, length), at.window), tile=length)
    assert len(blocks) == 1
    return blocks


def _heads_first(x_TND: Tensor) -> Tensor:
    return x_TND.transpose(0, 1)[None]


@pytest.mark.parametrize("values", [6, 4], ids=["equal", "latent"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_one_call_is_the_definition(
    packed: bool, window: int | None, sinks: bool, values: int
) -> None:
    random = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)

    q, k, v = tensor(2, 20, 4, 6), tensor(2, 20, 2, 6), tensor(2, 20, 2, values)
    grad, heads = tensor(2, 20, 4, values), tensor(4)
    inputs = (q, k, v, heads) if sinks else (q, k, v)
    documents = Documents(STARTS, 2) if packed else None
    pieces = Pieces(torch.tensor(STARTS if packed else (0, 20, 40)), 20, window)
    sink = heads if sinks else None
    expected = plain_attention(q, k, v, Scope(documents, window, sinks=sink))
    found = packed_attention(q, k, v, pieces, ByDocument(), sink)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(out, inputs, grad) for out in (expected, found)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


def test_flash_attention_takes_these_arguments() -> None:
    """Its operators' own rules of shapes; they compute nothing."""
    q = torch.empty(40, 4, 16, dtype=torch.bfloat16, device="meta")
    k = v = torch.empty(40, 2, 16, dtype=torch.bfloat16, device="meta")
    pieces = Pieces(torch.empty(6, dtype=torch.int32, device="meta"), 19, window=5)
    out, lse = PackedFlash(0.7).forward(q, k, v, pieces)
    assert out.shape == q.shape and lse.shape == (4, 40)
    grads = PackedFlash(0.7).backward(out, q, k, v, out, lse, pieces)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_documents_know_their_starts_on_the_device_and_their_longest() -> None:
    documents = Documents(STARTS, 2)
    assert documents.starts_C.tolist() == list(STARTS)
    assert documents.starts_C.dtype == torch.int32
    assert documents.longest == 19


def test_processors_attend_by_document() -> None:
    q = torch.empty(2, 20, 4, 16, dtype=torch.bfloat16)
    assert "CUDA" in lacking_packed(q, q)
    assert "features" in lacking_packed(q, torch.empty(2, 20, 4, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("values", [64, 48], ids=["equal", "latent"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shared", [1, 4])
def test_flash_attention_is_the_definition(
    shared: int, window: int | None, sinks: bool, values: int
) -> None:
    random = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=random)
        return made.to("cuda", torch.bfloat16).requires_grad_()

    q, k, v = (
        tensor(2, 20, 4, 64),
        tensor(2, 20, 4 // shared, 64),
        tensor(2, 20, 4 // shared, values),
    )
    grad, heads = tensor(2, 20, 4, values), tensor(4)
    if why := lacking_packed(q, v):
        pytest.skip(why)
    documents = Documents(STARTS, 2, q.device)
    inputs = (q, k, v, heads) if sinks else (q, k, v)
    scope = Scope(documents, window, sinks=heads if sinks else None, scores=Scores(0.2))
    found = attention(q, k, v, scope, None)
    grads = torch.autograd.grad(found, inputs, grad)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, heads)]
    scope = replace(scope, sinks=wide[3] if sinks else None)
    expected = plain_attention(*wide[:3], scope)
    true = torch.autograd.grad(expected, wide[: len(inputs)], grad.double())
    torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=3e-2)
    for ours, theirs in zip(grads, true, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=3e-2, atol=3e-2)
