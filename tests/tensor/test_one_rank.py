"""Linears of one rank against `F.linear` and autograd."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from fivefold.model.eight_bit.fp8 import E5M2, RECIPES
from fivefold.model.eight_bit.linear import EightBit
from fivefold.model.layers import Embedding, Linear, plain_column, plain_row
from fivefold.tensor import vocabulary
from fivefold.tensor.deferred_weight import DeferredWeights, SumOf, run_works
from fivefold.tensor.exchange import Exchange
from fivefold.tensor.linear import RowParallel
from fivefold.tensor.one_rank import LocalColumn, LocalRow
from tests.tensor.ways import held_sum, in_rooms

T, H, F = 7, 5, 6
ROWS: dict[str, Callable[[DeferredWeights], Callable[[Tensor, Linear], Tensor]]] = {
    "one function": LocalRow,
    "two, of which the first saves": lambda deferred: RowParallel(Exchange(None), deferred),
}
PLACES = (None, slice(1, 4))


def linear(seed: int, inputs: int, outputs: int, bias: bool, rows: slice | None = None) -> Linear:
    """In fp64, with gradients of an earlier backward."""
    torch.manual_seed(seed)
    made = Linear(inputs, outputs, bias).double()
    for parameter in made.parameters():
        parameter.data.normal_()
        parameter.grad = torch.randn_like(parameter)
    made.used = rows
    return made


def twice(one: Linear, inputs: int, outputs: int) -> Linear:
    """The same, with parameters of its own."""
    other = linear(0, inputs, outputs, one.bias is not None)
    other.load_state_dict(one.state_dict())
    for mine, theirs in zip(other.parameters(), one.parameters(), strict=True):
        assert theirs.grad is not None
        mine.grad = theirs.grad.clone()
    return other


def backward(deferred: DeferredWeights, later: bool, ys: list[Tensor], grads: list[Tensor]) -> None:
    if not later:
        torch.autograd.backward(ys, grads)
        return
    with deferred.collect() as works:
        torch.autograd.backward(ys, grads)
    assert works
    for _ in run_works(works):
        pass


def close(ours: Tensor | None, true: Tensor | None) -> None:
    assert ours is not None and true is not None
    torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("later", "adds"), list(product((False, True), repeat=2)))
def test_columns(later: bool, adds: bool) -> None:
    """Some with biases, some with a part of their rows, added to autograd's or in the product."""
    deferred = DeferredWeights()
    deferred.sums = [held_sum] if adds else []
    for biases in product((False, True), repeat=3):
        ours = [linear(n, H, F, bias, PLACES[n % 2]) for n, bias in enumerate(biases)]
        true = [twice(each, H, F) for each in ours]
        held = [p.grad for each in ours for p in each.parameters()]
        x = torch.randn(T, H, dtype=torch.float64).requires_grad_()
        other = x.detach().clone().requires_grad_()
        found = LocalColumn(deferred)(x, *ours)
        expected = [
            y if each.used is None else y[:, each.used]
            for each, y in zip(ours, plain_column(other, *true), strict=True)
        ]
        upstream = [torch.randn_like(y) for y in expected]
        backward(deferred, later, list(found), upstream)
        torch.autograd.backward(expected, upstream)
        for one, two in zip((*found, x.grad), (*expected, other.grad), strict=True):
            close(one, two)
        every = [p for each in ours for p in each.parameters()]
        for p, q, before in zip(
            every, (p for e in true for p in e.parameters()), held, strict=True
        ):
            close(p.grad, q.grad)
            assert p.grad is before or not adds


@pytest.mark.parametrize(("later", "adds"), list(product((False, True), repeat=2)))
@pytest.mark.parametrize("way", ROWS)
def test_rows(way: str, later: bool, adds: bool) -> None:
    deferred = DeferredWeights()
    deferred.sums = [held_sum] if adds else []
    for bias in (False, True):
        ours = linear(4, F, H, bias)
        true = twice(ours, F, H)
        x = torch.randn(T, F, dtype=torch.float64).requires_grad_()
        other = x.detach().clone().requires_grad_()
        found, expected = ROWS[way](deferred)(x, ours), plain_row(other, true)
        upstream = torch.randn_like(found)
        backward(deferred, later, [found], [upstream])
        expected.backward(upstream)
        close(found, expected)
        close(x.grad, other.grad)
        for p, q in zip(ours.parameters(), true.parameters(), strict=True):
            close(p.grad, q.grad)


@pytest.mark.parametrize("later", [False, True])
def test_both_ways_of_rows_have_the_same_bits(later: bool) -> None:
    results = []
    for way in ROWS:
        deferred = DeferredWeights()
        layer = linear(5, F, H, True).float()
        torch.manual_seed(6)
        x, upstream = torch.randn(T, F).requires_grad_(), torch.randn(T, H)
        y = ROWS[way](deferred)(x, layer)
        backward(deferred, later, [y], [upstream])
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for one, two in zip(*results, strict=True):
        assert one is not None and two is not None and torch.equal(one, two)


def test_weight_gradients_put_off_are_the_same_bits() -> None:
    results = []
    for later in (False, True):
        deferred = DeferredWeights()
        layers = [linear(n, H, F, True).float() for n in (6, 7)]
        torch.manual_seed(9)
        for _ in range(3):
            ys = LocalColumn(deferred)(torch.randn(T, H).requires_grad_(), *layers)
            backward(deferred, later, list(ys), [torch.randn_like(y) for y in ys])
        results.append([p.grad for each in layers for p in each.parameters()])
    for one, two in zip(*results, strict=True):
        assert one is not None and two is not None and torch.equal(one, two)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_of_another_arithmetic(recipe: str) -> None:
    """8 bits: the products are those of the plain seam, which quantise the input once."""
    found = []
    for keeps, column in product((False, True), (plain_column, LocalColumn(DeferredWeights()))):
        layers = [linear(n, 40, 24, False) for n in (6, 7)]
        for each in layers:
            products = EightBit(RECIPES[recipe], torch.float64, E5M2)
            each.multiply = replace(products, keeps_input=keeps)
        torch.manual_seed(8)
        x = torch.randn(T, 40, dtype=torch.float64).requires_grad_()
        ys = column(x, *layers)
        torch.autograd.backward(ys, [torch.randn_like(y) for y in ys])
        found.append([*ys, x.grad, *(each.weight.grad for each in layers)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one is not None and two is not None and torch.equal(one, two)


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    deferred = DeferredWeights()
    makes: list[Callable[[Tensor, Linear], Tensor]] = [make(deferred) for make in ROWS.values()]
    makes.append(lambda x, layer: LocalColumn(deferred)(x, layer)[0])
    for weights, inputs in ((False, True), (True, False)):
        for make in makes:
            layer = linear(9, H, F, False).requires_grad_(weights)
            layer.weight.grad = None
            x = torch.randn(T, H, dtype=torch.float64).requires_grad_(inputs)
            y = make(x, layer)
            kept = getattr(y.grad_fn, "saved_tensors", ())
            assert weights or not any(
                torch.equal(each, x) for each in kept if each.shape == x.shape
            )
            y.sum().backward()
            ones = torch.ones(T, F, dtype=torch.float64)
            if weights:
                close(layer.weight.grad, ones.t() @ x)
            else:
                assert layer.weight.grad is None
                close(x.grad, ones @ layer.weight)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("sums", [[], [held_sum], [in_rooms()]], ids=["autograd", "sum", "room"])
def test_gradients_of_tables_and_weights_in_their_rooms(
    later: bool, sums: list[SumOf], gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three microbatches, whose indices repeat rows and leave some out."""
    monkeypatch.setattr(vocabulary, "uses_gpu_kernels", lambda _: gpu)  # whose operations CPUs have
    deferred = DeferredWeights()
    deferred.sums = sums
    layer, table, true = linear(7, H, F, False), Embedding(9, H).double(), Embedding(9, H).double()
    other = twice(layer, H, F)
    torch.manual_seed(8)
    table.weight.data.normal_()
    true.load_state_dict(table.state_dict())
    layer.weight.grad = other.weight.grad = None
    table.lookup = vocabulary.VocabularyLookup(None, False, deferred)
    for _ in range(3):
        indices = torch.randint(0, 5, (T,))
        (found,) = LocalColumn(deferred)(table(indices), layer)
        (expected,) = plain_column(true(indices), other)
        upstream = torch.randn_like(found)
        backward(deferred, later, [found], [upstream])
        expected.backward(upstream)
    close(table.weight.grad, true.weight.grad)
    close(layer.weight.grad, other.weight.grad)
